"""What waiting jobs need and a worker lacks, told to its agent: it may be there a moment later.

The agent is told with each heartbeat, and looks for it while it is told. A class that nobody can take stays known for a
while after its last job, so agents may look for something in vain while other jobs wait.
"""

from __future__ import annotations

from comfyfleet.engine.commands import CommandDesk
from comfyfleet.engine.context import Context
from comfyfleet.model.ids import ClassKey, ProfileKey, WorkerId
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.policy.feasibility import names_missing
from comfyfleet.ports import Timer

_FRESH_S = 2.0
_MAX_CLASSES = 100
_MAX_NAMES = 50
_MAX_NAME = 300
"""No file and no class is called anything longer; what a caller writes into a graph may be."""
_MAX_CALLED = 100
"""Others hear of it with their next heartbeat."""
_CALL_EVERY_S = 2.0


class MissingDesk:
    def __init__(self, context: Context, commands: CommandDesk) -> None:
        self._context = context
        self._commands = commands
        self._read_at = float("-inf")
        self._classes: list[RequirementClass] = []
        """Those that nobody who is there can take, where jobs wait."""
        self._known: dict[ProfileKey, tuple[str, ...]] = {}
        """For them: what workers of a profile lack."""
        self._called_for: dict[ClassKey, None] = {}
        self._to_call: dict[WorkerId, None] = {}
        self._called_at = float("-inf")
        self._timer: Timer | None = None

    async def of(self, worker_id: WorkerId) -> tuple[str, ...]:
        worker = self._context.fleet.workers.get(worker_id)
        if worker is None or worker.is_offline:
            return ()
        await self._read()
        if not self._classes:
            return ()
        known = self._known.get(worker.profile)
        if known is None:
            names = (
                name
                for cls in self._classes
                for name in names_missing(cls, worker_id, worker.capabilities)
                if len(name) <= _MAX_NAME
            )
            known = self._known[worker.profile] = tuple(dict.fromkeys(names))[:_MAX_NAMES]
        return known

    def call(self, cls: RequirementClass) -> None:
        """A job of this class has come and nobody can take it: those that lack a name or two are to ask at once, or
        soon, where others were called a moment ago."""
        self._read_at = float("-inf")
        fleet = self._context.fleet
        key = fleet.key_of(cls)
        if key in self._called_for:
            return
        if len(self._called_for) >= _MAX_CLASSES:
            self._called_for.clear()
        self._called_for[key] = None
        for worker in fleet.workers.values():
            if len(self._to_call) == _MAX_CALLED:
                break
            if not worker.is_offline and names_missing(cls, worker.worker_id, worker.capabilities):
                self._to_call[worker.worker_id] = None
        if self._timer is None and self._to_call:
            clock = self._context.clock
            wait_s = self._called_at + _CALL_EVERY_S - clock.monotonic()
            if wait_s <= 0:
                self._call_now()
            else:
                self._timer = clock.call_at(clock.now() + wait_s, self._call_now)

    def _call_now(self) -> None:
        """Whoever is called sends a heartbeat and looks at its servers: not for each of many jobs. When the engine has
        closed meanwhile, nobody listens any more."""
        self._timer, self._called_at = None, self._context.clock.monotonic()
        called, self._to_call = self._to_call, {}
        for worker_id in called:
            self._commands.call(worker_id)

    async def _read(self) -> None:
        now = self._context.clock.monotonic()
        if now < self._read_at + _FRESH_S:
            return
        self._read_at = now
        fleet = self._context.fleet
        there = {
            worker.profile
            for worker in fleet.workers.values()
            if not worker.is_offline and not fleet.is_held_back(worker)
        }
        # The newest are the last.
        found = [cls for key, cls in fleet.classes.items() if fleet.profiles_for(key).isdisjoint(there)]
        is_waiting = bool(found) and (await self._context.store.counts()).waiting > 0
        self._classes = found[-_MAX_CLASSES:] if is_waiting else []
        self._known = {}
