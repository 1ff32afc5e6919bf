"""What `make chaos` plays, part by part, and how a part that was played is told from one that is still to come."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from chaos import (
    content,
    fuzz,
    hub_loop,
    kill_loop,
    large_files,
    ledger_loop,
    power,
    spending,
    streams,
    tenant_loop,
    zombies,
)
from chaos.checker import Finding
from chaos.kill_loop import Teller
from chaos.logs import Role

PlaySize = (
    kill_loop.Size
    | ledger_loop.Size
    | spending.Size
    | zombies.Size
    | power.Size
    | hub_loop.Size
    | fuzz.Size
    | large_files.Size
    | content.Size
    | streams.Size
    | tenant_loop.Size
)

SEED = 20_000

# A SQLite store has one owner, so its workers all speak to the one engine process.
_ONE_OWNER: dict[str, Any] = {"engines": 1, "bridged_workers": 6, "direct_workers": 0}

PARTS: dict[str, PlaySize] = {
    "sqlite": kill_loop.Size("sqlite", 6000, engine_kills=40, worker_kills=60, **_ONE_OWNER),
    "redis": kill_loop.Size("redis", 7000, engine_kills=30, worker_kills=70, server_kills=25),
    "postgres": kill_loop.Size("postgres", 7000, engine_kills=30, worker_kills=70, server_kills=25),
    "direct-redis": kill_loop.Size(
        "redis",
        10_000,
        worker_kills=50,
        server_kills=5,
        engines=0,
        bridged_workers=0,
        direct_workers=46,
        node_workers=4,
        slots=2,
        window=150,
    ),
    "credits": ledger_loop.Size(
        "redis", 20_000, 40, 80, 25, 3, 8, 0, database_kills=40, window=128, longest_s=1.0, tenants=50
    ),
    "spending": spending.Size(1_000),
    "zombies-sqlite": zombies.Size("sqlite", 160, direct=0, engines=1),
    "zombies-redis": zombies.Size("redis", 170),
    "zombies-postgres": zombies.Size("postgres", 170),
    "power-sqlite": power.Size("sqlite"),
    "power-redis": power.Size("redis"),
    "hub": hub_loop.Size("sqlite", 1_500, 20),
    "hub-redis": hub_loop.Size("redis", 1_500, 20),
    "content": content.Size(content.every_cell(50_000)),
    "streams": streams.Size(streams.every_cell(10_000)),
    "tenants": tenant_loop.Size(3_000, kills=20, moves=40, deletions=6, tenants=24),
    "fuzz": fuzz.Size(100_000),
    "files": large_files.Size("folder", brought=96 * large_files.MIB, left=1024 * large_files.MIB),
    "files-s3": large_files.Size("storage", brought=96 * large_files.MIB, left=1024 * large_files.MIB),
}

QUICK: dict[str, PlaySize] = {
    "sqlite": kill_loop.Size("sqlite", 100, engine_kills=2, worker_kills=3, longest_s=1.0, **_ONE_OWNER),
    "redis": kill_loop.Size("redis", 100, 1, 3, 2, direct_workers=2, longest_s=1.0),
    "postgres": kill_loop.Size("postgres", 100, 1, 3, 2, direct_workers=2, longest_s=1.0),
    "direct-redis": kill_loop.Size("redis", 100, 0, 3, 1, 0, 0, 5, 1, slots=2, longest_s=1.0),
    "credits": ledger_loop.Size("redis", 150, 2, 2, 1, 2, 3, 0, database_kills=2, longest_s=0.5, tenants=8),
    "spending": spending.Size(20),
    "zombies-sqlite": zombies.Size("sqlite", 4, at_once=4, direct=0, engines=1),
    "zombies-redis": zombies.Size("redis", 4, at_once=4, direct=2),
    "zombies-postgres": zombies.Size("postgres", 4, at_once=4, direct=2),
    "power-sqlite": power.Size("sqlite", 1, 20, 30),
    "power-redis": power.Size("redis", 1, 20, 30),
    "hub": hub_loop.Size("sqlite", 120, 3, simulated=(0.02, 0.3), servers=1),
    "hub-redis": hub_loop.Size("redis", 60, 1, simulated=(0.02, 0.3), servers=1),
    "content": content.Size(content.every_cell(1_000)),
    "streams": streams.Size(
        (streams.Cell("redis", 2, 2.0, 180), streams.Cell("postgres", 2, 2.0, 180)), agents=1
    ),
    "tenants": tenant_loop.Size(100, kills=2, moves=3, deletions=1, tenants=6),
    "fuzz": fuzz.Size(5_000, max_waiting=300),
    "files": large_files.Size("folder", brought=64 * large_files.MIB, left=64 * large_files.MIB),
    # Of two parts: what is larger than one goes up in parts.
    "files-s3": large_files.Size("storage", brought=64 * large_files.MIB, left=96 * large_files.MIB),
}


class Entry(msgspec.Struct, frozen=True):
    """What became of one part."""

    part: str
    plan: str
    """Of the sizes and the seed; another plan is another entry."""
    seed: int
    seconds: float
    jobs: int
    """Acknowledged to callers."""
    lost: int
    completed_twice: int = 0
    stale_accepted: int = 0
    duplicate_executions: int = 0
    explained: dict[str, int] = {}
    unexplained: int = 0
    kills: dict[Role, int] = {}
    stops: int = 0
    """Workers stopped beyond their lease and continued …"""
    zombies: int = 0
    """… that then reported on it."""
    stale_refused: int = 0
    cuts: int = 0
    """Copies cut and opened again."""
    executions: int = 0
    node_executions: int = 0
    """Those of workers in Node.js, which have no engine."""
    without_node: str = ""
    streams: int = 0
    """Pairs of a job and somebody who watched it over HTTP …"""
    returns: int = 0
    """… who so often lost the stream and took it up again …"""
    missed: int = 0
    """… and did not hear each change once and in order."""
    requests: int = 0
    frames: int = 0
    """What was thrown at a hub …"""
    statuses: dict[str, int] = {}
    """… and what it answered."""
    memory_mb: tuple[float, float] = (0.0, 0.0)
    """It had when a fifth was over, and at the end."""
    grown_mb: dict[str, float] = {}
    """Of those whom large files passed through: what they grew by."""
    leases: int = 0
    """Whose payload was compared with what was submitted."""
    mixed: int = 0
    """Jobs with something of another's: in a lease, or in what a caller got."""
    compared: int = 0
    """Results and files that callers got and that were compared with what they submitted."""
    cells: tuple[str, ...] = ()
    """The same for each store, number of hubs and delay."""
    moves: int = 0
    deletions: int = 0
    """Of tenants, meanwhile."""
    consumed: int = 0
    refunded: int = 0
    """Holds that were settled so, where tenants pay."""
    wrong: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not (
            self.lost
            or self.completed_twice
            or self.stale_accepted
            or self.unexplained
            or self.missed
            or self.mixed
            or self.wrong
        )


def plan_of(size: PlaySize, seed: int) -> str:
    text = msgspec.json.encode([type(size).__module__, size, seed])
    return hashlib.sha256(text).hexdigest()[:16]


def play(part: str, size: PlaySize, seed: int, tell: Teller) -> Entry:
    match size:
        case ledger_loop.Size():
            audited = ledger_loop.run(size, seed, tell)
            return _entry(
                part,
                size,
                seed,
                audited.finding,
                audited.wrong + _short(ledger_loop.planned(size), audited.kills),
                kills=audited.kills,
                consumed=audited.consumed,
                refunded=audited.refunded,
            )
        case spending.Size():
            spent = spending.run(size)
            return _entry(part, size, seed, Finding(acknowledged=spent.times, wrong=spent.wrong))
        case kill_loop.Size():
            killed = kill_loop.run(size, seed, tell)
            return _entry(
                part,
                size,
                seed,
                killed.finding,
                _short(kill_loop.planned(size), killed.kills),
                kills=killed.kills,
                node_executions=killed.node_executions,
                without_node=killed.without_node,
            )
        case zombies.Size():
            haunted = zombies.run(size, seed, tell)
            return _entry(part, size, seed, haunted.finding, stops=haunted.stops, zombies=haunted.zombies)
        case power.Size():
            outage = power.run(size, seed, tell)
            finding = Finding(acknowledged=outage.acknowledged, lost=outage.lost, wrong=outage.wrong)
            return _entry(part, size, seed, finding, cuts=outage.cuts)
        case hub_loop.Size():
            sieged = hub_loop.run(size, seed, tell)
            kills, watched = sieged.kills.get("hub", 0), sieged.watched
            short = () if kills == size.kills else (f"only {kills} of {size.kills} kills: hub",)
            return _entry(
                part,
                size,
                seed,
                sieged.finding,
                watched.wrong + short,
                kills=sieged.kills,
                streams=watched.streams,
                returns=watched.returns,
                missed=watched.missed,
            )
        case fuzz.Size():
            thrown = fuzz.run(size, seed, tell)
            return _entry(
                part,
                size,
                seed,
                Finding(wrong=thrown.wrong),
                requests=thrown.requests,
                frames=thrown.frames,
                statuses=thrown.statuses,
                memory_mb=thrown.memory_mb,
            )
        case content.Size():
            contents = content.run(size, seed, tell)
            whole = contents.whole
            return _entry(
                part,
                size,
                seed,
                Finding(acknowledged=whole.jobs, lost=whole.lost, mixed=whole.mixed, compared=whole.outputs),
                contents.wrong,
                leases=whole.leases,
                cells=tuple(map(str, contents.cells)),
            )
        case streams.Size():
            watched_far = streams.run(size, seed, tell)
            found = watched_far.whole
            return _entry(
                part,
                size,
                seed,
                Finding(acknowledged=found.jobs),
                watched_far.wrong,
                streams=found.streams,
                missed=found.open + found.without,
                cells=tuple(map(str, watched_far.cells)),
            )
        case tenant_loop.Size():
            settled = tenant_loop.run(size, seed, tell)
            whole = settled.compared
            return _entry(
                part,
                size,
                seed,
                Finding(acknowledged=whole.jobs, lost=whole.lost, mixed=whole.mixed, compared=whole.outputs),
                settled.wrong + (() if settled.kills == size.kills else ("fewer kills than planned",)),
                kills={"hub": settled.kills},
                leases=whole.leases,
                moves=settled.moves,
                deletions=settled.deletions,
            )
        case large_files.Size():
            moved = large_files.run(size, seed, tell)
            finding = Finding(acknowledged=moved.jobs, wrong=moved.wrong)
            return _entry(part, size, seed, finding, grown_mb=moved.grown_mb)


def _short(planned: dict[Role, int], kills: dict[Role, int]) -> tuple[str, ...]:
    """A run with fewer kills than were planned proves less than it says."""
    return tuple(
        f"only {kills.get(role, 0)} of {count} kills: {role}"
        for role, count in planned.items()
        if kills.get(role, 0) < count
    )


def _entry(
    part: str, size: PlaySize, seed: int, finding: Finding, wrong: tuple[str, ...] = (), **values: Any
) -> Entry:
    return Entry(
        part,
        plan_of(size, seed),
        seed,
        0.0,
        finding.acknowledged,
        finding.lost,
        finding.completed_twice,
        finding.stale_accepted,
        finding.duplicate_executions,
        finding.explained,
        finding.unexplained,
        mixed=finding.mixed,
        compared=finding.compared,
        stale_refused=finding.stale_refused,
        executions=finding.executions,
        wrong=finding.wrong + wrong,
        **values,
    )
