"""Which key each worker was last heard of with at this hub: with the key ends what the worker has here."""

from __future__ import annotations

from comfyfleet.engine.engine import Engine
from comfyfleet.model.access import Caller, Role
from comfyfleet.model.ids import WorkerId
from comfyfleet.tenancy.keys import Keys

_MAX_REMEMBERED = 10_000


class KeyedWorkers:
    def __init__(self, engine: Engine, keys: Keys) -> None:
        self._engine = engine
        self._keys = keys
        self._last: dict[WorkerId, str] = {}

    def heard(self, caller: Caller, worker_id: WorkerId) -> None:
        if caller.role is Role.WORKER and self._last.get(worker_id) != caller.key_id:
            self._last[worker_id] = caller.key_id
            if len(self._last) > _MAX_REMEMBERED:
                del self._last[next(iter(self._last))]

    def keys(self) -> set[str]:
        return set(self._last.values())

    async def end(self, key_id: str, named: WorkerId | None = None) -> None:
        """The key is not good any more. `named`: the worker it was for, which may be known at another hub alone."""
        gone = [worker_id for worker_id, used in self._last.items() if used == key_id]
        if named is not None and named not in self._last and not await self._keys.held_by(named):
            gone.append(named)
        for worker_id in gone:
            self._last.pop(worker_id, None)
            await self._engine.expel_worker(worker_id, "its key was revoked, or has expired")
