"""What a run left, at the hub: announced by whoever holds the lease, and linked with what its job brought.

For agents far away (`files.py`) and those in the hub's own process (`inside.py`). Where bytes lie is `assets/`'s.
"""

from __future__ import annotations

import hmac

from comfyfleet.engine.engine import Engine
from comfyfleet.model.dispatch import Dispatch, LeaseRef
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.ports import Assets
from comfyfleet.wire.files import OutputBody


class OutputDesk:
    def __init__(self, engine: Engine, assets: Assets) -> None:
        self._engine = engine
        self._assets = assets

    async def leased(self, ref: LeaseRef) -> Dispatch:
        """The dispatch, if this lease of it is alive."""
        dispatch = await self._engine.store.load(ref.job_id)
        if dispatch is None or not _holds(dispatch, ref):
            raise Refusal(RefusalCode.LEASE_LOST, "the lease is over: what it left is not kept")
        return dispatch

    async def announce(
        self, dispatch: Dispatch, ref: LeaseRef, outputs: tuple[OutputBody, ...]
    ) -> list[FileRecord]:
        job = await self._engine.store.records.get(ref.job_id)
        brought = (
            () if job is None else tuple(dict.fromkeys(each.file_id for each in job.payload.input_files))
        )
        return [
            await self._assets.reserve(
                dispatch.tenant,
                name=each.name,
                content_type=each.type,
                kind="output",
                size=each.size,
                sha256=each.sha256,
                job_id=ref.job_id,
                attempt_id=ref.attempt_id,
                derived_from=brought,
            )
            for each in outputs
        ]


def _holds(dispatch: Dispatch, ref: LeaseRef) -> bool:
    lease = dispatch.lease
    return (
        lease is not None
        and (dispatch.round, lease.number, lease.epoch) == (ref.round, ref.number, ref.epoch)
        and hmac.compare_digest(lease.token.encode(), ref.token.encode(errors="replace"))
    )
