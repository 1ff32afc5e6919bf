"""The handler that forgets a job: in the store, then in its tenant's database where it lies apart."""

from __future__ import annotations

import logging

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.door import Call, Handler, Reply
from comfyfleet.hub.owners import check_sees
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId
from comfyfleet.tenancy.homes import Homes

_LOG = logging.getLogger(__name__)


class DeleteHandlers:
    def __init__(self, engine: Engine, homes: Homes) -> None:
        self._engine = engine
        self._homes = homes

    def bound(self) -> dict[str, Handler]:
        return {"delete_job": self.delete}

    async def delete(self, call: Call[None]) -> Reply:
        job_id = JobId(call.parameters["job_id"])
        await check_sees(call.caller, self._engine.store, job_id)
        forgotten = await self._engine.forget(job_id)
        if forgotten.is_apart:
            try:
                home = await self._homes.of(forgotten.tenant)
                if home is not None:
                    await home.database.forget_jobs([job_id], float("inf"))
            except Fault as fault:
                _LOG.warning(
                    "job %s goes from its tenant's database when its time is over: %s", job_id, fault
                )
        return Reply(204)
