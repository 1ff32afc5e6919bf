"""The workers an engine knows, the requirement classes in use, and which profile may take which class.

Policy decides feasibility; the fleet asks once per new class and profile and writes the answers into the
store's table. A profile holds only the capabilities that live classes ask for, so similar workers share
one."""

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

# After this many growths the fleet rebuilds the vocabulary from the waiting classes, to drop unused words.
_REBUILD_AFTER = 1024
_SAVE_SEEN_EVERY_S = 10.0
_CLOCK_JUMP_S = 1.0
_NONE: Set[ProfileKey] = frozenset()


class Fleet:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._began = clock.now() - clock.monotonic()
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.classes: dict[ClassKey, RequirementClass] = {}
        self.with_blocks: set[WorkerId] = set()
        """Workers with a timed block, as far as this engine knows."""
        self.refused: frozenset[str] = frozenset()
        """Block targets of workflows that no worker gets, because servers died of them."""
        self.is_fresh_since = float("-inf")
        """When the fleet was last read from the store, in monotonic time."""
        self._fits: dict[ClassKey, set[ProfileKey]] = {}
        self._evaluated: Set[ProfileKey] = frozenset()
        """Profiles for which `_fits` is complete."""
        self._vocabulary = Vocabulary.of(())
        self._growths = 0
        self._selectivity: dict[ClassKey, int] = {}
        self._signatures: frozenset[str] | None = None
        self._keys: dict[RequirementClass, ClassKey] = {}
        self._table_version = -1
        self.changes = 0
        """How often a worker came, went, or was changed by more than its work and its last sign of life."""
        self._saved_at: dict[WorkerId, float] = {}
        self._changing = asyncio.Lock()

    # loading

    async def load(self) -> None:
        async with self._changing:
            await self._catch_up()
        for block in await self._store.blocks():
            self.cache_block(block)

    async def refresh(self, max_age_s: float) -> None:
        if self._clock.monotonic() >= self.is_fresh_since + max_age_s:
            await self.sync()

    async def sync(self) -> bool:
        """Reads what other engines changed. True: a parked poll may now find a job."""
        self.is_fresh_since = self._clock.monotonic()
        async with self._changing:
            return await self._catch_up() | await self._read_blocks()

    async def _catch_up(self) -> bool:
        """Reads the classes and workers of other engines, so that a profile means the same here and there."""
        stored = {worker.worker_id: worker for worker in await self._store.workers()}
        changed = stored.keys() != self.workers.keys()
        for gone in self.workers.keys() - stored.keys():
            del self.workers[gone]
        for worker_id, worker in stored.items():
            known = self.workers.get(worker_id)
            if known is not None:
                changed |= not known.matches_like(worker)
                # Only this field may be newer here: the engine does not save it each time.
                last_seen_at = max(known.last_seen_at, worker.last_seen_at)
                worker = msgspec.structs.replace(worker, last_seen_at=last_seen_at)
            self.workers[worker_id] = worker
        table = await self._store.table()
        # Another engine dropped a profile that is in use; its worker would get no job.
        is_missing = not all(worker.profile in table.profiles for worker in self.workers.values())
        if table.version == self._table_version and not changed and not is_missing:
            return False
        self._changed()
        self._evaluated = self._evaluated & self._representatives().keys()
        strangers = [cls for key, cls in table.classes.items() if key not in self.classes]
        if is_missing or not all(self._vocabulary.covers(cls) for cls in strangers):
            await self._grow(*strangers)
            table = await self._store.table()
        self.classes.update(table.classes)
        for key, cls in table.classes.items():
            self._evaluate(key, cls, table.profiles)
        self._evaluated = self._representatives().keys() & table.profiles
        self._table_version = table.version
        return True

    def _evaluate(self, key: ClassKey, cls: RequirementClass, profiles: Set[ProfileKey]) -> None:
        """Adds the profiles in the table that may take the class."""
        fits = self._fits.setdefault(key, set())
        for profile, worker in self._representatives().items():
            if profile in profiles and is_feasible(cls, worker.worker_id, worker.capabilities):
                fits.add(profile)

    async def _read_blocks(self) -> bool:
        blocks = await self._store.blocks()
        workers, refused = self.with_blocks, self.refused
        self.with_blocks, self.refused = set(), frozenset()
        for block in blocks:
            self.cache_block(block)
        return bool(workers - self.with_blocks or refused - self.refused)

    def _representatives(self) -> dict[ProfileKey, WorkerRecord]:
        """One worker for each profile: workers of a profile may take the same classes."""
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
        """Puts the class into the store's table, with a decision for every profile. `unless_known`: skips a
        class that this engine has put there before; the store reports a dropped class on use."""
        async with self._changing:
            key = self.key_of(cls)
            if unless_known and key in self.classes:
                # The first job of a batch added the class while the others waited.
                return key
            while True:
                if self._store.is_shared:
                    await self._catch_up()
                if not self._vocabulary.covers(cls):
                    await self._grow(cls)
                table = await self._store.table()
                if self._store.is_shared and not await self._knows_all(table.profiles):
                    continue
                fits = {
                    profile
                    for profile, worker in self._representatives().items()
                    if is_feasible(cls, worker.worker_id, worker.capabilities)
                }
                if await self._store.put_class(cls, fits & table.profiles, version=table.version):
                    break
            self.classes[key] = cls
            self._fits[key] = fits
            self._evaluated = self._evaluated & self._representatives().keys()
            self._selectivity.pop(key, None)
            self._forget_dropped(table.classes, key)
            return key

    async def _knows_all(self, profiles: Set[ProfileKey]) -> bool:
        """Whether this engine knows a worker of each profile in a table that it has just read, and so can decide for
        each of them. Nobody decides for a profile later. One without a worker is dropped: its engine is about to
        write the worker's record and puts the profile back, or was killed before it did."""
        unknown = profiles - self._representatives().keys()
        if not unknown:
            return True
        # Read after the table: a worker that is not there yet will find that its profile is missing.
        if any(worker.profile in unknown for worker in await self._store.workers()):
            return False
        await self._drop(unknown)
        return True

    async def find_class(self, key: ClassKey) -> RequirementClass | None:
        """Reads the fleet again if another engine may have added the class."""
        if key not in self.classes and self._store.is_shared:
            await self.sync()
        return self.classes.get(key)

    def profiles_for(self, key: ClassKey) -> Set[ProfileKey]:
        """The live set: callers that await in between take a copy."""
        return self._fits.get(key, _NONE)

    def eligible_workers(self, key: ClassKey) -> list[WorkerRecord]:
        """Live workers that may take this class."""
        fits = self.profiles_for(key)
        return [
            worker
            for worker in self.workers.values()
            if worker.profile in fits and not worker.is_offline and not self.is_held_back(worker)
        ]

    def is_held_back(self, worker: WorkerRecord) -> bool:
        """Whether a fake worker gets no jobs because the fleet has real workers, present or away."""
        return is_held_back(worker, self.workers.values())

    def takes_work(self, worker: WorkerRecord, now: float) -> bool:
        return worker.takes_work(now) and not (worker.capabilities.is_fake and self.is_held_back(worker))

    def selectivity(self, key: ClassKey) -> int:
        known = self._selectivity.get(key)
        if known is None:
            known = self._selectivity[key] = len(self.eligible_workers(key))
        return known

    def signatures(self) -> frozenset[str]:
        """The node signatures of live workers."""
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
        """Drops figures that depend on the workers and their capabilities."""
        self.changes += 1
        self._selectivity.clear()
        self._signatures = None

    def is_workable(self, cls: RequirementClass) -> bool:
        return any(
            is_feasible(cls, worker.worker_id, worker.capabilities)
            for worker in self.workers.values()
            if not worker.is_offline and not self.is_held_back(worker)
        )

    def waits_for_memory(self, dispatch: Dispatch) -> bool:
        """Whether the class asks for more memory than the one it relaxes to."""
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
        """Registers a worker. Returns its record and the previous one, so that one of several engines sees
        the arrival. Refuses if another agent used this name within `lost_s`."""
        async with self._changing:
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

            # `change` starts from the stored record, so an operator's change in between survives.
            while (record := await self.change(worker_id, again)) is None:
                before, first = None, registered_first(call, profile, now)
                self.workers[worker_id] = first
                self._changed()
                if await self._store.add_worker(first):
                    record = first
                    break
                # Another engine added the worker first; read its record.
                self._table_version = -1
            if known is not None and known.profile != profile:
                await self._drop_unused()
            return record, before

    async def stored_worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        """The stored record, so that a change based on it keeps what other engines wrote."""
        known = self.workers.get(worker_id)
        if known is None or not self._store.is_shared:
            return known
        stored = await self._store.get_worker(worker_id)
        if stored is None:
            # Another engine removed the worker; it must register again.
            self._forget(worker_id)
            return None
        if not known.matches_like(stored):
            # Recompute the worker's classes at the next sync.
            self._table_version = -1
        seen_at = max(stored.last_seen_at, self.workers.get(worker_id, known).last_seen_at)
        return msgspec.structs.replace(stored, last_seen_at=seen_at)

    async def recheck_worker(self, matched: WorkerRecord) -> None:
        """After a refused lease: reads the fleet again if the worker's profile has changed."""
        known = self.workers.get(matched.worker_id)
        # Without other engines, or after another slot's look, nothing is new.
        if not self._store.is_shared or known is None or known.profile != matched.profile:
            return
        stored = await self._store.get_worker(matched.worker_id)
        if stored is None or stored.profile != matched.profile:
            await self.sync()

    async def change(
        self, worker_id: WorkerId, change: Callable[[WorkerRecord], WorkerRecord | None]
    ) -> WorkerRecord | None:
        """Applies `change` to the stored record, and repeats it if somebody else wrote in between. None: the
        worker is gone, or `change` returned None."""
        while (newest := await self.stored_worker(worker_id)) is not None:
            changed = change(newest)
            if changed is None:
                return None
            self._changed()
            if await self._replace(changed):
                return self.workers.get(worker_id)
        return None

    async def quarantine(self, worker_id: WorkerId, until: float | None) -> WorkerRecord | None:
        return await self.change(
            worker_id, lambda worker: msgspec.structs.replace(worker, quarantined_until=until)
        )

    async def _replace(self, record: WorkerRecord) -> bool:
        worker_id = record.worker_id
        self.workers[worker_id] = msgspec.structs.replace(record, revision=record.revision + 1)
        if await self._store.replace_worker(record):
            return True
        stored = await self._store.get_worker(worker_id)
        if stored is None:
            self._forget(worker_id)
        else:
            # The stored record wins: it may exclude a tenant.
            self.workers[worker_id] = stored
            self._table_version = -1
            self._changed()
        return False

    async def record_seen(self, worker_id: WorkerId, now: float) -> None:
        """Saves the time only often enough that other engines do not take the worker for lost."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        self.workers[worker_id] = msgspec.structs.replace(worker, last_seen_at=max(worker.last_seen_at, now))
        if self._store.is_shared and now - self._saved_at.get(worker_id, 0.0) >= _SAVE_SEEN_EVERY_S:
            self._saved_at[worker_id] = now
            await self._note(worker_id)

    def adjust_last_seen(self) -> None:
        """Shifts the last-seen times after somebody set the clock, so that silences keep their length."""
        began = self._clock.now() - self._clock.monotonic()
        by, self._began = began - self._began, began
        if abs(by) > _CLOCK_JUMP_S:
            for worker_id, worker in self.workers.items():
                self.workers[worker_id] = msgspec.structs.replace(
                    worker, last_seen_at=worker.last_seen_at + by
                )

    def set_last_seen(self, worker_id: WorkerId, at: float) -> None:
        """For a time that the store already has."""
        worker = self.workers.get(worker_id)
        if worker is not None and worker.last_seen_at < at:
            self.workers[worker_id] = msgspec.structs.replace(worker, last_seen_at=at)

    async def record_run(self, worker_id: WorkerId, seconds: float, live: LiveState) -> None:
        await self._note(worker_id, completed=1, busy_s=seconds, live=live)

    async def record_failure(self, worker_id: WorkerId) -> None:
        await self._note(worker_id, failed=1)

    async def _note(
        self,
        worker_id: WorkerId,
        completed: int = 0,
        failed: int = 0,
        busy_s: float = 0.0,
        live: LiveState | None = None,
    ) -> None:
        """Adds to totals and live values. Selectivity and operators' flags do not depend on them."""
        known = self.workers.get(worker_id)
        if known is None:
            return
        noted = await self._store.apply_worker_delta(
            worker_id, WorkerDelta(completed, failed, busy_s, known.last_seen_at, live)
        )
        if noted is None:
            self._forget(worker_id)
            return
        if not known.matches_like(noted):
            self._table_version = -1
        if (known := self.workers.get(worker_id)) is not None and known.revision <= noted.revision:
            # Only another engine can know a later time. This engine's own may precede a change of the clock.
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

    def cache_block(self, block: Block) -> None:
        if block.blocked_until is not None:
            self.with_blocks.add(block.worker_id)
            if is_refusing(block):
                self.refused |= {block.target}

    # profiles

    async def _admit(
        self, worker_id: WorkerId, capabilities: Capabilities, heir_of: ProfileKey | None = None
    ) -> ProfileKey:
        """Adds the worker's profile to the table. `heir_of`: the profile it splits from."""
        profile = profile_key(worker_id, capabilities, self._vocabulary)
        while True:
            table = await self._store.table()
            if profile in table.profiles:
                return profile
            fits = []
            for key, cls in table.classes.items():
                known = self._fits.get(key)
                if known is not None and heir_of in self._evaluated:
                    may_take = heir_of in known
                else:
                    may_take = is_feasible(cls, worker_id, capabilities)
                if may_take:
                    fits.append(key)
            if await self._store.put_profile(profile, fits, version=table.version):
                for key in fits:
                    # A class that this engine has not read yet stays unknown: other profiles are not evaluated for it.
                    if key in self._fits:
                        self._fits[key].add(profile)
                self._evaluated = self._evaluated | {profile}
                return profile

    async def _grow(self, *classes: RequirementClass) -> None:
        """Extends the vocabulary by new classes. Workers that shared a profile may split."""
        self._growths += 1
        if self._growths >= _REBUILD_AFTER:
            self._growths = 0
            self._vocabulary = Vocabulary.of((await self._store.table()).classes.values())
        for cls in classes:
            self._vocabulary = self._vocabulary.extended(cls)
        moved = [await self._split(worker) for worker in list(self.workers.values())]
        if any(moved):
            await self._drop_unused()

    async def _split(self, worker: WorkerRecord | None) -> bool:
        heir_of = None if worker is None else worker.profile
        while worker is not None:
            profile = await self._admit(worker.worker_id, worker.capabilities, heir_of)
            if profile == worker.profile:
                return False
            if await self._replace(msgspec.structs.replace(worker, profile=profile)):
                break
            # Another engine wrote the worker meanwhile; split the stored record.
            worker, heir_of = self.workers.get(worker.worker_id), None
        return True

    async def _drop_unused(self) -> None:
        used = {worker.profile for worker in self.workers.values()}
        unused = (await self._store.table()).profiles - used
        if unused:
            await self._drop(unused)

    async def _drop(self, unused: Set[ProfileKey]) -> None:
        await self._store.drop_profiles(unused)
        self._evaluated = self._evaluated - unused
        for fits in self._fits.values():
            fits -= unused

    def _forget_dropped(self, live: Mapping[ClassKey, RequirementClass], added: ClassKey) -> None:
        if len(self.classes) <= 2 * len(live) + 1024:
            return
        for gone in [key for key in self.classes if key not in live and key != added]:
            del self.classes[gone]
            self._fits.pop(gone, None)
            self._selectivity.pop(gone, None)
