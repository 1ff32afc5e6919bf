"""`comfyfleet store check`, `vacuum` and `backup`: what is wrong is said and fails, what is sound is counted."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from tests.acceptance._process import run_cli
from tests.servers.postgres_database import empty_database
from tests.servers.redis_fixtures import own_server, with_prefix
from tests.servers.redis_server import RedisServer
from tests.stores._filled import fill, histories, opened

from comfyfleet.engine.system import SystemClock
from comfyfleet.files.local import LocalFileStore
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.stores.migrations import migrations_of
from comfyfleet.stores.redis.check import layout
from comfyfleet.tenancy.tenants import Tenants

HOLDS = {"queued": 5, "leased": 0, "completed": 2, "failed": 2, "cancelled": 1}
FEW = 2


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.db"
    await fill(f"sqlite:///{path}", FEW)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_server() as server:
        yield server


# SQLite


async def test_a_sound_file_is_counted_while_its_owner_works(path: Path) -> None:
    async with opened(f"sqlite:///{path}"):
        ended = run_cli("store", "check", f"sqlite:///{path}", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["problems"] == []
    assert found["holds"] == {**HOLDS, "workers": 0, "blocks": 1, "lessons": 1, "classes": 2, "documents": 0}
    assert found["settings"]["schema"] == len(migrations_of("comfyfleet.stores.sqlite"))
    assert "no problems" in run_cli("store", "check", f"sqlite:///{path}").stdout.splitlines()


async def test_what_is_wrong_with_a_file_is_said_and_fails(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM jobs WHERE sequence = 1")
    ended = run_cli("store", "check", f"sqlite:///{path}")
    assert ended.returncode == 1
    assert "problem     ended_jobs has a row for sequence 1, jobs has none" in ended.stdout
    assert ended.stderr == f"Error: 2 problems found in {path}\n"


async def test_a_file_of_a_newer_version_or_of_something_else_is_refused(path: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO migrations VALUES (999, 'later', 'x')")
    ended = run_cli("store", "check", f"sqlite:///{path}")
    assert ended.returncode == 4
    assert "was written by a newer version" in ended.stderr
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as database, database:
        database.execute("CREATE TABLE cats (name TEXT)")
    for words in (("check",), ("vacuum",)):
        ended = run_cli("store", *words, f"sqlite:///{other}")
        assert ended.returncode == 4
        assert "is a SQLite database of another program" in ended.stderr


async def test_a_vacuum_needs_the_file_for_itself_and_says_what_it_gained(path: Path) -> None:
    url = f"sqlite:///{path}"
    async with opened(url):
        ended = run_cli("store", "vacuum", url)
    assert ended.returncode == 4
    assert "is in use by process" in ended.stderr
    ended = run_cli("store", "vacuum", url, "--json")
    assert ended.returncode == 0, ended.stderr
    gained = json.loads(ended.stdout)
    assert 0 < gained["bytes_after"] <= gained["bytes_before"]
    assert run_cli("store", "check", url).returncode == 0


async def test_a_backup_is_made_beside_the_owner_and_is_a_store(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    async with opened(f"sqlite:///{path}") as store:
        ended = run_cli("store", "backup", f"sqlite:///{path}", copy, "--json")
        assert ended.returncode == 0, ended.stderr
        expected = await histories(store)
    told = json.loads(ended.stdout)
    assert (told["store"], told["file"], told["bytes"]) == (str(path), str(copy), copy.stat().st_size)
    assert (told["left_out"], sum(told["holds"].values()) > 0) == ({}, True)
    async with opened(f"sqlite:///{copy}") as store:
        assert await histories(store) == expected
    again = run_cli("store", "backup", f"sqlite:///{path}", copy)
    assert again.returncode == 4
    assert "a backup never overwrites" in again.stderr


async def test_a_backup_that_would_leave_something_out_is_refused_until_that_is_understood(
    path: Path, tmp_path: Path
) -> None:
    clock, copy = SystemClock(), tmp_path / "copy.db"
    async with opened(f"sqlite:///{path}") as store:
        await Tenants(store.documents, clock, is_shared=False).create(
            Tenant(TenantId("acme"), "east", clock.now())
        )
        assets = LocalFileStore(tmp_path / "files", store.documents, clock)
        await assets.reserve(TenantId("default"))
        refused = run_cli("store", "backup", f"sqlite:///{path}", copy)
        assert (refused.returncode, refused.stdout) == (3, "")
        for words in (
            "nothing was copied",
            "1 tenant (in the databases east)",
            "1 file (",
            "--queue-only",
        ):
            assert words in refused.stderr
        assert not copy.exists()
        ended = run_cli("store", "backup", f"sqlite:///{path}", copy, "--queue-only")
    assert ended.returncode == 0, ended.stderr
    (left_out,) = [line for line in ended.stdout.splitlines() if line.startswith("not copied: ")]
    assert "1 tenant" in left_out and "1 file" in left_out and "master keys" in left_out
    assert any(line.startswith("copied: ") and "queued" in line for line in ended.stdout.splitlines())
    assert copy.is_file()


def test_a_backup_that_cannot_be_written_leaves_nothing_behind(path: Path, tmp_path: Path) -> None:
    ended = run_cli("store", "backup", f"sqlite:///{path}", tmp_path / "nowhere" / "copy.db")
    assert ended.returncode == 4
    assert "No partial copy is left" in ended.stderr
    assert [each.name for each in tmp_path.iterdir() if "copy" in each.name] == []


def test_a_store_without_a_scheme_is_told_how_to_write_it() -> None:
    ended = run_cli("store", "check", "fleet.db")
    assert ended.returncode == 3
    assert "'fleet.db' is not the URL of a store: a SQLite file is sqlite:///fleet.db" in ended.stderr
    assert "secret" not in run_cli("store", "check", "me:secret@host/fleet").stderr
    assert "secret" not in run_cli("store", "check", "//me:secret@host/fleet").stderr


@pytest.mark.parametrize("words", [("check",), ("vacuum",), ("backup", "copy.db")])
def test_a_file_that_is_not_there_is_not_made(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = run_cli("store", words[0], "sqlite:///missing.db", *words[1:], cwd=tmp_path)
    assert ended.returncode == 4
    assert "there is no store at missing.db" in ended.stderr
    assert list(tmp_path.iterdir()) == []


# Redis


async def test_a_fleet_on_redis_is_looked_at_without_touching_it(server: RedisServer) -> None:
    url = with_prefix(server.url)
    await fill(url, FEW)
    ended = run_cli("store", "check", url, "--json")
    assert ended.returncode == 0, ended.stdout
    found = json.loads(ended.stdout)
    assert found["holds"] == {**HOLDS, "workers": 0, "blocks": 1, "lessons": 1, "classes": 2, "documents": 0}
    settings = found["settings"]
    assert (settings["durability"], settings["epoch"], settings["is_paused"]) == ("durable", 1, False)
    again = json.loads(run_cli("store", "check", url, "--json").stdout)
    assert again == found, "not even a client was noted"
    shown = run_cli("store", "check", url).stdout.splitlines()
    assert {"durability        durable", "is paused         no"} <= set(shown), (
        "in line with the library revision"
    )


async def test_keys_nobody_promised_and_counts_that_differ_are_problems(server: RedisServer) -> None:
    url = with_prefix(server.url)
    await fill(url, FEW)
    async with opened(url) as store:
        await store.diagnose("SET", f"{store.prefix}stranger", "1")  # type: ignore[attr-defined]
        await store.diagnose("ZREM", f"{store.prefix}jobs:completed", "job-0001")  # type: ignore[attr-defined]
        (unsettled, broken) = await store.unsettled(10)
        await store.diagnose("ZREM", f"{store.prefix}jobs:unsettled", broken.job_id)  # type: ignore[attr-defined]
        await store.diagnose("ZADD", f"{store.prefix}jobs:unsettled", 0, "job-0003")  # type: ignore[attr-defined]
    assert (unsettled.phase, broken.phase) == (Phase.COMPLETED, Phase.FAILED)
    ended = run_cli("store", "check", url, "--json")
    assert ended.returncode == 1
    first, second, third, fourth = json.loads(ended.stdout)["problems"]
    assert first == "jobs:completed: the head counts 2, 1 are listed"
    assert second == "jobs:failed: the head counts 2, 1 are listed"
    assert third == "jobs:unsettled has job-0003, which has nothing to settle"
    assert fourth.endswith("are not ComfyFleet's: stranger")


def test_a_prefix_without_a_fleet_and_a_server_that_is_not_there_are_told(server: RedisServer) -> None:
    ended = run_cli("store", "check", with_prefix(server.url, "empty"))
    assert ended.returncode == 1
    assert "there is no fleet under the prefix {empty}:" in ended.stdout
    ended = run_cli("store", "check", "redis://:secret@127.0.0.1:1/0")
    assert ended.returncode == 4
    assert "no Redis answers" in ended.stderr and "secret" not in ended.stderr


def test_the_layout_knows_the_names_with_parts_and_the_short_forms() -> None:
    patterns = layout()

    def is_known(name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in patterns)

    for name in (
        "meta",
        "job:1",
        "job:1:failure",
        "jobs:cancelled",
        "lessons:order",
        "request:c:0",
        "group:p:-1:t",
    ):
        assert is_known(name), name
    for name in ("jobs:lost", "metal", "lessons:", "worker", "channel:hub:events"):
        assert not is_known(name), name


# PostgreSQL


async def test_the_tables_in_postgresql_are_compared_with_each_other(request: pytest.FixtureRequest) -> None:
    conninfo = empty_database(request.config)
    parts = psycopg.conninfo.conninfo_to_dict(conninfo)
    url = f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    ended = run_cli("store", "check", url, "--json")
    assert "the schema lacks the migrations [1" in ended.stdout
    await fill(url, FEW)
    found = json.loads(run_cli("store", "check", url, "--json").stdout)
    assert found["holds"] == {**HOLDS, "workers": 0, "blocks": 1, "lessons": 1, "classes": 2, "documents": 0}
    # The server of the tests runs without them, for speed.
    off = [
        f"{name} is off: turn it on, or a power cut may lose acknowledged jobs"
        for name in ("fsync", "full_page_writes")
    ]
    assert [each for each in found["problems"] if each not in off] == []
    with psycopg.connect(conninfo) as connection:
        connection.execute("DELETE FROM comfyfleet.facts WHERE job_id = 'job-0001' AND number = 2")
        connection.execute("DELETE FROM comfyfleet.jobs WHERE job_id = 'job-0003'")
        connection.execute(
            "UPDATE comfyfleet.tallies SET queued = queued + 1, payload_bytes = 7 WHERE shard = 0"
        )
        connection.execute("UPDATE comfyfleet.ended SET is_unsettled = false WHERE job_id = 'job-0007'")
    ended = run_cli("store", "check", url, "--json")
    assert ended.returncode == 1
    problems = [each for each in json.loads(ended.stdout)["problems"] if each not in off]
    assert problems == [
        "queued: the tallies count 6, the tables hold 5",
        "payloads: the tallies count 7 bytes, those of open jobs have 0",
        "job job-0003 has a dispatch but no record",
        "job job-0001 has another number of facts than counted",
        "job job-0007 has ended, and its row differs on whether that is settled",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("check", "memory:"), "ends with its process"),
        (("check", "what:"), "there is no store for 'what'"),
        (("vacuum", "redis://h"), "needs no vacuum"),
        (("vacuum", "postgresql://h/d"), "autovacuum"),
        (("backup", "redis://h", "f"), "redis-cli --rdb"),
        (("backup", "redis://h", "f"), "contain only the queue. Copy tenants' databases"),
        (("backup", "postgresql://h/d", "f"), "pg_dump --schema=comfyfleet"),
        (("backup", "postgresql://h/d", "f"), "the schema comfyfleet_tenants"),
    ],
)
def test_where_another_tool_does_it_that_one_is_named(words: tuple[str, ...], told: str) -> None:
    ended = run_cli("store", *words)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert told in ended.stderr
