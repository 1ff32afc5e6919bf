"""Agents for servers, whatever door they take their jobs from: an engine in this process, or a hub far away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.pool.options import Server
from comfyfleet.ports import Connector, WorkerApi
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI, ComfyUISettings
from comfyfleet.worker.settings import AgentSettings, AgentState


class Agents:
    """Added one by one, while others run; ended together."""

    def __init__(
        self,
        on_state: Callable[[str, AgentState], None],
        agent: AgentSettings | None = None,
        comfyui: ComfyUISettings | None = None,
    ) -> None:
        self._on_state = on_state
        self._agent_settings = agent or AgentSettings()
        self._comfyui_settings = comfyui or ComfyUISettings()
        self._agents: dict[str, Agent] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._agents

    def __len__(self) -> int:
        return len(self._agents)

    async def add(self, api: WorkerApi, server: Server) -> None:
        """Returns at once; a server, or a hub, that is down is waited for in the background."""
        name = server.id
        assert name is not None, "whoever adds a server has named it"
        if name in self._agents:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"two servers are named {name!r}: name them apart")
        agent = Agent(
            api,
            WorkerId(name),
            [server.connector or self._comfyui(server)],
            msgspec.structs.replace(self._agent_settings, slots=server.slots),
            declared=server.capabilities,
            on_state=lambda state: self._on_state(name, state),
        )
        self._agents[name] = agent
        await agent.start()

    def _comfyui(self, server: Server) -> Connector:
        assert server.url is not None, "a server without a connector has an address"
        headers = {**self._comfyui_settings.headers, **server.headers}
        return ComfyUI(server.url, msgspec.structs.replace(self._comfyui_settings, headers=headers))

    async def first_verdicts(self) -> None:
        await asyncio.gather(*(agent.first_verdict() for agent in self._agents.values()))

    async def drain(self) -> None:
        await asyncio.gather(*(agent.drain() for agent in self._agents.values()))

    async def drained(self) -> None:
        """Until each of them was told to drain and has done so."""
        await asyncio.gather(*(agent.drained() for agent in self._agents.values()))

    async def close(self) -> None:
        await asyncio.gather(*(agent.stop() for agent in self._agents.values()))
