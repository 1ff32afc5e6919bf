"""The servers of a pool by their names: added and removed while everything runs, asked for files and for figures.

The agents behind them are `agents.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import OutputFile
from comfyfleet.model.worker import Capabilities
from comfyfleet.pool.agents import Agents, Member
from comfyfleet.pool.checks import SERVER, check
from comfyfleet.pool.options import Server
from comfyfleet.pool.records import ServerStats
from comfyfleet.ports import Clock
from comfyfleet.worker.connectors.comfyui import ComfyUI, ComfyUISettings, server_id
from comfyfleet.worker.settings import AgentSettings, AgentState, AgentStatus


@runtime_checkable
class Fetches(Protocol):
    """A connector whose outputs can be fetched."""

    async def fetch(self, file: OutputFile) -> bytes: ...


class Servers:
    def __init__(
        self,
        engine: Engine,
        agent_settings: AgentSettings,
        comfyui_settings: ComfyUISettings,
        slots: int,
        clock: Clock,
        on_state: Callable[[str, AgentState], None],
        journals: Path | None = None,
    ) -> None:
        self._engine = engine
        self._comfyui_settings = comfyui_settings
        self._slots = slots
        self._clock = clock
        self._agents = Agents(on_state, agent_settings, comfyui_settings, journals)
        self._added_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._agents)

    def names(self) -> tuple[str, ...]:
        return self._agents.names()

    def online(self) -> int:
        return sum(member.agent.state.status is AgentStatus.ONLINE for member in self._agents.members())

    async def add(self, given: str | Server) -> str:
        server = Server(given, slots=self._slots) if isinstance(given, str) else given
        if not isinstance(server, Server):
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"a server is an address or a Server; {given!r} is neither"
            )
        check(SERVER, msgspec.structs.asdict(server))
        name = self._name(server)
        declared = server.capabilities
        if not self._engine.store.is_shared:
            # Nobody else's jobs are here, and the program has named each of its servers: a fake is meant to work too.
            declared = msgspec.structs.replace(declared or Capabilities(()), works_beside_real=True)
        server = msgspec.structs.replace(server, id=name, capabilities=declared)
        await self._agents.add(self._engine, server)
        self._added_at[name] = self._clock.now()
        return name

    @staticmethod
    def _name(server: Server) -> str:
        if server.id is not None:
            return server.id
        if server.url is None:
            raise Refusal(RefusalCode.INVALID_REQUEST, "a server needs a url or an id")
        try:
            return server_id(server.url)
        except ValueError as error:
            raise Refusal(RefusalCode.INVALID_REQUEST, str(error)) from error

    async def first_verdicts(self) -> None:
        await self._agents.first_verdicts()

    async def remove(self, name: str, *, drain: bool) -> None:
        self._member(name)
        await self._agents.remove(name, drain=drain)
        self._added_at.pop(name, None)
        await self._engine.remove_worker(WorkerId(name))

    async def refresh(self, name: str | None) -> None:
        members = self._agents.members() if name is None else (self._member(name),)
        await asyncio.gather(*(member.agent.refresh() for member in members))

    async def drain(self) -> None:
        await self._agents.drain()

    async def drained(self) -> None:
        """Until each of them was told to drain and has done so."""
        await self._agents.drained()

    async def close(self) -> None:
        await self._agents.close()

    async def fetch(self, file: OutputFile, name: str | None) -> bytes:
        is_elsewhere = self._engine.store.is_shared and file.url is not None
        if name is not None and name not in self._agents and is_elsewhere:
            return await self._fetch_elsewhere(file)
        for member in self._agents.members() if name is None else (self._member(name),):
            is_its = name is not None or (
                isinstance(member.connector, ComfyUI)
                and file.url is not None
                and file.url.startswith(member.connector.address.base)
            )
            if is_its and isinstance(member.connector, Fetches):
                return await member.connector.fetch(file)
        if is_elsewhere:
            return await self._fetch_elsewhere(file)
        raise Refusal(
            RefusalCode.NOT_FOUND, f"no server of the pool has {file.filename!r}; say which with client_id"
        )

    async def _fetch_elsewhere(self, file: OutputFile) -> bytes:
        """From a server that another process on the store drives, by the address the file was reported with."""
        base, separator, _ = (file.url or "").rpartition("/view?")
        if not separator:
            raise Refusal(
                RefusalCode.NOT_FOUND, f"{file.filename!r} lies at {file.url}, which is no ComfyUI's"
            )
        # Our own credentials are for our own servers.
        settings = msgspec.structs.replace(self._comfyui_settings, headers={})
        async with ComfyUI(base, settings) as server:
            return await server.fetch(file)

    async def stats(self) -> tuple[ServerStats, ...]:
        records = {worker.worker_id: worker for worker in await self._engine.workers()}
        now = self._clock.now()
        blocks = [
            block for block in await self._engine.blocks() if block.is_in_force(now) and not block.names_job
        ]
        found = []
        for member in self._agents.members():
            name = str(member.agent.worker_id)
            worker = records.get(WorkerId(name))
            completed, failed = (0, 0) if worker is None else (worker.completed, worker.failed)
            running = len(await self._engine.store.leases_of(WorkerId(name)))
            lived_s = max(1e-9, (now - self._added_at.get(name, now)) * member.server.slots)
            found.append(
                ServerStats(
                    id=name,
                    url=member.server.url,
                    state=member.agent.state.status.value,
                    reason=member.agent.state.reason,
                    slots=member.server.slots,
                    running=running,
                    completed=completed,
                    failed=failed,
                    utilisation=0.0 if worker is None else min(1.0, worker.busy_s / lived_s),
                    disconnects=member.agent.state.disconnects,
                    blocked_workflows=sum(block.worker_id == name for block in blocks),
                    success_rate=completed / (completed + failed) if completed + failed else None,
                )
            )
        return tuple(found)

    def _member(self, name: str) -> Member:
        try:
            return self._agents[name]
        except KeyError:
            known = ", ".join(self._agents.names()) or "none"
            raise Refusal(
                RefusalCode.NOT_FOUND, f"the pool has no server {name!r}; it has: {known}"
            ) from None
