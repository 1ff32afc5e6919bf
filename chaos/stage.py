"""The processes of a run and what is done to them: started, killed, stopped, continued; each act is written down.

Actors are forked from a process that has everything imported, so that a new life takes milliseconds. A Redis or
PostgreSQL server is a child too, killed and started again on its folder and port.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tests.servers.postgres_server import PostgresServer
from tests.servers.redis_server import RedisServer

from chaos.logs import Log, Role, What
from chaos.setting import Setting

Kind = Literal["sqlite", "redis", "postgres"]

_ACTORS = [
    "chaos.engines",
    "chaos.callers",
    "chaos.workers",
    "chaos.zombies",
    "chaos.foreign",
    "chaos.watchers",
    "chaos.payers",
]
_READY_WITHIN_S = 60.0


class Actor:
    def __init__(
        self, name: str, role: Role, target: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        self.name = name
        self.role = role
        self.target = target
        self.arguments = arguments
        self.lives = 0
        self.process: ForkServerProcess | None = None

    @property
    def who(self) -> str:
        return f"{self.name}.{self.lives - 1}"

    @property
    def pid(self) -> int:
        assert self.process is not None and self.process.pid is not None, "the actor is alive"
        return self.process.pid


class Stage:
    def __init__(self, kind: Kind, engines: int) -> None:
        # A socket's path must be short, so the folder is the system's own.
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.server: RedisServer | PostgresServer | None = None
        match kind:
            case "sqlite":
                url = f"sqlite:///{self._folder / 'fleet.db'}"
            case "redis":
                self.server = RedisServer()
                url = self.server.url
            case "postgres":
                self.server = PostgresServer(is_durable=True)
                url = self.server.url
        self.setting = Setting(self._folder, url, engines)
        self.setting.logs.mkdir()
        self.actors: dict[str, Actor] = {}
        self.kills: dict[Role, int] = {}
        self._log = Log(self.setting.logs, "conductor")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_ACTORS)

    def __enter__(self) -> Self:
        if self.server is not None:
            self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self.actors.values():
            if actor.process is not None:
                actor.process.kill()
                actor.process.join()
        if self.server is not None:
            self.server.stop()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def note(self, what: What, **values: object) -> None:
        self._log.write(what, **values)

    # actors

    def add(self, name: str, role: Role, target: Callable[..., None], *arguments: Any) -> Actor:
        actor = self.actors[name] = Actor(name, role, target, arguments)
        self.start(actor)
        return actor

    def start(self, actor: Actor) -> None:
        actor.lives += 1
        actor.process = self._context.Process(
            target=actor.target, args=(self.setting, actor.who, *actor.arguments), daemon=True
        )
        actor.process.start()

    def is_ready(self, actor: Actor) -> bool:
        if actor.process is None:
            return False
        log = self.setting.logs / f"{actor.who}.jsonl"
        return log.exists() and log.stat().st_size > 0

    def has_ended(self, actor: Actor) -> bool:
        return actor.process is not None and actor.process.exitcode is not None

    def await_ready(self, actors: Sequence[Actor]) -> None:
        deadline = time.monotonic() + _READY_WITHIN_S
        while not all(self.is_ready(actor) for actor in actors):
            self.check_alive()
            if time.monotonic() > deadline:
                late = ", ".join(actor.who for actor in actors if not self.is_ready(actor))
                raise RuntimeError(f"not ready within {_READY_WITHIN_S:g} s: {late}")
            time.sleep(0.02)

    def ask_to_end(self, actor: Actor) -> None:
        os.kill(actor.pid, signal.SIGTERM)

    def await_end(self, actor: Actor, seconds: float) -> None:
        """Or not for longer than that: what is missing by then is for the checker to say."""
        deadline = time.monotonic() + seconds
        while not self.has_ended(actor) and time.monotonic() < deadline:
            self.check_alive()
            time.sleep(0.02)

    def check_alive(self) -> None:
        """Whoever ended by himself, and not well, has found a defect: ours or the product's."""
        for actor in self.actors.values():
            if actor.process is not None and actor.process.exitcode:
                said = (self.setting.logs / f"{actor.who}.said").read_text(errors="replace")[-4000:]
                raise RuntimeError(f"{actor.who} ended by itself ({actor.process.exitcode}): {said}")

    def kill(self, actor: Actor) -> None:
        self._log.write("killing", role=actor.role, value=actor.who)
        os.kill(actor.pid, signal.SIGKILL)
        assert actor.process is not None
        actor.process.join()
        actor.process.close()
        actor.process = None
        self.kills[actor.role] = self.kills.get(actor.role, 0) + 1

    def stop(self, actor: Actor) -> None:
        self._log.write("stopping", role=actor.role, value=actor.who)
        os.kill(actor.pid, signal.SIGSTOP)

    def carry_on(self, actor: Actor) -> None:
        os.kill(actor.pid, signal.SIGCONT)
        self._log.write("continued", role=actor.role, value=actor.who)

    # the server

    def kill_server(self) -> None:
        assert self.server is not None
        self._log.write("killing", role="server", value="server")
        self.server.kill()
        self.kills["server"] = self.kills.get("server", 0) + 1

    def start_server(self) -> None:
        assert self.server is not None
        self.server.start()
        self._log.write("up", role="server", value="server")

    def keep_logs(self) -> Path:
        """For whoever must find out why."""
        return Path(
            shutil.copytree(self.setting.logs, tempfile.mkdtemp(prefix="chaos-logs-"), dirs_exist_ok=True)
        )
