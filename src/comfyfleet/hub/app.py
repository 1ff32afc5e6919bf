"""The hub as one ASGI application: it composes the handlers, streams and background jobs around an engine.

The caller opens and closes the engine. `hub/http/server.py` serves the application on a port.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.types import Receive, Scope, Send

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemRandom
from comfyfleet.hub.audit.log import AuditLog, Kind, WorkerLog
from comfyfleet.hub.files.handlers import FileHandlers
from comfyfleet.hub.files.job_files import JobInputFiles
from comfyfleet.hub.fleet import FleetHandlers, TenantQueueStats
from comfyfleet.hub.health import HealthHandlers, version_here
from comfyfleet.hub.http.body import LargeBodies
from comfyfleet.hub.http.credentials import Authenticator, RevocationWatch, WorkersByKey
from comfyfleet.hub.http.limits import ConnectionLimits, HubLimits
from comfyfleet.hub.http.pipeline import RequestPipeline, handlers_in
from comfyfleet.hub.http.proxies import TrustedProxies
from comfyfleet.hub.jobs import DeleteHandlers, JobHandlers
from comfyfleet.hub.keys import KeyHandlers
from comfyfleet.hub.maintenance import HubMaintenance
from comfyfleet.hub.metrics import Metrics, MetricsHandlers
from comfyfleet.hub.pages import PageHandlers
from comfyfleet.hub.streams.feed import FleetFeed
from comfyfleet.hub.streams.job_channels import JobChannels
from comfyfleet.hub.streams.sse import StreamHandlers
from comfyfleet.hub.tenants.admission import TermsAdmission
from comfyfleet.hub.tenants.credits import CreditHandlers, UsageHandlers
from comfyfleet.hub.tenants.handlers import ReconcileHandlers, TenantHandlers
from comfyfleet.hub.tenants.maintenance import TenantMaintenance, TenantSuspension, UnrunnableJobTimeout
from comfyfleet.hub.webhooks.dispatcher import WebhookDispatcher
from comfyfleet.hub.webhooks.handlers import WebhookHandlers
from comfyfleet.hub.webhooks.sender import PendingDeliveries, WebhookSender
from comfyfleet.hub.websocket.sessions import LegacyWebsocket, WebSocketServer
from comfyfleet.hub.worker_protocol import WorkerHandlers
from comfyfleet.model.ids import TenantId
from comfyfleet.net.url_guard import UrlGuard
from comfyfleet.policy.rules import DAY_S, Retention
from comfyfleet.ports import Clock, DocumentStore, FileStore
from comfyfleet.tenancy.deletion import TenantDeletion, TenantResources
from comfyfleet.tenancy.keys import Keys
from comfyfleet.tenancy.relocation import TenantRelocation
from comfyfleet.tenancy.services import TenantServices
from comfyfleet.tenancy.terms import FairShareSync, TermsReview
from comfyfleet.tenancy.webhook_outbox import WebhookOutbox
from comfyfleet.tenancy.webhooks import Webhooks
from comfyfleet.tracing import BackgroundJob
from comfyfleet.wire.routes import ROUTES


class Hub:
    """With `is_open`, a request from this machine needs no key and has the role of an administrator.
    `legacy_websocket` says whether callers and monitors may use the WebSocket; workers always may. `guard`
    checks every URL that the hub calls for a tenant. `tenant_services` defaults to tenants without their
    own database. `shred` makes the encrypted data of a tenant unreadable for good. `proxies` may set the
    sender's address."""

    def __init__(
        self,
        engine: Engine,
        documents: DocumentStore,
        clock: Clock,
        *,
        limits: HubLimits | None = None,
        is_open: bool = False,
        legacy_websocket: LegacyWebsocket = "on",
        assets: FileStore | None = None,
        guard: UrlGuard | None = None,
        tenant_services: TenantServices | None = None,
        shred: Callable[[TenantId], Awaitable[object]] | None = None,
        retention: Retention | None = None,
        proxies: TrustedProxies | None = None,
    ) -> None:
        self.engine = engine
        self._proxies = proxies or TrustedProxies()
        self.is_open = is_open
        self.keys = Keys(documents, clock)
        retention = retention or Retention()
        keep_s: dict[Kind, float] = {
            "operations": retention.audit_days * DAY_S,
            "jobs": retention.audit_jobs_days * DAY_S,
        }
        self.audit = AuditLog(documents, clock, SystemRandom(), keep_s)
        self._worker_log = WorkerLog(engine, documents, self.audit)
        self.limits = limits or HubLimits()
        self._is_stopping = False
        self._channels, self._fleet = JobChannels(engine), FleetFeed(engine)
        self.connection_limits = connection_limits = ConnectionLimits(self.limits)
        metrics = Metrics(connection_limits, version_here())
        engine.set_write_listener(metrics.record_write)
        self._streams = StreamHandlers(
            engine, self._channels, self._fleet, connection_limits, self.limits.beat_s
        )
        guard, ledger, webhooks = guard or UrlGuard(), WebhookOutbox(documents), Webhooks(documents, clock)
        sender = WebhookSender(engine, ledger, webhooks, guard, SystemRandom())
        self._webhook_dispatcher = WebhookDispatcher(
            engine,
            ledger,
            webhooks,
            guard,
            sender,
            PendingDeliveries(ledger, self.limits.max_pending_deliveries),
        )
        credentials = Authenticator(self.keys, clock, self.limits, is_open=is_open)
        keyed = WorkersByKey(engine, self.keys)
        key_watch = RevocationWatch(self.keys, connection_limits, keyed, self.limits.beat_s)
        tenant_services = tenant_services or TenantServices(engine.store, clock, {})
        tenants, databases = tenant_services.tenants, tenant_services.databases
        cleanups = {
            "audit log entries": self.audit.clean_up,
            "tenant records": tenant_services.retention.clean_up,
            "worker notes": self._worker_log.clean_up,
        }
        if assets is not None:
            cleanups["files"] = assets.clean_up
        self.maintenance = HubMaintenance(cleanups)
        shares = FairShareSync(engine.store.fair_share)
        engine.set_admission_control(
            TermsAdmission(tenants, databases, documents, engine.clock, is_shared=engine.reader.is_shared)
        )
        engine.set_tenant_suspension(TenantSuspension(tenants, shares, self.audit).suspend)
        resources = TenantResources(
            cancel=engine.cancel,
            revoked=partial(_end_key, credentials, connection_limits),
            erase_files=None if assets is None else assets.forget_tenant,
            crypto_shred=shred,
        )
        relocation = TenantRelocation(tenants, databases, asyncio.sleep)
        deletion = TenantDeletion(
            engine.store, tenant_services.directory, self.keys, webhooks, ledger, resources, asyncio.sleep
        )
        stats = TenantQueueStats(engine, time.monotonic)
        judge = TermsReview(
            tenant_services.ledger_store.central,
            tenants,
            engine.waiting_job_review.reapply_terms,
            asyncio.sleep,
        )
        self._tenant_maintenance = TenantMaintenance(
            documents, clock, tenants, relocation, deletion, judge, shares, self.audit
        )
        self.unrunnable = UnrunnableJobTimeout(engine, tenants, documents, engine.clock)
        inputs = JobInputFiles(engine, assets)
        workers = WorkerHandlers(engine, self.limits.max_wait_s, assets, inputs, keyed)
        health = HealthHandlers(engine.reader, documents, clock, lambda: self._is_stopping)
        handlers = handlers_in(
            JobHandlers(engine, assets, inputs),
            DeleteHandlers(engine, tenant_services.directory),
            FileHandlers(engine, assets),
            WebhookHandlers(engine, webhooks, ledger, guard, sender, self._webhook_dispatcher.wake),
            self._streams,
            FleetHandlers(engine, stats),
            workers,
            TenantHandlers(tenant_services, shares, clock, self._tenant_maintenance.wake),
            CreditHandlers(engine, tenants, databases),
            UsageHandlers(tenant_services.directory, clock),
            ReconcileHandlers(tenant_services.reconciler),
            KeyHandlers(self.keys, credentials, connection_limits, self.audit, keyed),
            PageHandlers(engine, stats, version_here(), ROUTES),
            MetricsHandlers(engine, metrics),
            health,
        )
        self._background_jobs: tuple[BackgroundJob | WebhookDispatcher | WorkerLog, ...] = (
            self._webhook_dispatcher,
            key_watch,
            self._tenant_maintenance,
            self.unrunnable,
            self.maintenance,
            self._worker_log,
        )
        self._bodies = LargeBodies(self.limits)
        self._pipeline = RequestPipeline(
            ROUTES,
            handlers,
            credentials,
            self.limits,
            self.audit,
            connection_limits,
            metrics.record_answer,
            self._bodies,
            health.suspect,
        )
        self._sockets = WebSocketServer(
            engine,
            self._channels,
            self._fleet,
            credentials,
            self.limits,
            self.audit,
            connection_limits,
            inputs,
            workers,
            self._bodies,
            legacy_websocket,
        )

    @property
    def watchers(self) -> int:
        """Number of open streams."""
        return self._streams.watchers

    @property
    def sockets(self) -> int:
        """Number of open WebSockets."""
        return len(self._sockets)

    @property
    def in_flight(self) -> int:
        """Number of requests in progress, parked ones included."""
        return self._pipeline.in_flight

    @property
    def watched_jobs(self) -> int:
        """Number of jobs that clients watch."""
        return len(self._channels)

    def start(self) -> None:
        """Starts the background jobs. Can be called twice."""
        for job in self._background_jobs:
            job.start()

    async def finish(self) -> None:
        """Ends the background jobs; call `stop` first. Can be called twice."""
        for job in self._background_jobs:
            await job.close()
        await self.audit.close()
        self._bodies.close()

    def stop(self) -> None:
        """Answers parked requests and ends every stream, so that the server can end. Can be called twice."""
        self._is_stopping = True
        self._streams.close()
        self._sockets.close()
        self._channels.close()
        self._fleet.close()
        self._pipeline.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._pipeline(self._proxies.with_sender(scope), receive, send)
            case "websocket":
                await self._sockets(self._proxies.with_sender(scope), receive, send)
            case "lifespan":
                await self._lifespan(receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                self.stop()
                await self.finish()
                await send({"type": "lifespan.shutdown.complete"})
                return


def _end_key(credentials: Authenticator, connection_limits: ConnectionLimits, key_id: str) -> None:
    credentials.evict(key_id)
    connection_limits.end(key_id)
