"""Power loss: the files of a store at work are copied, cut everywhere after the last acknowledged commit, and opened.

The order makes the cut an honest one: first the callers' log is read, then how long the store's log is; so everything
in the first was committed within the second. Later the writer is stopped for the moment of the copy. Each cut is
opened by a real store (and server), which must have every job acknowledged by then, and every result that was seen.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from tests.servers.redis_server import RedisServer

from chaos.callers import caller_process, execution_of, made_of
from chaos.engines import engine_process
from chaos.kill_loop import QUIET_WITHIN_S, Teller
from chaos.logs import read_logs
from chaos.made import made_from
from chaos.setting import opened_store
from chaos.stage import Kind, Stage
from chaos.workers import worker_process
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import DEFAULT_TENANT
from comfyfleet.ports import Store
from comfyfleet.stores.sqlite.maintenance import check as check_file

_BYTES_TO_CUT = 30_000
_GROWS_WITHIN_S = 5.0


class Size(msgspec.Struct, frozen=True):
    store: Kind
    moments: int = 3
    """So often the power goes."""
    cuts: int = 2000
    """At most so many cuts of one copy; where there are more points than that, they are spread evenly."""
    acknowledged: int = 200
    """The first moment is not before so many jobs were acknowledged."""


class Outage(msgspec.Struct, frozen=True):
    cuts: int
    acknowledged: int
    """Jobs that had to be there, counted once for each moment."""
    lost: int
    wrong: tuple[str, ...] = ()


class _Promised(msgspec.Struct, frozen=True):
    """What callers had been told: the job of each reference, and the result where it was seen."""

    jobs: dict[str, str]
    results: dict[str, str]
    made: dict[str, str]
    """What must be made of each."""


def run(size: Size, seed: int, tell: Teller) -> Outage:
    chance = random.Random(seed)
    cuts = acknowledged = lost = 0
    wrong: list[str] = []
    copies = Path(tempfile.mkdtemp(prefix="chaos-power-"))
    try:
        with Stage(size.store, 1) as stage:
            stage.add("engine-0", "engine", engine_process, 0)
            for number in range(2):
                name = f"worker-{number}"
                stage.add(name, "worker", worker_process, name, 8, True)
            caller = stage.add("caller", "caller", caller_process, seed, None, 32, 0.1)
            for moment in range(size.moments):
                tell(f"moment {moment + 1} of {size.moments}")
                wanted = size.acknowledged * (moment + 1)
                promised, folder, start = _copy(stage, copies / str(moment), wanted, chance)
                # It costs the machine enough to look at the copies.
                stage.stop(caller)
                points = _points(_log_of(folder, size.store), start, size.store, size.cuts)
                for number, point in enumerate(points):
                    tell(f"moment {moment + 1} of {size.moments}: cut {number + 1} of {len(points)}")
                    missing = asyncio.run(_reopen(folder, size.store, point, promised))
                    lost += len(missing)
                    wrong += [f"moment {moment}, cut at {point} of {start}…: {each}" for each in missing]
                cuts += len(points)
                acknowledged += len(promised.jobs)
                stage.carry_on(caller)
            stage.ask_to_end(caller)
            stage.await_end(caller, QUIET_WITHIN_S)
    finally:
        shutil.rmtree(copies, ignore_errors=True)
    return Outage(cuts, acknowledged, lost, tuple(wrong[:20]))


# the copy


def _copy(stage: Stage, target: Path, wanted: int, chance: random.Random) -> tuple[_Promised, Path, int]:
    """What was promised, the copy, and how long the log was when everything promised was in it."""
    source = stage.setting.folder if stage.server is None else _folder(stage)
    while True:
        stage.check_alive()
        promised = _promised(stage)
        if len(promised.jobs) < wanted:
            time.sleep(0.1)
            continue
        log = _log_of(source, _kind(stage))
        start, identity = _end_of(log, _kind(stage)), _identity(stage, log)
        _await_growth(stage, log, start)
        time.sleep(chance.uniform(0.0, 0.01))
        writer = stage.actors["engine-0"].pid if stage.server is None else _server(stage).pid
        os.kill(writer, signal.SIGSTOP)
        try:
            # A checkpoint or a rewrite in between has moved what was promised into the other file: another try.
            is_whole = _identity(stage, log) == identity and _end_of(log, _kind(stage)) > start
            if is_whole:
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.socket", "logs", "*.lock"))
        finally:
            os.kill(writer, signal.SIGCONT)
        if is_whole:
            return promised, target, start


def _await_growth(stage: Stage, log: Path, start: int) -> None:
    """Something to cut: the log has got a bit longer, or was begun anew."""
    deadline = time.monotonic() + _GROWS_WITHIN_S
    while 0 <= _end_of(log, _kind(stage)) - start < _BYTES_TO_CUT and time.monotonic() < deadline:
        time.sleep(0.002)


def _promised(stage: Stage) -> _Promised:
    lines = read_logs(stage.setting.logs)
    return _Promised(
        {
            line.reference: line.job
            for line in lines
            if line.what == "acknowledged" and line.reference and line.job
        },
        {
            line.reference: line.value
            for line in lines
            if line.what == "seen" and line.reference and line.value
        },
        {
            line.reference: line.made
            for line in lines
            if line.what == "submitting" and line.reference and line.made
        },
    )


def _kind(stage: Stage) -> Kind:
    return "sqlite" if stage.server is None else "redis"


def _server(stage: Stage) -> RedisServer:
    assert isinstance(stage.server, RedisServer), "PostgreSQL's own log is PostgreSQL's to prove"
    return stage.server


def _folder(stage: Stage) -> Path:
    return _server(stage).folder


def _log_of(folder: Path, kind: Kind) -> Path:
    if kind == "sqlite":
        return folder / "fleet.db-wal"
    return max((folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))


def _identity(stage: Stage, log: Path) -> tuple[object, ...]:
    """Changes when the log is begun anew, or moved into the database."""
    if stage.server is not None:
        return (log.name,)
    database = (stage.setting.folder / "fleet.db").stat()
    with log.open("rb") as file:
        return (database.st_size, database.st_mtime_ns, file.read(32))


# the cuts


def _points(log: Path, start: int, kind: Kind, most: int) -> list[int]:
    """The end of every frame or command from there on, and a place inside each."""
    data = log.read_bytes()
    ends = [end for end in (_frames(data) if kind == "sqlite" else _commands(data)) if end >= start]
    inside = [(end + following) // 2 for end, following in pairwise(ends)]
    points = sorted({start, *ends, *inside})
    if len(points) <= most:
        return points
    step = (len(points) - 1) / (most - 1)
    return sorted({points[round(number * step)] for number in range(most)})


def _end_of(log: Path, kind: Kind) -> int:
    data = log.read_bytes()
    return max(_frames(data) if kind == "sqlite" else _commands(data), default=0)


def _frames(data: bytes) -> Iterator[int]:
    """Where the frames of a write-ahead log end. Behind them may be those of its last use, under another salt."""
    size = 24 + int.from_bytes(data[8:12], "big")
    yield 32
    for place in range(32, len(data) - size + 1, size):
        if data[place + 8 : place + 16] != data[16:24]:
            return
        yield place + size


def _commands(data: bytes) -> Iterator[int]:
    """Where the commands of an append-only file end: each is a count, then so many strings with their lengths."""
    place = 0
    while place < len(data):
        line_end = data.find(b"\r\n", place)
        if line_end < 0:
            return
        if data[place : place + 1] == b"#":
            # The time, where the server writes it down.
            place = line_end + 2
            continue
        count, place = int(data[place + 1 : line_end]), line_end + 2
        for _ in range(count):
            line_end = data.find(b"\r\n", place)
            if line_end < 0:
                return
            place = line_end + 2 + int(data[place + 1 : line_end]) + 2
        if place <= len(data):
            yield place


async def _reopen(folder: Path, kind: Kind, point: int, promised: _Promised) -> list[str]:
    cut = folder.with_name("cut")
    shutil.rmtree(cut, ignore_errors=True)
    shutil.copytree(folder, cut)
    os.truncate(_log_of(cut, kind), point)
    if kind == "sqlite":
        missing = await _missing(f"sqlite:///{cut / 'fleet.db'}", promised)
        return missing + [f"the file is broken: {each}" for each in check_file(cut / "fleet.db")]
    server = RedisServer(folder=cut)
    server.start()
    try:
        return await _missing(server.url, promised)
    finally:
        server.kill()


async def _missing(url: str, promised: _Promised) -> list[str]:
    async with opened_store(url) as store:
        found = await asyncio.gather(
            *(
                _problem(store, reference, job, promised.results.get(reference), promised.made.get(reference))
                for reference, job in promised.jobs.items()
            )
        )
    return [problem for problem in found if problem]


async def _problem(store: Store, reference: str, job: str, value: str | None, made: str | None) -> str:
    record = await store.records.by_reference(DEFAULT_TENANT, reference)
    if record is None or record.job_id != job or await store.load(record.job_id) is None:
        return f"{reference}, acknowledged as {job}, is gone"
    if made_from(record.payload.workflow) != made:
        return f"{reference} has another payload than was submitted"
    if value is None:
        return ""
    if record.phase is not Phase.COMPLETED or record.result is None or execution_of(record.result) != value:
        return f"{reference} was seen completed and is {record.phase.value}"
    if made_of(record.result) != made:
        return f"{reference} has a result that was made from another payload"
    return ""
