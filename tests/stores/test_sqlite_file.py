"""The file itself: one owner, known tables only, and what an operator does to it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tests.stores._sqlite import make_bench, reopened

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.stores.factory import open_store
from comfyfleet.stores.migrations import Migration
from comfyfleet.stores.sqlite.database import connect, migrate, migrations
from comfyfleet.stores.sqlite.maintenance import backup, check, vacuum
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.stores.sqlite.writer import Batch
from comfyfleet.testing.contract.store_bench import A, completion
from comfyfleet.testing.time import ManualClock


def alter(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def names_in(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]


async def made(path: Path) -> Path:
    async with reopened(path):
        return path


# one owner


async def test_a_second_owner_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    async with reopened(path):
        with pytest.raises(Fault, match=f"in use by process {os.getpid()}"):
            await SqliteStore(path, ManualClock()).open()
    async with reopened(path):
        """Released with the close."""


async def test_an_owner_in_another_process_is_named_and_its_lock_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    code = (
        "import sys; from pathlib import Path; from comfyfleet.stores.sqlite.database import Ownership\n"
        "held = Ownership(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started([sys.executable, "-c", code, str(path)], pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(Fault, match=f"in use by process {child.pid}"):
            await SqliteStore(path, ManualClock()).open()
        child.kill()
    await made(path)


async def opened_at_last(path: Path) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with reopened(path):
                    return
            except Fault as fault:
                assert "is in use" in str(fault)
                await asyncio.sleep(0.01)


async def test_a_file_stays_owned_until_an_opening_that_was_given_up_has_left_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, has_begun, may_end = tmp_path / "fleet.db", threading.Event(), threading.Event()
    real = SqliteStore._connect

    def slow(store: SqliteStore) -> sqlite3.Connection:
        has_begun.set()
        may_end.wait()
        return real(store)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "_connect", slow)
        opening = asyncio.create_task(SqliteStore(path, ManualClock()).open())
        await asyncio.to_thread(has_begun.wait)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    try:
        with pytest.raises(Fault, match="is in use"):
            await SqliteStore(path, ManualClock()).open()
    finally:
        may_end.set()
    await opened_at_last(path)


async def test_a_store_is_closed_though_whoever_closes_it_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, may_write = tmp_path / "fleet.db", threading.Event()
    real = Batch.write

    def slow(batch: Batch, database: sqlite3.Connection) -> None:
        may_write.wait()
        real(batch, database)

    bench = make_bench(path)
    await bench.open()
    monkeypatch.setattr(Batch, "write", slow)
    asking = asyncio.create_task(bench.enqueue())
    closing = asyncio.create_task(bench.store.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    may_write.set()
    assert (await asking).phase is Phase.QUEUED
    await opened_at_last(path)


def started(command: list[str], pipes: dict[str, int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=pipes["stdin"], stdout=pipes["stdout"])


async def test_a_store_in_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "nowhere" / "fleet.db", ManualClock())
    with pytest.raises(Fault, match="folder must exist"):
        await store.open()
    await store.close()


async def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    await made(tmp_path / "my fleet?mode=memory#1 %20.db")
    assert names_in(tmp_path, "*.db") == ["my fleet?mode=memory#1 %20.db"]


# its tables


async def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = await made(tmp_path / "fleet.db")
    alter(path, "INSERT INTO migrations VALUES (9999, 'later', 'x')")
    with pytest.raises(Fault, match="newer version"):
        await SqliteStore(path, ManualClock()).open()
    alter(path, "DELETE FROM migrations WHERE number = 9999")
    await made(path)


async def test_a_file_made_by_other_steps_is_refused(tmp_path: Path) -> None:
    path = await made(tmp_path / "fleet.db")
    alter(path, "UPDATE migrations SET checksum = 'other' WHERE number = 1")
    with pytest.raises(Fault, match="another migration 1"):
        await SqliteStore(path, ManualClock()).open()


async def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "diary.db"
    alter(path, "CREATE TABLE diary (day TEXT)")
    with pytest.raises(Fault, match="of another program"):
        await SqliteStore(path, ManualClock()).open()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sqlite_schema").fetchall() == [("diary",)]


async def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "letter.db"
    path.write_text("Dear reader, this is no database. " * 100)
    with pytest.raises(Fault, match="cannot be opened"):
        await SqliteStore(path, ManualClock()).open()


def test_a_step_happens_wholly_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    with closing(connect(path)) as database:
        migrate(database, path)
        taken = [each.number for each in migrations()]
        broken = Migration(
            taken[-1] + 1, "broken", "CREATE TABLE half (x);\nINSERT INTO nowhere VALUES (1);\n"
        )
        with pytest.raises(Fault, match="cannot be migrated"):
            migrate(database, path, [*migrations(), broken])
        assert database.execute("SELECT name FROM sqlite_schema WHERE name = 'half'").fetchall() == []
        whole = Migration(taken[-1] + 1, "whole", "CREATE TABLE half (x); -- a comment; with a semicolon\n")
        migrate(database, path, [*migrations(), whole])
        found = [number for (number,) in database.execute("SELECT number FROM migrations ORDER BY number")]
        assert found == [*taken, taken[-1] + 1]


def test_steps_are_numbered_without_a_gap() -> None:
    assert [each.number for each in migrations()] == list(range(1, len(migrations()) + 1))


# what an operator does


async def test_a_check_finds_nothing_in_a_sound_file_while_its_owner_runs(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    await bench.enqueue()
    _, ref = await bench.leased()
    assert await bench.store.write(completion(ref)) is not None
    assert check(path) == []
    await bench.store.close()


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        ("DELETE FROM jobs WHERE sequence = 1", "jobs has none"),
        ("DELETE FROM open_jobs WHERE sequence = 2", "neither open nor ended"),
        ("INSERT INTO results VALUES (77, x'80')", "results has a row for sequence 77"),
        ("UPDATE open_jobs SET phase = 'failed'", "differ in id, sequence, phase or reference"),
        (
            "UPDATE jobs SET reference = 'other' WHERE sequence = 2",
            "differ in id, sequence, phase or reference",
        ),
        (
            "INSERT INTO ended_jobs SELECT sequence, phase, 5, 5.0, state, NULL FROM open_jobs",
            "it is both open and ended",
        ),
        ("UPDATE ended_jobs SET apart = ''", "whether its end is settled"),
        ("UPDATE ended_jobs SET apart = NULL", "whether its end is settled"),
        ("DELETE FROM classes", "is not in the table"),
        ("UPDATE open_jobs SET state = x'c1'", "cannot be read"),
    ],
)
async def test_a_check_says_what_is_wrong(tmp_path: Path, harm: str, found: str) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    await bench.enqueue()
    await bench.leased()
    _, ref = await bench.leased(has_tenant_database=True)
    assert await bench.store.write(completion(ref)) is not None
    await bench.store.close()
    assert check(path) == []
    alter(path, harm)
    assert any(found in problem for problem in check(path)), check(path)


def test_there_is_nothing_to_check_where_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no store at"):
        check(tmp_path / "nowhere.db")


async def test_a_damaged_file_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    await bench.enqueue()
    await bench.store.close()
    alter(path, "DELETE FROM classes")
    with pytest.raises(Fault, match="store check"):
        await SqliteStore(path, ManualClock()).open()
    alter(path, "DELETE FROM open_jobs", "DELETE FROM jobs")
    await made(path)


async def test_a_backup_taken_while_the_owner_runs_is_a_store_of_that_moment(tmp_path: Path) -> None:
    path, target = tmp_path / "fleet.db", tmp_path / "copy.db"
    bench = make_bench(path)
    await bench.open()
    dispatch, _ = await bench.leased()
    backup(path, target)
    await bench.enqueue()
    with pytest.raises(Fault, match="exists already"):
        backup(path, target)
    await bench.store.close()
    assert check(target) == []
    async with reopened(target) as store:
        assert await store.leases_of(A) == [dispatch]
        assert (await store.counts()).waiting == 0
    assert names_in(tmp_path, "*.partial") == []


async def test_a_vacuum_gives_room_back_and_waits_for_no_owner(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    bench = make_bench(path)
    await bench.open()
    for _ in range(300):
        _, ref = await bench.leased()
        assert await bench.store.write(completion(ref)) is not None
    waiting = await bench.enqueue()
    await bench.store.purge(Phase.COMPLETED, 1e12, 1000)
    with pytest.raises(Fault, match="in use"):
        vacuum(path)
    await bench.store.close()
    before = path.stat().st_size
    vacuum(path)
    assert path.stat().st_size < before
    async with reopened(path) as store:
        assert await store.load(waiting.job_id) == waiting


# by its URL


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///fleet.db", "fleet.db"),
        ("sqlite:///data/my%20fleet.db", "data/my fleet.db"),
        ("sqlite:////srv/fleet.db", "/srv/fleet.db"),
    ],
)
def test_a_url_names_a_file_from_here_or_from_the_root(url: str, path: str) -> None:
    store = open_store(url, ManualClock())
    assert isinstance(store, SqliteStore)
    assert store.path == Path(path)


@pytest.mark.parametrize("url", ["sqlite:", "sqlite:///", "sqlite://fleet.db", "sqlite:///fleet.db?mode=ro"])
def test_a_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(Refusal, match="names no file"):
        open_store(url, ManualClock())


def test_an_unknown_scheme_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(Refusal, match="memory:, sqlite:"):
        open_store("carrier-pigeon://roof", ManualClock())


_OPEN_WRITE_CLOSE = """
import sys
from pathlib import Path
from comfyfleet.stores.sqlite.database import connect
database = connect(Path(sys.argv[1]))
database.execute("INSERT INTO notes VALUES ('from another process')")
database.close()
"""


def test_opening_a_file_twice_in_one_process_keeps_its_log_from_another_process(tmp_path: Path) -> None:
    """POSIX locks end when a process closes any descriptor of the file. Without them the other process takes itself for
    the last user, removes the log, and the two no longer see each other's writes."""
    path = tmp_path / "shared.db"
    with closing(connect(path)) as database:
        database.execute("CREATE TABLE notes (text)")
        log = (tmp_path / "shared.db-wal").stat().st_ino
        connect(path).close()
        subprocess.run([sys.executable, "-c", _OPEN_WRITE_CLOSE, str(path)], check=True)
        assert (tmp_path / "shared.db-wal").stat().st_ino == log
        database.execute("INSERT INTO notes VALUES ('from this process')")
    with closing(sqlite3.connect(path)) as database:
        texts = {text for (text,) in database.execute("SELECT text FROM notes")}
    assert texts == {"from another process", "from this process"}
