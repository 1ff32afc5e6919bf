"""Agents for servers, whatever door they take their jobs from: an engine in this process, or a hub far away.

Owns the composition: which connectors a worker gets, and one agent for them. What a pool knows of its servers beside
that is `servers.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.pool.options import Server
from comfyfleet.ports import Connector, WorkerApi
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI, ComfyUISettings
from comfyfleet.worker.connectors.simulated import SimulatedConnector
from comfyfleet.worker.journal import Journal
from comfyfleet.worker.settings import AgentSettings, AgentState


class Member:
    """A server with what was made for it."""

    __slots__ = ("agent", "connector", "server")

    def __init__(self, server: Server, connector: Connector, agent: Agent) -> None:
        self.server = server
        self.connector = connector
        """Its first service; most workers have no other."""
        self.agent = agent


class Agents:
    """Added one by one, while others run; ended together. `journals` is the folder for what must outlive a crash."""

    def __init__(
        self,
        on_state: Callable[[str, AgentState], None],
        agent: AgentSettings | None = None,
        comfyui: ComfyUISettings | None = None,
        journals: Path | None = None,
    ) -> None:
        self._journals = journals
        self._on_state = on_state
        self._agent_settings = agent or AgentSettings()
        self._comfyui_settings = comfyui or ComfyUISettings()
        self._members: dict[str, Member] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    def members(self) -> Iterable[Member]:
        return self._members.values()

    def journal_of(self, server: Server) -> Journal | None:
        """None for what ends with this process: there is nothing to go on with."""
        connectors = [*((server.connector,) if server.connector is not None else ()), *server.more]
        is_pretended = all(isinstance(connector, SimulatedConnector) for connector in connectors)
        if self._journals is None or not server.keeps_journal or (server.url is None and is_pretended):
            return None
        return Journal(self._journals, WorkerId(str(server.id)))

    async def add(self, api: WorkerApi, server: Server, journal: Journal | None = None) -> None:
        """Returns at once; a server, or a hub, that is down is waited for in the background."""
        name = server.id
        assert name is not None, "whoever adds a server has named it"
        if name in self._members:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"there is a server {name!r} already; give this one an id"
            )
        connector = server.connector or self._comfyui(server)
        agent = Agent(
            api,
            WorkerId(name),
            [connector, *server.more],
            msgspec.structs.replace(self._agent_settings, slots=server.slots),
            declared=server.capabilities,
            on_state=lambda state: self._on_state(name, state),
            journal=journal or self.journal_of(server),
        )
        self._members[name] = Member(server, connector, agent)
        await agent.start()

    def _comfyui(self, server: Server) -> Connector:
        if server.url is None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"server {server.id!r} has neither a url nor a connector"
            )
        headers = {**self._comfyui_settings.headers, **server.headers}
        settings = msgspec.structs.replace(
            self._comfyui_settings,
            headers=headers,
            folder=server.folder,
            clears_history=server.clears_history,
        )
        return ComfyUI(server.url, settings)

    async def remove(self, name: str, *, drain: bool) -> None:
        member = self._members[name]
        if drain:
            await member.agent.drain()
        await member.agent.stop()
        del self._members[name]

    async def first_verdicts(self) -> None:
        await asyncio.gather(*(member.agent.first_verdict() for member in self._members.values()))

    async def drain(self) -> None:
        await asyncio.gather(*(member.agent.drain() for member in self._members.values()))

    async def drained(self) -> None:
        """Until each of them was told to drain and has done so."""
        await asyncio.gather(*(member.agent.drained() for member in self._members.values()))

    async def close(self) -> None:
        await asyncio.gather(*(member.agent.stop() for member in self._members.values()))
