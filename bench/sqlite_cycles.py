"""Goal 5, our side: whole durable cycles a second on SQLite (enqueue, lease, complete), and the restart with a backlog.

    python -m bench.sqlite_cycles [--callers 50] [--seconds 3] [--waiting 100000] [--payload 256] [--only]

Every call waits for its own commit. Ids and tokens are counted, not drawn: they are arguments of a store. `--only`
measures the cycles alone and prints one line of JSON, as the peers do.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from comfyfleet.engine.system import SystemClock
from comfyfleet.model.dispatch import AttemptEnd, AttemptOutcome, Dispatch, HeldBy, LeaseOffer, Phase, Write
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import DEFAULT_TENANT, JobId, LeaseToken, PollId, ProfileKey, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.policy.lifecycle import completed
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.leases import lease_next

_PROFILE = ProfileKey("profile")
_QUEUED = (FactDraft(FactKind.QUEUED),)
_COMPLETED = (FactDraft(FactKind.COMPLETED),)
_CLASSES = [RequirementClass(Requirements(node_classes=(f"class {number}",))) for number in range(100)]


class Cycles:
    def __init__(self, path: Path, payload_bytes: int) -> None:
        self.store = SqliteStore(path, SystemClock())
        self._payload = Submission({"text": "x" * payload_bytes})
        self._numbers = itertools.count(1)
        self._keys = [cls.key for cls in _CLASSES]

    async def open(self) -> None:
        await self.store.open()
        table = await self.store.table()
        if not table.profiles:
            assert await self.store.put_profile(_PROFILE, [], version=table.version)
            for cls in _CLASSES:
                version = (await self.store.table()).version
                assert await self.store.put_class(cls, [_PROFILE], version=version)

    async def enqueue(self) -> None:
        now, number = time.time(), next(self._numbers)
        job_id, workflow_hash = JobId(f"01900000-0000-7000-8000-{number:012x}"), WorkflowHash("workflow")
        dispatch = Dispatch(job_id, self._keys[number % len(self._keys)], workflow_hash, 0, queued_at=now)
        job = Job(job_id, DEFAULT_TENANT, workflow_hash, now, self._payload)
        assert await self.store.enqueue(dispatch, job, _QUEUED) is not None

    async def lease(self) -> Dispatch | None:
        written = await lease_next(self.store, self._offer())
        return None if written is None else written.dispatch

    async def complete(self, dispatch: Dispatch) -> None:
        assert await self.store.write(self._completion(dispatch)) is not None

    def _offer(self) -> LeaseOffer:
        number = next(self._numbers)
        poll_id, token = PollId(f"poll-{number}"), LeaseToken(f"token-{number:026x}")
        return LeaseOffer(WorkerId("w"), _PROFILE, poll_id, token, 60, 10)

    def _completion(self, dispatch: Dispatch) -> Write:
        return Write(
            dispatch.job_id,
            HeldBy(dispatch.lease_ref()),
            completed(),
            AttemptEnd(AttemptOutcome.COMPLETED),
            _COMPLETED,
            job={"phase": Phase.COMPLETED, "result": JobResult(), "completed_at": time.time()},
        )


async def cycles_a_second(path: Path, callers: int, seconds: float, payload_bytes: int) -> float:
    cycles = Cycles(path, payload_bytes)
    await cycles.open()
    done, started = 0, time.perf_counter()

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await cycles.enqueue()
            if (held := await cycles.lease()) is not None:
                await cycles.complete(held)
                done += 1

    await asyncio.gather(*(caller() for _ in range(callers)))
    spent = time.perf_counter() - started
    await cycles.store.close()
    return done / spent


async def restart(path: Path, waiting: int, payload_bytes: int) -> tuple[float, float]:
    """Seconds from nothing to the first lease, and resident bytes a waiting job in a process that has just started."""
    filled = Cycles(path, payload_bytes)
    await filled.open()
    for _ in range(waiting // 1000):
        await asyncio.gather(*(filled.enqueue() for _ in range(1000)))
    await filled.store.close()
    del filled
    gc.collect()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.sqlite_cycles", "--reopen", str(path), stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await child.communicate()
    spent, grown = answer.split()
    return float(spent), float(grown) / waiting


async def reopen(path: Path) -> None:
    cycles = Cycles(path, 0)
    gc.collect()
    before, started = _resident_bytes(), time.perf_counter()
    await cycles.open()
    assert await cycles.lease() is not None
    spent = time.perf_counter() - started
    gc.collect()
    print(spent, _resident_bytes() - before)
    await cycles.store.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--callers", type=int, default=50)
    options.add_argument("--seconds", type=float, default=3)
    options.add_argument("--waiting", type=int, default=100_000)
    options.add_argument("--payload", type=int, default=256)
    options.add_argument("--reopen", type=Path, help="only open this file and lease once")
    options.add_argument("--only", action="store_true")
    given = options.parse_args()
    if given.reopen is not None:
        await reopen(given.reopen)
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.only:
            path = Path(folder) / "fleet.db"
            rate = await cycles_a_second(path, given.callers, given.seconds, given.payload)
            print(json.dumps({"rate": rate}))
            return
        for callers in (1, given.callers, 500):
            path = Path(folder) / f"{callers}.db"
            rate = await cycles_a_second(path, callers, given.seconds, given.payload)
            print(f"{callers} callers: {rate:,.0f} whole durable cycles a second")
        spent, job_bytes = await restart(Path(folder) / "backlog.db", given.waiting, given.payload)
        print(f"restart with {given.waiting:,} waiting jobs to the first lease: {spent:.2f} s")
        print(f"resident memory a waiting job, its payload on disk: {job_bytes:,.0f} bytes")


if __name__ == "__main__":
    asyncio.run(main())
