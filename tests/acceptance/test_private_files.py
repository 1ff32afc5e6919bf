"""What a busy hub and its worker leave on disk is their owner's alone, whatever the umask, also what was there."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.acceptance._process import (
    CLI,
    fake_servers,
    picture_workflow,
    read_until,
    run_cli,
    started,
    written,
)

from comfyfleet.stores.sqlite.database import connect, migrate
from comfyfleet.stores.sqlite.maintenance import backup

pytestmark = pytest.mark.skipif(os.name != "posix", reason="rights of files are those of POSIX")

CARELESS = ("sh", "-c", 'umask 000; exec "$0" "$@"', *CLI)


def readable(folder: Path) -> Iterator[str]:
    """What others could read or enter, the folder itself included."""
    for each in (folder, *folder.rglob("*")):
        if stat.S_IMODE(each.stat().st_mode) & 0o077:
            yield f"{each.relative_to(folder)} {stat.filemode(each.stat().st_mode)}"


def test_nobody_else_can_read_what_a_busy_hub_and_a_worker_left(tmp_path: Path) -> None:
    data, far = tmp_path / "data", tmp_path / "far"
    env = {"COMFYFLEET_DATA": str(data)}
    workflow = written(tmp_path / "workflow.json", picture_workflow())

    def run(*arguments: str | Path, **more: str) -> str:
        ended = run_cli(*arguments, cwd=tmp_path, env={**env, **more})
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    with fake_servers("--time-scale", "0.02") as (server,), ExitStack() as stack:
        hub = stack.enter_context(started(*CARELESS, "hub", "--port", "0", env=env))
        url = read_until(hub, lambda line: line.startswith("The hub answers at"))[-1].split()[-1]
        named = ("worker", "--hub", url, "--server", server, "--name", "gpu", "--enrol", run("key", "invite"))
        worker = stack.enter_context(started(*CARELESS, *named, env={"COMFYFLEET_DATA": str(far)}))
        read_until(worker, lambda line: line.endswith(": online"))
        run("tenant", "create", "acme")
        tenant = run("key", "create", "tenant", "--tenant", "acme")
        run("submit", workflow, "--watch", "--out", "pictures", COMFYFLEET_KEY=tenant)
        run("submit", workflow, "--watch", "--out", "pictures")
        run("credits", "export", "acme", "--out", tmp_path / "ledger.csv")
        names = {each.name for each in data.rglob("*")}
        assert {"fleet.db", "fleet.db-wal", "tenants.db", "tenants.db-wal", "hub.json", "files"} <= names
        assert {"journal", "workers.json"} <= {each.name for each in far.rglob("*")}
        assert [*readable(data), *readable(far)] == []
        assert not (tmp_path / "ledger.csv").stat().st_mode & 0o077


def test_what_an_older_version_left_open_to_others_is_closed_at_the_next_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    env = {"COMFYFLEET_DATA": str(data)}
    with started(*CLI, "hub", "--port", "0", env=env) as hub:
        read_until(hub, lambda line: line.startswith("The hub answers at"))
        assert run_cli("tenant", "create", "acme", env=env).returncode == 0
    (data / "files" / "ab").mkdir(parents=True)
    (data / "files" / "ab" / "upload").write_text("a picture")
    # As a process leaves it that was killed.
    (data / "fleet.db-wal").touch()
    for each in data.rglob("*"):
        if each.name != "hub.json":
            each.chmod(0o755 if each.is_dir() else 0o644)
    assert len([*readable(data)]) >= 5
    (tmp_path / "of-others").mkdir(mode=0o755)
    with started(*CLI, "hub", "--port", "0", env=env) as hub:
        read_until(hub, lambda line: line.startswith("The hub answers at"))
        assert run_cli("tenant", "show", "acme", env=env).returncode == 0
        assert [*readable(data)] == []


def _left_by_an_older_version(data: Path) -> tuple[list[Path], list[Path]]:
    """A data folder that its user made, open to all: what is ours in it, and what is not."""
    data.mkdir()
    data.chmod(0o755)
    old = data / "before-the-move.db"
    connect(old).close()
    with closing(connect(old)) as database:
        migrate(database, old)
    ours = [old]
    for name in ("workers.json", "journal/gpu-1.jsonl", "journal/gpu-1.files/part", "files/ab/upload"):
        each = data / name
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("{}")
        ours.append(each)
    others = [data / "notes.txt", data / "photos.db", data / "mine"]
    others[0].write_text("of the user")
    with closing(sqlite3.connect(others[1])) as database:
        database.execute("CREATE TABLE photos (name)")
    others[2].mkdir()
    for each in data.rglob("*"):
        each.chmod(0o755 if each.is_dir() else 0o644)
    (data / "link.db").symlink_to(others[1])
    return ours, others


def test_what_is_ours_in_a_folder_of_the_user_is_closed_and_nothing_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ours, others = _left_by_an_older_version(data)
    with started(*CLI, "hub", "--port", "0", env={"COMFYFLEET_DATA": str(data)}) as hub:
        read_until(hub, lambda line: line.startswith("The hub answers at"))
        assert [each for each in ours if each.stat().st_mode & 0o077] == []
        assert {stat.S_IMODE((data / each).stat().st_mode) for each in ("files", "journal")} == {0o700}
        assert [each for each in others if not each.stat().st_mode & 0o044] == []
        assert {each.name for each in data.iterdir() if each.stat().st_mode & 0o077} == {
            *(each.name for each in others),
            "link.db",
        }


def test_a_worker_closes_what_is_ours_in_its_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ours, others = _left_by_an_older_version(data)
    arguments = ("worker", "--hub", "http://127.0.0.1:9", "--simulated", "1", "--key", "cf_x_y")
    with started(*CLI, *arguments, env={"COMFYFLEET_DATA": str(data)}) as worker:
        read_until(worker, lambda line: line.startswith("Connecting to"))
        assert [each for each in ours if each.stat().st_mode & 0o077] == []
        assert [each for each in others if not each.stat().st_mode & 0o044] == []


def test_a_backup_closes_the_older_ones_beside_it(tmp_path: Path) -> None:
    source = tmp_path / "source.db"
    with closing(connect(source)) as database:
        migrate(database, source)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    backup(source, shelf / "monday.db")
    theirs = shelf / "theirs.db"
    with closing(sqlite3.connect(theirs)) as database:
        database.execute("CREATE TABLE photos (name)")
    beside = tmp_path / "beside.db"
    backup(source, beside)
    for each in (shelf / "monday.db", beside, theirs):
        each.chmod(0o644)
    backup(source, shelf / "tuesday.db")
    assert {each.name for each in shelf.iterdir() if each.stat().st_mode & 0o077} == {"theirs.db"}
    assert not beside.stat().st_mode & 0o077


def test_a_backup_is_its_owners_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with started(*CLI, "hub", "--port", "0", env={"COMFYFLEET_DATA": str(data)}) as hub:
        read_until(hub, lambda line: line.startswith("The hub answers at"))
        copy = tmp_path / "copy.db"
        ended = run_cli("store", "backup", f"sqlite:///{data}/fleet.db", copy)
        assert ended.returncode == 0, ended.stderr
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with sqlite3.connect(copy) as database:
        assert database.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
    database.close()
