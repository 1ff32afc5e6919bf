"""The product's own programs as processes: a hub that is killed and started again on its port, and workers for it.

Whatever a program says is kept in a file; the process ends with its parent, should that be killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread

import msgspec
from tests.servers.redis_server import free_port

_READY_WITHIN_S = 60.0
_CLI = ("-m", "comfyfleet.cli.main")
# The child asks the kernel to go with its parent, then becomes the program.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (AttributeError, OSError):
    pass
os.execv(sys.argv[1], sys.argv[1:])
"""


class _LocalHub(msgspec.Struct, frozen=True):
    url: str
    key: str


def settings_of(table: str, values: Mapping[str, object]) -> dict[str, str]:
    """Settings as the environment has them."""
    return {f"COMFYFLEET_{table}_{name}".upper(): str(value) for name, value in values.items()}


class Program:
    """One process in one life. `heard` gets each line of its output, in a thread."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        said: Path,
        heard: Callable[[str], None] | None = None,
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COMFYFLEET_")}
        kept |= {"REDIS_URL": "", "HUB_REDIS_URL": "", "HUB_PORT": "", "PYTHONUNBUFFERED": "1", **env}
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, sys.executable, *_CLI, *arguments]
        with said.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
            )
        self._heard = heard or (lambda _: None)
        self._reading = Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError), self.process.stdout as output:
            for line in output:
                self._heard(line.rstrip("\n"))

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()

    def end(self, seconds: float = 20.0) -> int:
        """Asks it to leave; answers its exit code."""
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reading.join()
        return self.process.wait()


class HubProgram:
    """`comfyfleet hub` on one port and one data folder, in as many lives as it is given."""

    def __init__(self, folder: Path, env: Mapping[str, str], store: str | None = None, port: int = 0) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.port = port or free_port()
        self.said = folder / "hub.said"
        self.lives = 0
        self._env = {**env, "COMFYFLEET_DATA": str(folder)}
        self._arguments = ["hub", "--port", str(self.port), *(("--store", store) if store else ())]
        self._program: Program | None = None
        self._is_up = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        """The owner's."""
        return msgspec.json.decode((self.folder / "hub.json").read_bytes(), type=_LocalHub).key

    @property
    def who(self) -> str:
        return f"hub.{self.lives - 1}"

    @property
    def pid(self) -> int:
        assert self._program is not None, "the hub runs"
        return self._program.process.pid

    @property
    def is_up(self) -> bool:
        return self._is_up

    def begin(self) -> None:
        """Starts it and does not wait."""
        self.lives += 1
        self._is_up = False
        self._program = Program(self._arguments, self._env, self.said, self._hear)

    def _hear(self, line: str) -> None:
        if line.startswith("The hub answers at"):
            self._is_up = True

    def start(self) -> None:
        self.begin()
        deadline = time.monotonic() + _READY_WITHIN_S
        while not self._is_up:
            self.check_alive()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the hub did not answer within {_READY_WITHIN_S:g} s: {self.told()}")
            time.sleep(0.02)

    def check_alive(self) -> None:
        if self._program is not None and self._program.has_ended:
            raise RuntimeError(
                f"the hub ended by itself ({self._program.process.returncode}): {self.told()[-4000:]}"
            )

    def told(self) -> str:
        return self.said.read_text(errors="replace")

    def kill(self) -> None:
        if self._program is not None:
            self._is_up = False
            self._program.kill()
            self._program = None

    def memory_mb(self) -> float:
        """Resident now."""
        return _memory_mb(self.pid, "VmRSS")


def peak_mb(pid: int) -> float:
    """The most that was resident so far."""
    return _memory_mb(pid, "VmHWM")


def _memory_mb(pid: int, which: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not say how much memory a process has")
