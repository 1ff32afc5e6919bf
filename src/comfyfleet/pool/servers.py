"""Agents for servers: `PoolAgents` for any worker API, `PoolServers` for a pool, `StoreWorkers` for a shared store.

`StoreWorkers` is an engine with one agent for each server and without callers: it runs the jobs that other processes
submit to the store. A store that belongs to one process is refused there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import OutputFile
from comfyfleet.model.worker import Capabilities
from comfyfleet.policy.rules import Rules
from comfyfleet.pool.options import SERVER, Server, check
from comfyfleet.pool.records import ServerStats
from comfyfleet.ports import Clock, Connector, Store, WorkerApi
from comfyfleet.stores.factory import open_store, refuse_if_encrypted
from comfyfleet.stores.failure_texts import without_a_hub
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI, ComfyUISettings, server_id
from comfyfleet.worker.connectors.registry import payload_formats
from comfyfleet.worker.connectors.simulated import SimulatedConnector
from comfyfleet.worker.journal import Journal
from comfyfleet.worker.settings import AgentSettings, AgentState, AgentStatus


class PoolMember(NamedTuple):
    """A server with its connector and agent."""

    server: Server
    connector: Connector
    """The first service. Most workers have no other."""
    agent: Agent


class PoolAgents:
    """Agents that are added one by one and closed together. `journals` is a folder for state that survives a crash."""

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
        self.comfyui_settings = comfyui or ComfyUISettings()
        self._members: dict[str, PoolMember] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, name: str) -> PoolMember:
        return self._members[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    def members(self) -> Iterable[PoolMember]:
        return self._members.values()

    def journal_of(self, server: Server) -> Journal | None:
        """None for a server that ends with this process and so has nothing to resume."""
        connectors = [*((server.connector,) if server.connector is not None else ()), *server.more]
        is_simulated = all(isinstance(connector, SimulatedConnector) for connector in connectors)
        if self._journals is None or not server.keeps_journal or (server.url is None and is_simulated):
            return None
        return Journal(self._journals, WorkerId(str(server.id)))

    async def add(self, api: WorkerApi, server: Server, journal: Journal | None = None) -> None:
        """Add a server and return at once. The agent waits in the background for a server or hub that is down."""
        name = server.id
        assert name is not None, "the caller sets the id"
        if name in self._members:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"the server id {name!r} is already in use; give this server another id",
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
        self._members[name] = PoolMember(server, connector, agent)
        await agent.start()

    def _comfyui(self, server: Server) -> Connector:
        if server.url is None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"server {server.id!r} has neither a url nor a connector"
            )
        headers = {**self.comfyui_settings.headers, **server.headers}
        settings = msgspec.structs.replace(
            self.comfyui_settings,
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

    async def wait_for_first_checks(self) -> None:
        await asyncio.gather(*(member.agent.wait_for_first_check() for member in self._members.values()))

    async def drain(self) -> None:
        await asyncio.gather(*(member.agent.drain() for member in self._members.values()))

    async def drained(self) -> None:
        """Wait until every agent was told to drain and has done so."""
        await asyncio.gather(*(member.agent.drained() for member in self._members.values()))

    async def close(self) -> None:
        await asyncio.gather(*(member.agent.stop() for member in self._members.values()))


@runtime_checkable
class FetchesOutputs(Protocol):
    """A connector whose outputs can be fetched."""

    async def fetch(self, file: OutputFile) -> bytes: ...


class PoolServers:
    def __init__(self, engine: Engine, agents: PoolAgents, slots: int = 1) -> None:
        """`slots` is the default of a server."""
        self._engine = engine
        self.agents = agents
        self._slots = slots
        self._added_at: dict[str, float] = {}

    def online(self) -> int:
        return sum(member.agent.state.status is AgentStatus.ONLINE for member in self.agents.members())

    async def add(self, given: str | Server) -> str:
        server = Server(given, slots=self._slots) if isinstance(given, str) else given
        if not isinstance(server, Server):
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"a server is an address or a Server; {given!r} is neither"
            )
        check(SERVER, msgspec.structs.asdict(server))
        name = self._name(server)
        declared = server.capabilities
        if not self._engine.reader.is_shared:
            # All jobs are of this program, which named its servers, so a fake server may work too.
            declared = msgspec.structs.replace(declared or Capabilities(()), works_beside_real=True)
        server = msgspec.structs.replace(server, id=name, capabilities=declared)
        await self.agents.add(self._engine, server)
        self._added_at[name] = self._engine.now()
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

    async def remove(self, name: str, *, drain: bool) -> None:
        self._member(name)
        await self.agents.remove(name, drain=drain)
        self._added_at.pop(name, None)
        await self._engine.remove_worker(WorkerId(name))

    async def refresh(self, name: str | None) -> None:
        members = self.agents.members() if name is None else (self._member(name),)
        await asyncio.gather(*(member.agent.refresh() for member in members))

    async def fetch(self, file: OutputFile, name: str | None) -> bytes:
        is_elsewhere = self._engine.reader.is_shared and file.url is not None
        if name is not None and name not in self.agents and is_elsewhere:
            return await self._fetch_elsewhere(file)
        for member in self.agents.members() if name is None else (self._member(name),):
            is_its = name is not None or (
                isinstance(member.connector, ComfyUI)
                and file.url is not None
                and file.url.startswith(member.connector.address.base)
            )
            if is_its and isinstance(member.connector, FetchesOutputs):
                return await member.connector.fetch(file)
        if is_elsewhere:
            return await self._fetch_elsewhere(file)
        raise Refusal(
            RefusalCode.NOT_FOUND,
            f"no server of the pool has {file.filename!r}; name the server with client_id",
        )

    async def _fetch_elsewhere(self, file: OutputFile) -> bytes:
        """Fetch from a server of another process on the store, by the URL in the file."""
        base, separator, _ = (file.url or "").rpartition("/view?")
        if not separator:
            raise Refusal(
                RefusalCode.NOT_FOUND, f"{file.filename!r} is at {file.url}, which is not a ComfyUI server"
            )
        # The headers with credentials are only for our own servers.
        settings = msgspec.structs.replace(self.agents.comfyui_settings, headers={})
        async with ComfyUI(base, settings) as server:
            return await server.fetch(file)

    async def stats(self) -> tuple[ServerStats, ...]:
        records = {worker.worker_id: worker for worker in await self._engine.workers()}
        now = self._engine.now()
        blocks = [
            block for block in await self._engine.blocks() if block.is_in_force(now) and not block.names_job
        ]
        found = []
        for member in self.agents.members():
            name = str(member.agent.worker_id)
            worker = records.get(WorkerId(name))
            completed, failed = (0, 0) if worker is None else (worker.completed, worker.failed)
            running = len(await self._engine.reader.leases_of(WorkerId(name)))
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

    def _member(self, name: str) -> PoolMember:
        try:
            return self.agents[name]
        except KeyError:
            known = ", ".join(self.agents.names()) or "none"
            raise Refusal(
                RefusalCode.NOT_FOUND, f"the pool has no server {name!r}; it has: {known}"
            ) from None


class StoreWorkers:
    """An async context manager. It enters when every server was asked for its inventory, and closing stops at once."""

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
        encryption: Callable[[Store, Clock], Store] | None = None,
    ) -> None:
        """`encryption` wraps a store with encrypted jobs. Without it such a store is refused."""
        clock = SystemClock()
        opened = open_store(store, clock)
        # In an encrypted store, error texts of servers may stay in the store.
        opened = without_a_hub(opened) if encryption is None else encryption(opened, clock)
        self._has_keys = encryption is not None
        if not opened.is_shared:
            scheme = urlsplit(store).scheme
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"a {scheme}: store belongs to the one process that opens it, so another worker process cannot use it: "
                "use a redis://… or postgresql://… store, or give the servers to that one process",
            )
        self._engine = Engine(opened, rules=rules, clock=clock, formats=payload_formats())
        self._servers = PoolServers(self._engine, PoolAgents(on_state, agent, comfyui, journals))
        self._first_servers = tuple(servers)

    async def __aenter__(self) -> StoreWorkers:
        await self._engine.__aenter__()
        try:
            if not self._has_keys:
                await refuse_if_encrypted(self._engine.store.documents)
            for server in self._first_servers:
                await self._servers.add(server)
            await self._servers.agents.wait_for_first_checks()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def drain(self) -> None:
        """Take no new jobs. Return when the running ones have ended or, after the grace, were released."""
        await self._servers.agents.drain()

    async def drained(self) -> None:
        """Return when every server was told to drain and has done so."""
        await self._servers.agents.drained()

    async def close(self) -> None:
        await self._servers.agents.close()
        await self._engine.close()
