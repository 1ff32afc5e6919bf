"""The book of deliveries where two hubs write in it at once."""

from __future__ import annotations

from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.webhook import Delivery, DeliveryStatus
from comfyfleet.policy.delivering import asked_again, given_up
from comfyfleet.stores.cabinet import MemoryCabinet
from comfyfleet.tenancy.deliveries import DUE, Deliveries, due_name, name_of

JOB = JobId("01900000-0000-7000-8000-000000000000")


class Interleaved(MemoryCabinet):
    """Before an entry is removed, somebody asks for its delivery again."""

    async def remove(self, drawer: str, name: str) -> bool:
        if drawer == DUE:
            await Deliveries(self).change(
                name.partition("/")[2], lambda delivery: asked_again(delivery, 20.0)
            )
        return await super().remove(drawer, name)


async def test_one_that_is_asked_for_again_while_its_entry_is_put_right_stays_due() -> None:
    over = given_up(
        Delivery(JOB, 3, "job", TenantId("acme"), "https://x.example/", FactKind.FAILED, 1, 1.0, 1.0), "", 2.0
    )
    cabinet = Interleaved()
    book = Deliveries(cabinet)
    await book.add(over)
    # As whoever asks for it leaves it for a moment: the entry is there, the delivery not yet changed.
    entry = due_name(asked_again(over, 20.0))
    await cabinet.put(DUE, entry, b'["x.example","acme"]', version=None)
    await book.mend(entry)
    known = await book.get(name_of(over))
    assert known is not None and known[0].status is DeliveryStatus.PENDING
    assert entry in [each.name for each in await book.due("", 10)]
