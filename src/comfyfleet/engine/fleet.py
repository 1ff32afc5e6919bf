"""The workers an engine knows, the classes that wait, and which profile may take which class.

Feasibility is policy's; here it is asked once for each new class and each new profile, and the answers are put into the
store's table. A profile is a worker's capabilities as far as live classes can tell workers apart, so equal workers, and
workers that differ only in what nobody asks for, share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Set

import msgspec

from comfyfleet.model.block import Block
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import ClassKey, ProfileKey, WorkerId
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import Capabilities, LiveState, WorkerDelta, WorkerRecord
from comfyfleet.policy.feasibility import is_feasible, is_held_back
from comfyfleet.policy.poison_workflows import is_refusing
from comfyfleet.policy.projection import Vocabulary, profile_key
from comfyfleet.policy.registration import capabilities_of, registered_again, registered_first
from comfyfleet.ports import Clock, Store

# After so many growths the vocabulary is made anew from what waits, so that words nobody uses any more are forgotten.
_REBUILD_AFTER = 1024
_SAVE_SEEN_EVERY_S = 10.0
_SET_S = 1.0
_NONE: Set[ProfileKey] = frozenset()


class Fleet:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._began = clock.now() - clock.monotonic()
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.classes: dict[ClassKey, RequirementClass] = {}
        self.with_blocks: set[WorkerId] = set()
        """Workers that have a block with an end, as far as is known here: whether it is over is the store's to say."""
        self.refused: frozenset[str] = frozenset()
        """Workflows of tenants that no worker gets because servers died of them, as targets of blocks."""
        self.is_fresh_since = float("-inf")
        """When what others may change was last read from the store, by the clock that nobody sets."""
        self._fits: dict[ClassKey, set[ProfileKey]] = {}
        self._judged: Set[ProfileKey] = frozenset()
        """Profiles for which `_fits` holds the verdict on every class that is in it."""
        self._vocabulary = Vocabulary.of(())
        self._growths = 0
        self._selectivity: dict[ClassKey, int] = {}
        self._signatures: frozenset[str] | None = None
        self._keys: dict[RequirementClass, ClassKey] = {}
        self._table_version = -1
        self._saved_at: dict[WorkerId, float] = {}
        self._changing = asyncio.Lock()

    # what others, or this engine in an earlier life, have put into the store

    async def load(self) -> None:
        async with self._changing:
            await self._catch_up()
        for block in await self._store.blocks():
            self.note_block(block)

    async def freshen(self, max_age_s: float) -> None:
        if self._clock.monotonic() >= self.is_fresh_since + max_age_s:
            await self.sync()

    async def sync(self) -> bool:
        """Reads again what other engines may have changed. True: somebody may find what was not there before."""
        self.is_fresh_since = self._clock.monotonic()
        async with self._changing:
            return await self._catch_up() | await self._read_blocks()

    async def _catch_up(self) -> bool:
        """Learns of classes and workers of others, so that a profile here means the same as it does there."""
        stored = {worker.worker_id: worker for worker in await self._store.workers()}
        changed = stored.keys() != self.workers.keys()
        for gone in self.workers.keys() - stored.keys():
            del self.workers[gone]
        for worker_id, worker in stored.items():
            known = self.workers.get(worker_id)
            if known is not None:
                changed |= not known.matches_like(worker)
                # The one thing that is newer here: it is not saved each time.
                last_seen_at = max(known.last_seen_at, worker.last_seen_at)
                worker = msgspec.structs.replace(worker, last_seen_at=last_seen_at)
            self.workers[worker_id] = worker
        table = await self._store.table()
        # Dropped by an engine that had not yet heard who has it: nobody would find anything for them.
        is_missing = not all(worker.profile in table.profiles for worker in self.workers.values())
        if table.version == self._table_version and not changed and not is_missing:
            return False
        self._changed()
        self._judged = self._judged & self._speakers().keys()
        strangers = [cls for key, cls in table.classes.items() if key not in self.classes]
        if is_missing or not all(self._vocabulary.covers(cls) for cls in strangers):
            await self._grow(*strangers)
            table = await self._store.table()
        self.classes.update(table.classes)
        for key, cls in table.classes.items():
            self._judge(key, cls, table.profiles)
        self._judged = self._speakers().keys() & table.profiles
        self._table_version = table.version
        return True

    def _judge(self, key: ClassKey, cls: RequirementClass, profiles: Set[ProfileKey]) -> None:
        """Which of the profiles in the table may take the class, as the table has it too."""
        fits = self._fits.setdefault(key, set())
        for profile, worker in self._speakers().items():
            if profile in profiles and is_feasible(cls, worker.worker_id, worker.capabilities):
                fits.add(profile)

    async def _read_blocks(self) -> bool:
        blocks = await self._store.blocks()
        workers, refused = self.with_blocks, self.refused
        self.with_blocks, self.refused = set(), frozenset()
        for block in blocks:
            self.note_block(block)
        return bool(workers - self.with_blocks or refused - self.refused)

    def _speakers(self) -> dict[ProfileKey, WorkerRecord]:
        """Whatever one worker of a profile may take, all of them may: one speaks for each."""
        return {worker.profile: worker for worker in self.workers.values()}

    # classes

    def key_of(self, cls: RequirementClass) -> ClassKey:
        key = self._keys.get(cls)
        if key is None:
            if len(self._keys) > 10_000:
                self._keys.clear()
            key = self._keys[cls] = cls.key
        return key

    async def ensure_class(self, cls: RequirementClass, *, unless_known: bool = False) -> ClassKey:
        """The class is in the store's table, with a verdict for every profile there is. `unless_known`: that it was
        put there once will do, the store tells whoever uses it if it has dropped it since."""
        async with self._changing:
            key = self.key_of(cls)
            if unless_known and key in self.classes:
                # A batch of a new class: the first of its jobs has brought it in while the others waited.
                return key
            return await self._ensure_class(cls)

    async def _ensure_class(self, cls: RequirementClass) -> ClassKey:
        key = self.key_of(cls)
        while True:
            if self._store.is_shared:
                await self._catch_up()
            if not self._vocabulary.covers(cls):
                await self._grow(cls)
            table = await self._store.table()
            fits = {
                profile
                for profile, worker in self._speakers().items()
                if is_feasible(cls, worker.worker_id, worker.capabilities)
            }
            if await self._store.put_class(cls, fits & table.profiles, version=table.version):
                break
        self.classes[key] = cls
        self._fits[key] = fits
        self._selectivity.pop(key, None)
        self._forget_dropped(table.classes, key)
        return key

    def profiles_for(self, key: ClassKey) -> Set[ProfileKey]:
        """As the fleet is now: whoever waits meanwhile takes a copy."""
        return self._fits.get(key, _NONE)

    def able(self, key: ClassKey) -> list[WorkerRecord]:
        """Live workers that may take this class."""
        fits = self.profiles_for(key)
        return [
            worker
            for worker in self.workers.values()
            if worker.profile in fits and not worker.is_offline and not self.is_held_back(worker)
        ]

    def is_held_back(self, worker: WorkerRecord) -> bool:
        """A fake beside workers that are none, here now or away for a while: their jobs are not for it."""
        return is_held_back(worker, self.workers.values())

    def takes_work(self, worker: WorkerRecord, now: float) -> bool:
        return worker.takes_work(now) and not self.is_held_back(worker)

    def selectivity(self, key: ClassKey) -> int:
        """How many live workers may take this class."""
        known = self._selectivity.get(key)
        if known is None:
            known = self._selectivity[key] = len(self.able(key))
        return known

    def signatures(self) -> frozenset[str]:
        """Those of the services that live workers offer."""
        if self._signatures is None:
            self._signatures = frozenset(
                service.signature
                for worker in self.workers.values()
                if not worker.is_offline
                for service in worker.capabilities.services
                if service.signature is not None
            )
        return self._signatures

    def _changed(self) -> None:
        """Who is there, or what they offer: what was counted is counted anew."""
        self._selectivity.clear()
        self._signatures = None

    def is_workable(self, cls: RequirementClass) -> bool:
        return any(
            is_feasible(cls, worker.worker_id, worker.capabilities)
            for worker in self.workers.values()
            if not worker.is_offline and not self.is_held_back(worker)
        )

    def waits_for_memory(self, dispatch: Dispatch) -> bool:
        """Its class asks for more memory than the one it relaxes to: a bigger card is hoped for."""
        later = None if dispatch.relaxed_class is None else self.classes.get(dispatch.relaxed_class)
        now = self.classes.get(dispatch.class_key)
        if now is None or later is None:
            return False
        return now.requirements.hardware.gpu_memory_above_gb > later.requirements.hardware.gpu_memory_above_gb

    def capabilities(self) -> Iterable[Capabilities]:
        return (worker.capabilities for worker in self.workers.values() if not worker.is_offline)

    # workers

    async def put(
        self, call: RegisterWorker, now: float, lost_s: float
    ) -> tuple[WorkerRecord, WorkerRecord | None]:
        """The record, and the one that it was written over: of several engines that write it, one has brought it in.
        Refuses where another agent works under this name: one that was heard of since `lost_s` ago."""
        async with self._changing:
            return await self._put(call, now, lost_s)

    async def _put(
        self, call: RegisterWorker, now: float, lost_s: float
    ) -> tuple[WorkerRecord, WorkerRecord | None]:
        worker_id = call.worker_id
        if self._store.is_shared:
            await self._catch_up()
        known = self.workers.get(worker_id)
        capabilities = capabilities_of(call, known)
        if known is not None and known.capabilities == capabilities:
            profile = known.profile
        else:
            profile = await self._admit(worker_id, capabilities)
        before: WorkerRecord | None = None

        def again(stored: WorkerRecord) -> WorkerRecord:
            nonlocal before
            before = stored
            return registered_again(stored, call, profile, now, lost_s)

        # Over what an operator says of it meanwhile, never past it.
        while (record := await self.change(worker_id, again)) is None:
            before, first = None, registered_first(call, profile, now)
            self.workers[worker_id] = first
            self._changed()
            if await self._store.add_worker(first):
                record = first
                break
            # Another engine was quicker: the next turn reads what it wrote.
            self._table_version = -1
        if known is not None and known.profile != profile:
            await self._drop_unused()
        return record, before

    async def newest(self, worker_id: WorkerId) -> WorkerRecord | None:
        """As it stands in the store: what is written over it must not undo what another engine has changed."""
        known = self.workers.get(worker_id)
        if known is None or not self._store.is_shared:
            return known
        stored = await self._store.get_worker(worker_id)
        if stored is None:
            # Removed at another engine: it stays so until it registers again.
            self._forget(worker_id)
            return None
        if not known.matches_like(stored):
            # The next look judges what it may take now.
            self._table_version = -1
        seen_at = max(stored.last_seen_at, self.workers.get(worker_id, known).last_seen_at)
        return msgspec.structs.replace(stored, last_seen_at=seen_at)

    async def look_at(self, matched: WorkerRecord) -> None:
        """The store would not lease to a worker as it was matched: everything is read again if it is another by now."""
        known = self.workers.get(matched.worker_id)
        # Where nobody else writes, or another slot has looked already, there is nothing to learn.
        if not self._store.is_shared or known is None or known.profile != matched.profile:
            return
        stored = await self._store.get_worker(matched.worker_id)
        if stored is None or stored.profile != matched.profile:
            await self.sync()

    async def change(
        self, worker_id: WorkerId, change: Callable[[WorkerRecord], WorkerRecord | None]
    ) -> WorkerRecord | None:
        """As `change` makes it of what stands in the store; again, when somebody else has written it since. None: there
        is none (any more), or nothing is to be changed."""
        while (newest := await self.newest(worker_id)) is not None:
            changed = change(newest)
            if changed is None:
                return None
            self._changed()
            if await self._replace(changed):
                return self.workers.get(worker_id)
        return None

    async def _replace(self, record: WorkerRecord) -> bool:
        worker_id = record.worker_id
        self.workers[worker_id] = msgspec.structs.replace(record, revision=record.revision + 1)
        if await self._store.replace_worker(record):
            return True
        stored = await self._store.get_worker(worker_id)
        if stored is None:
            # Removed at another engine: it stays so until it registers again.
            self._forget(worker_id)
        else:
            # What it declared there stands: it may have shut a tenant out. The next look judges what it may take now.
            self.workers[worker_id] = stored
            self._table_version = -1
            self._changed()
        return False

    async def note_seen(self, worker_id: WorkerId, now: float) -> None:
        """Kept at hand each time, and in the store often enough that no other engine takes the worker for lost."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        self.workers[worker_id] = msgspec.structs.replace(worker, last_seen_at=max(worker.last_seen_at, now))
        if self._store.is_shared and now - self._saved_at.get(worker_id, 0.0) >= _SAVE_SEEN_EVERY_S:
            self._saved_at[worker_id] = now
            await self._note(worker_id)

    def follow_clock(self) -> None:
        """Somebody may have set the clock. A worker that was silent for a second then still was for a second."""
        began = self._clock.now() - self._clock.monotonic()
        by, self._began = began - self._began, began
        if abs(by) > _SET_S:
            for worker_id, worker in self.workers.items():
                self.workers[worker_id] = msgspec.structs.replace(
                    worker, last_seen_at=worker.last_seen_at + by
                )

    def heard_of(self, worker_id: WorkerId, at: float) -> None:
        """The store knows that it was there; nothing is to be kept."""
        worker = self.workers.get(worker_id)
        if worker is not None and worker.last_seen_at < at:
            self.workers[worker_id] = msgspec.structs.replace(worker, last_seen_at=at)

    async def note_run(self, worker_id: WorkerId, seconds: float, live: LiveState) -> None:
        await self._note(worker_id, completed=1, busy_s=seconds, live=live)

    async def note_failure(self, worker_id: WorkerId) -> None:
        await self._note(worker_id, failed=1)

    async def _note(
        self,
        worker_id: WorkerId,
        completed: int = 0,
        failed: int = 0,
        busy_s: float = 0.0,
        live: LiveState | None = None,
    ) -> None:
        """Totals and live values: nothing that selectivity depends on, and nothing that an operator sets."""
        known = self.workers.get(worker_id)
        if known is None:
            return
        noted = await self._store.note_worker(
            worker_id, WorkerDelta(completed, failed, busy_s, known.last_seen_at, live)
        )
        if noted is None:
            # Removed at another engine: it stays so until it registers again.
            self._forget(worker_id)
            return
        if not known.matches_like(noted):
            # The next look judges what it may take now.
            self._table_version = -1
        if (known := self.workers.get(worker_id)) is not None and known.revision <= noted.revision:
            # Only another engine knows better. What this one wrote may be of before somebody set the clock back.
            seen_at = max(known.last_seen_at, noted.last_seen_at if self._store.is_shared else 0.0)
            self.workers[worker_id] = msgspec.structs.replace(noted, last_seen_at=seen_at)

    async def remove(self, worker_id: WorkerId) -> None:
        async with self._changing:
            self._forget(worker_id)
            await self._store.remove_worker(worker_id)
            await self._drop_unused()

    def _forget(self, worker_id: WorkerId) -> None:
        self.workers.pop(worker_id, None)
        self.with_blocks.discard(worker_id)
        self._saved_at.pop(worker_id, None)
        self._changed()

    def note_block(self, block: Block) -> None:
        if block.blocked_until is not None:
            self.with_blocks.add(block.worker_id)
            if is_refusing(block):
                self.refused |= {block.target}

    # profiles

    async def _admit(
        self, worker_id: WorkerId, capabilities: Capabilities, heir_of: ProfileKey | None = None
    ) -> ProfileKey:
        """The worker's profile, in the table. An heir only parts from its equals: its verdicts are those it had."""
        profile = profile_key(worker_id, capabilities, self._vocabulary)
        while True:
            table = await self._store.table()
            if profile in table.profiles:
                return profile
            fits = []
            for key, cls in table.classes.items():
                known = self._fits.get(key)
                if known is not None and heir_of in self._judged:
                    may_take = heir_of in known
                else:
                    may_take = is_feasible(cls, worker_id, capabilities)
                if may_take:
                    fits.append(key)
            if await self._store.put_profile(profile, fits, version=table.version):
                for key in fits:
                    self._fits.setdefault(key, set()).add(profile)
                self._judged = self._judged | {profile}
                return profile

    async def _grow(self, *classes: RequirementClass) -> None:
        """A class names something new: workers that were equal so far may have to part."""
        self._growths += 1
        if self._growths >= _REBUILD_AFTER:
            self._growths = 0
            self._vocabulary = Vocabulary.of((await self._store.table()).classes.values())
        for cls in classes:
            self._vocabulary = self._vocabulary.extended(cls)
        moved = [await self._part(worker) for worker in list(self.workers.values())]
        if any(moved):
            await self._drop_unused()

    async def _part(self, worker: WorkerRecord | None) -> bool:
        heir_of = None if worker is None else worker.profile
        while worker is not None:
            profile = await self._admit(worker.worker_id, worker.capabilities, heir_of)
            if profile == worker.profile:
                return False
            if await self._replace(msgspec.structs.replace(worker, profile=profile)):
                break
            # Another engine has written it meanwhile: it parts as it is by now.
            worker, heir_of = self.workers.get(worker.worker_id), None
        return True

    async def _drop_unused(self) -> None:
        used = {worker.profile for worker in self.workers.values()}
        unused = (await self._store.table()).profiles - used
        if unused:
            await self._store.drop_profiles(unused)
            for fits in self._fits.values():
                fits -= unused

    def _forget_dropped(self, live: Mapping[ClassKey, RequirementClass], added: ClassKey) -> None:
        if len(self.classes) <= 2 * len(live) + 1024:
            return
        for gone in [key for key in self.classes if key not in live and key != added]:
            del self.classes[gone]
            self._fits.pop(gone, None)
            self._selectivity.pop(gone, None)
