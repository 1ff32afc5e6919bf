"""The handler that forgets a job: in its tenant's database where it lies apart, then in the store.

In this order: what the store has forgotten nobody deletes a second time, and a record that stayed behind would keep its
reference.
"""

from __future__ import annotations

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.door import Call, Handler, Reply
from comfyfleet.hub.owners import check_sees
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId
from comfyfleet.tenancy.homes import Homes

_AGAIN_S = 5.0


class DeleteHandlers:
    def __init__(self, engine: Engine, homes: Homes) -> None:
        self._engine = engine
        self._homes = homes

    def bound(self) -> dict[str, Handler]:
        return {"delete_job": self.delete}

    async def delete(self, call: Call[None]) -> Reply:
        job_id = JobId(call.parameters["job_id"])
        await check_sees(call.caller, self._engine.store, job_id)
        await self._engine.forget(job_id, self._forget_apart)
        return Reply(204)

    async def _forget_apart(self, dispatch: Dispatch) -> None:
        home = await self._homes.of(dispatch.tenant) if dispatch.is_apart else None
        if home is None:
            return
        job_id, database = dispatch.job_id, home.database
        if not await database.forget_jobs([job_id], float("inf")) and await database.get(job_id) is not None:
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"job {job_id!r} cannot be deleted just now: its tenant is on its way to another database, or it is "
                "being taken up again; try again",
                retry_after_s=_AGAIN_S,
            )
