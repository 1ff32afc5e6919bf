"""Servers that work off a store which several processes share: an engine and one agent for each server, no callers.

It is a pool without its front: what waits on the store is taken from there, and whoever submitted it hears of its end
there. Where the store belongs to one process there is nobody else to submit anything, so that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.shell import SystemClock
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.policy.rules import Rules
from comfyfleet.pool.options import Server
from comfyfleet.pool.servers import Servers
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.failure_texts import without_a_hub
from comfyfleet.stores.opening import open_store, refuse_if_sealed
from comfyfleet.worker.connectors.comfyui import ComfyUISettings
from comfyfleet.worker.settings import AgentSettings, AgentState


class DirectWorkers:
    """An async context manager: it returns once every server was asked what it has, and closing stops at once."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        store: str,
        on_state: Callable[[str, AgentState], None],
        rules: Rules | None = None,
        agent: AgentSettings | None = None,
        comfyui: ComfyUISettings | None = None,
        journals: Path | None = None,
        sealing: Callable[[Store, Clock], Store] | None = None,
    ) -> None:
        """`sealing` is put around the store where its jobs are sealed; without, such a store is refused."""
        clock = SystemClock()
        opened = open_store(store, clock)
        # Sealed, what a server said may lie in the store itself.
        opened = without_a_hub(opened) if sealing is None else sealing(opened, clock)
        self._has_keys = sealing is not None
        if not opened.is_shared:
            scheme = urlsplit(store).scheme
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"a {scheme}: store belongs to the one process that opens it, so a worker beside it cannot use it: "
                "share a redis://… or postgresql://… store, or give the servers to that one process",
            )
        self._engine = Engine(opened, rules=rules, clock=clock)
        self._servers = Servers(
            self._engine,
            agent or AgentSettings(),
            comfyui or ComfyUISettings(),
            1,
            self._engine.clock,
            on_state,
            journals,
        )
        self._first_servers = tuple(servers)

    async def __aenter__(self) -> DirectWorkers:
        await self._engine.__aenter__()
        try:
            if not self._has_keys:
                await refuse_if_sealed(self._engine.store.cabinet)
            for server in self._first_servers:
                await self._servers.add(server)
            await self._servers.first_verdicts()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def drain(self) -> None:
        """Nothing new is taken; returns when what runs has ended or, after the grace, was given back."""
        await self._servers.drain()

    async def drained(self) -> None:
        """Returns when every server has been told to drain, by whomever, and has done so."""
        await self._servers.drained()

    async def close(self) -> None:
        await self._servers.close()
        await self._engine.close()
