"""`comfyfleet store move` between real stores: everything arrives as it was, also after a SIGKILL in the middle."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import psycopg
import pytest
from tests.acceptance._process import CLI, run_cli, started
from tests.servers.postgres_database import empty_database
from tests.servers.redis_fixtures import own_server, with_prefix
from tests.stores._filled import BLOCK, LESSON, fill, histories, leasing_order, opened

from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import LeaseOffer
from comfyfleet.model.ids import JobId, LeaseToken, PollId
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import FAST, HASH, B
from comfyfleet.testing.leases import lease_next

WAITING = 150

PAIRS = [
    ("sqlite", "redis"),
    ("redis", "postgresql"),
    ("postgresql", "sqlite"),
    ("sqlite", "sqlite"),
    ("redis", "redis"),
]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with own_server() as server:
        yield server.url


@pytest.fixture
def url_of(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], str]:
    numbers = iter(range(10))

    def url_of(kind: str) -> str:
        match kind:
            case "sqlite":
                return f"sqlite:///{tmp_path}/fleet-{next(numbers)}.db"
            case "redis":
                return with_prefix(request.getfixturevalue("redis_url"))
            case _:
                return _as_url(empty_database(request.config))

    return url_of


def _as_url(conninfo: str) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(conninfo)
    return f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"


async def read(url: str) -> dict[JobId, JobSnapshot]:
    async with opened(url) as store:
        return await histories(store)


def without_place(found: dict[JobId, JobSnapshot]) -> list[JobSnapshot]:
    """The place in line is the one thing a move gives anew."""
    return [
        msgspec.structs.replace(each, dispatch=msgspec.structs.replace(each.dispatch, sequence=0))
        for each in found.values()
    ]


async def order_at(url: str) -> list[JobId]:
    """On a copy of the same jobs in a store of its own, since it takes them."""
    async with opened(url) as store:
        await store.pause_queue(False)
        return await leasing_order(store)


@pytest.mark.parametrize(("from_kind", "to_kind"), PAIRS)
async def test_everything_arrives_as_it_was_and_in_its_order(
    url_of: Callable[[str], str], from_kind: str, to_kind: str
) -> None:
    source, target, twin = url_of(from_kind), url_of(to_kind), url_of("sqlite")
    await fill(source, 30)
    await fill(twin, 30)
    before = await read(source)
    ended = run_cli("store", "move", source, target, "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["jobs"], report["stayed"]) == (38, [])
    assert (report["blocks"], report["workflow_stats"]) == (1, 1)
    assert await read(source) == {}
    assert without_place(await read(target)) == without_place(before)
    async with opened(target) as store:
        assert await store.blocks() == [BLOCK]
        assert await store.get_workflow_stats(HASH) == LESSON
    checked = run_cli("store", "check", target, "--json")
    problems = [each for each in json.loads(checked.stdout)["problems"] if "is off" not in each]
    assert problems == []
    assert await order_at(target) == await order_at(twin)


def _moved_so_far(target: str) -> int:
    """Asked past the store, which has an owner while jobs move into it."""
    path = Path(target.removeprefix("sqlite:///"))
    if not path.is_file():
        return 0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        try:
            ((count,),) = database.execute("SELECT count(*) FROM jobs").fetchall()
        except sqlite3.OperationalError:
            return 0
    return int(count)


@pytest.mark.parametrize(
    ("from_kind", "to_kind"), [("redis", "sqlite"), ("postgresql", "redis"), ("sqlite", "postgresql")]
)
async def test_a_move_that_was_killed_in_the_middle_is_begun_again_and_nothing_is_lost_or_doubled(
    url_of: Callable[[str], str], from_kind: str, to_kind: str
) -> None:
    source, target = url_of(from_kind), url_of(to_kind)
    await fill(source, WAITING)
    before = await read(source)

    async def moved_so_far() -> int:
        if to_kind == "sqlite":
            return _moved_so_far(target)
        if to_kind == "redis":
            store = RedisStore(target)
            await store.open()
            found = await store.diagnose("ZCARD", f"{store.prefix}jobs")
            await store.close()
            assert isinstance(found, int)
            return found
        with psycopg.connect(target) as connection:
            row = connection.execute("SELECT to_regclass('comfyfleet.jobs')").fetchone()
            if row is None or row[0] is None:
                return 0
            row = connection.execute("SELECT count(*) FROM comfyfleet.jobs").fetchone()
            return 0 if row is None else int(row[0])

    kills = 0
    for at_least in (20, 80):
        is_killed = await _killed_when(moved_so_far, at_least, source, target)
        kills += is_killed
        if is_killed:
            there, here = await read(target), await read(source)
            assert there.keys() | here.keys() == before.keys(), "acknowledged or still here"
    assert kills, "at least one of them was killed before its end"
    ended = run_cli("store", "move", source, target)
    assert ended.returncode == 0, ended.stderr
    assert "The source is paused" in ended.stdout
    assert await read(source) == {}
    after = await read(target)
    assert list(after) == list(before)
    assert without_place(after) == without_place(before)


async def _killed_when(count: Callable[[], Awaitable[int]], at_least: int, source: str, target: str) -> bool:
    with started(*CLI, "store", "move", source, target) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and await count() < at_least:
            assert time.monotonic() < deadline
        process.kill()
        return process.wait() == -signal.SIGKILL


async def test_a_trial_names_what_would_stay_and_makes_no_target(
    url_of: Callable[[str], str], tmp_path: Path
) -> None:
    source, target = url_of("sqlite"), f"sqlite:///{tmp_path}/never.db"
    await fill(source, 5)
    before = await read(source)
    ended = run_cli("store", "move", source, target, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == (
        "13 jobs would move (2 completed, 2 failed, 8 queued, 1 cancelled), 1 block, 1 workflow statistic, "
        "0 documents\n"
    )
    assert not (tmp_path / "never.db").exists()
    assert await read(source) == before


async def test_a_reference_that_is_taken_is_told_and_the_command_fails(url_of: Callable[[str], str]) -> None:
    source, target = url_of("sqlite"), url_of("sqlite")
    await fill(source, 2)
    await fill(target, 1, first_id=1000)
    ended = run_cli("store", "move", source, target)
    assert ended.returncode == 1
    assert ended.stderr == "Error: 6 jobs stayed at the source\n"
    lines = ended.stdout.splitlines()
    assert re.fullmatch(
        r"stays  job-0001  the target has a job under its reference 'ended-0': job-1001", lines[0]
    )
    assert lines[6] == "4 jobs moved (1 cancelled, 3 queued), 0 blocks, 0 workflow statistics, 0 documents"
    assert {job.job.reference for job in (await read(source)).values()} == {
        *(f"ended-{number}" for number in range(4)),
        "tried",
        "waiting-0",
    }
    assert len(await read(target)) == 9 + 4


async def with_a_running_job(url: str, seconds: float) -> str:
    """A store in which one job runs, on b, for so long."""
    await fill(url, 1)
    async with opened(url) as store:
        offer = LeaseOffer(B, FAST, PollId("poll"), LeaseToken("token"), seconds, seconds)
        assert await lease_next(store, offer) is not None
    return url


async def test_a_running_job_refuses_the_move_and_is_waited_for(url_of: Callable[[str], str]) -> None:
    source, target = await with_a_running_job(url_of("sqlite"), 600.0), url_of("sqlite")
    ended = run_cli("store", "move", source, target)
    assert ended.returncode == 3
    assert "1 jobs of the source are running (on b). Nothing was moved" in ended.stderr
    async with opened(source) as store:
        assert not await store.is_queue_paused()
    source = await with_a_running_job(url_of("sqlite"), 2.0)
    ended = run_cli("store", "move", source, target, "--wait", "60", "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["jobs"], report["released"]) == (9, 1)


@pytest.mark.parametrize(
    ("source", "target", "code", "told"),
    [
        ("memory:", "sqlite:///t.db", 3, "ends with its process"),
        ("sqlite:///missing.db", "sqlite:///t.db", 3, "there is no store at SOURCE"),
        ("carrier://pigeon", "sqlite:///t.db", 3, "there is no store for 'carrier'"),
        ("sqlite:///s.db", "redis://127.0.0.1:1/0", 4, "no Redis answers"),
        ("sqlite:///s.db", "postgresql://nobody@127.0.0.1:1/x", 4, "cannot reach PostgreSQL"),
        ("sqlite:///s.db", "sqlite:///nowhere/t.db", 4, "The folder must exist"),
        ("sqlite:///s.db", "sqlite:///s.db", 4, "is in use by"),
    ],
)
async def test_what_cannot_be_is_told_in_one_line(
    tmp_path: Path, source: str, target: str, code: int, told: str
) -> None:
    await fill(f"sqlite:///{tmp_path}/s.db", 1)
    ended = run_cli("store", "move", source, target, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1
    async with opened(f"sqlite:///{tmp_path}/s.db") as store:
        assert len(await histories(store)) == 9
        assert not await store.is_queue_paused()
