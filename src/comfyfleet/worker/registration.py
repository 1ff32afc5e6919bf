"""What a worker offers, and its registration at the hub.

`join` builds the offer from the operator's declaration and the servers' inventories. A declaration fills gaps
and overrides; it never adds a service without a connector. `agent.py` decides when to register.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.errors import Refusal
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.worker import Capabilities, Hardware, LiveState, Service
from comfyfleet.ports import InputSource, Inventory, NodeCatalogReceiver
from comfyfleet.worker.servers import MonitoredServer
from comfyfleet.worker.slots import AgentContext

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_NOTHING = Capabilities(services=())


class WorkerOffer(msgspec.Struct, frozen=True):
    capabilities: Capabilities
    live: LiveState
    boots: dict[str, str]
    """By service name: the server start at which its inventory was read."""

    def differs_from(self, other: WorkerOffer | None) -> bool:
        """Live values do not count: a change in them needs no registration."""
        return other is None or self.capabilities != other.capabilities or self.boots != other.boots


def join(
    declared: Capabilities | None, found: Mapping[str, Inventory], *, moves_files: bool = False
) -> WorkerOffer:
    """`found` is by service name. `moves_files` follows from the transport alone."""
    sources = [declared or _NOTHING, *(inventory.capabilities for inventory in found.values())]
    own = {service.name: service for service in sources[0].services}
    services = tuple(
        _join_service(own.get(service.name), service)
        for capabilities in sources[1:]
        for service in capabilities.services
    )
    return WorkerOffer(
        Capabilities(
            services=services,
            hardware=_hardware(sources[0].hardware, [source.hardware for source in sources[1:]]),
            tenant_access=_first([source.tenant_access for source in sources], _NOTHING.tenant_access),
            location=_first([source.location for source in sources], _NOTHING.location),
            performance=_over(
                sources[0].performance,
                _first([source.performance for source in sources[1:]], _NOTHING.performance),
            ),
            cost=_first([source.cost for source in sources], _NOTHING.cost),
            environment=_first([source.environment for source in sources], _NOTHING.environment),
            moves_files=moves_files,
            is_fake=sources[0].is_fake or bool(sources[1:] and all(source.is_fake for source in sources[1:])),
            works_beside_real=sources[0].works_beside_real,
        ),
        _live([inventory.live for inventory in found.values()]),
        {name: inventory.boot for name, inventory in found.items()},
    )


def _join_service(declared: Service | None, found: Service) -> Service:
    if declared is None:
        return found
    return Service(
        found.name,
        declared.providers or found.providers,
        declared.version or found.version,
        _union(declared.models, found.models),
        _union(declared.node_classes, found.node_classes),
        found.signature,
    )


def _union(declared: frozenset[str] | None, found: frozenset[str] | None) -> frozenset[str] | None:
    if declared is None or found is None:
        return found if declared is None else declared
    return declared | found


def _hardware(declared: Hardware, found: Sequence[Hardware]) -> Hardware:
    nothing = Hardware()
    return Hardware(
        _over(declared.gpu, _first([each.gpu for each in found], nothing.gpu)),
        _over(declared.cpu, _first([each.cpu for each in found], nothing.cpu)),
        _over(declared.memory, _first([each.memory for each in found], nothing.memory)),
    )


def _over(declared: S, found: S) -> S:
    """Overrides single fields: a declared amount of memory does not remove the found model of the card."""
    nothing = type(declared)()
    stated = {
        name: value
        for name in declared.__struct_fields__
        if (value := getattr(declared, name)) != getattr(nothing, name)
    }
    return msgspec.structs.replace(found, **stated)


def _live(sources: Sequence[LiveState]) -> LiveState:
    if len(sources) == 1:
        return sources[0]
    return LiveState(
        _first([source.free_vram_gb for source in sources], None),
        _first([source.available_ram_gb for source in sources], None),
    )


def _first(values: Sequence[T], nothing: T) -> T:
    return next((value for value in values if value != nothing), nothing)


_log = logging.getLogger(__name__)
_NO_ANSWER = "its server does not answer"


class Registration:
    def __init__(
        self,
        context: AgentContext,
        servers: Sequence[MonitoredServer],
        declared: Capabilities | None,
        on_change: Callable[[], None],
        on_renewal: Callable[[], None],
    ) -> None:
        """`on_change`: the offer may have changed. `on_renewal`: another offer replaced it."""
        self.offer: WorkerOffer | None = None
        """The registered offer."""
        self.number = 0
        """Counts registrations: a call that was refused under an older one need not register again."""
        self.instance = ""
        """Identifies this agent across restarts. Empty: unknown."""
        self.is_closed = False
        """Set when the worker leaves: it makes no new offer, and the old one stays until it unregisters."""
        self._api, self._worker_id, self._settings, self._outage = context
        self._servers = servers
        self._declared = declared
        self._on_change = on_change
        self._on_renewal = on_renewal
        self._described: NodeCatalog | None = None
        """The node classes that the hub was last sent."""
        self._offline_reason = ""
        """The reason that the hub was last given; empty while the worker is registered."""
        self._turn = asyncio.Lock()

    @property
    def offered(self) -> list[MonitoredServer]:
        return [server for server in self._servers if self.offer and server.name in self.offer.boots]

    async def refresh(self, *, is_asked: bool = False) -> None:
        """Reads the usable servers' inventories. Registers if they changed, or if `is_asked`."""
        async with self._turn:
            usable = _usable(self._servers)
            for server in usable:
                if not await server.read_inventory():
                    server.record_missed_check()
            offer = self._joined(server for server in usable if server.is_up)
            if offer is None or self.is_closed:
                return
            if is_asked or offer.differs_from(self.offer):
                await self._register(offer)
            else:
                await self._describe(offer)
                self._on_change()

    async def withdraw(self) -> bool:
        """Withdraws unusable servers; without any server the worker goes offline. False: repeat the call."""
        async with self._turn:
            if self.is_closed:
                return True
            offered = self.offered
            offer = self._joined(_usable(offered))
            if offer is not None and self.offer is not None and offer.boots.keys() != self.offer.boots.keys():
                try:
                    await self._register(offer)
                except Exception as error:
                    _log.info("worker %s could not withdraw an offer: %r", self._worker_id, error)
                    return False
                return True
            if offer is None:
                self.offer = None
            # A server may be back before its offer was withdrawn.
            self._on_change()
            if offer is None:
                await self._go_offline(is_first=bool(offered))
            return True

    async def _go_offline(self, *, is_first: bool) -> None:
        reason = _defects(self._servers) or _NO_ANSWER
        if not self.number:
            if reason != self._offline_reason and not any(server.is_up for server in self._servers):
                await self._announce(reason)
        # The hub is told again if the diagnosis has changed.
        elif is_first or (self._offline_reason and reason not in (self._offline_reason, _NO_ANSWER)):
            await self._say_goodbye(reason)
            self._offline_reason = reason

    async def _announce(self, reason: str) -> None:
        """Tells the hub that this worker exists and that its server never answered. Nothing depends on it."""
        offer = join(self._declared, {}, moves_files=isinstance(self._api, InputSource))
        try:
            async with asyncio.timeout(self._settings.heartbeat_timeout_s):
                await self._api.register(
                    RegisterWorker(
                        self._worker_id,
                        offer.capabilities,
                        self._settings.slots,
                        instance=self.instance,
                        offline_reason=reason,
                    )
                )
        except Refusal as refusal:
            # A hub of an older version refuses it. Any other cause also refuses the registration later.
            _log.info("worker %s could not report why it is offline: %s", self._worker_id, refusal)
        except Exception as error:
            _log.info(
                "worker %s could not report why it is offline; it tries again: %r", self._worker_id, error
            )
            return
        self._offline_reason = reason

    async def renew(self, number: int) -> None:
        """The hub does not know the worker any more, as after a restart. Concurrent callers register once."""
        try:
            async with self._turn:
                if self.number == number and self.offer is not None:
                    self._described = None
                    await self._register(self.offer)
        except Exception as error:
            self._outage.miss(error)

    async def end(self, reason: str) -> None:
        async with self._turn:
            was_registered = self.offer is not None or (self._offline_reason != "" and not self.number)
            self.offer = None
            self._on_change()
            if was_registered:
                await self._say_goodbye(reason)

    def _joined(self, servers: Iterable[MonitoredServer]) -> WorkerOffer | None:
        found = {server.name: server.inventory for server in servers if server.inventory}
        if not found:
            return None
        return join(self._declared, found, moves_files=isinstance(self._api, InputSource))

    async def _register(self, offer: WorkerOffer) -> None:
        await self._api.register(
            RegisterWorker(
                self._worker_id, offer.capabilities, self._settings.slots, offer.live, self.instance
            )
        )
        self._outage.registered()
        # Before the worker counts as online: callers that wait for that may use its node classes.
        await self._describe(offer)
        is_new, self.offer = self.offer is None, offer
        self._offline_reason = ""
        self.number += 1
        if not is_new:
            self._on_renewal()
        self._on_change()

    async def _describe(self, offer: WorkerOffer) -> None:
        """Sends the node classes if the hub wants them and they are new. No job depends on it."""
        catalogs = [
            server.inventory.nodes
            for server in self._servers
            if server.name in offer.boots
            and server.inventory is not None
            and server.inventory.nodes is not None
        ]
        # Each server has its own service, and at most one of them has node classes.
        nodes = next((each for each in catalogs if each.definitions), None)
        if not isinstance(self._api, NodeCatalogReceiver) or nodes is None or nodes == self._described:
            return
        try:
            await self._api.describe(self._worker_id, nodes)
            self._described = nodes
        except Exception as error:
            _log.info("worker %s could not send its node classes: %r", self._worker_id, error)

    async def _say_goodbye(self, reason: str) -> None:
        try:
            async with asyncio.timeout(self._settings.heartbeat_timeout_s):
                await self._api.unregister(self._worker_id, reason)
        except Exception as error:
            # The hub soon notices that polls and heartbeats are missing.
            _log.info("worker %s could not unregister: %r", self._worker_id, error)


def _defects(servers: Iterable[MonitoredServer]) -> str:
    """The connectors' own words, which contain no server address."""
    return "; ".join(server.defect for server in servers if server.defect and not server.is_up)


def _usable(servers: Iterable[MonitoredServer]) -> list[MonitoredServer]:
    now = asyncio.get_running_loop().time()
    return [server for server in servers if server.is_usable(now)]
