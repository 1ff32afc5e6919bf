"""A hub on a free port of this machine, with a key for each role and somebody to ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import msgspec
from multidict import CIMultiDict

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.files.local import LocalFileStore
from comfyfleet.files.records import MAX_FILE_BYTES
from comfyfleet.hub.app import Hub
from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.hub.websocket.sessions import LegacyWebsocket
from comfyfleet.model.access import Role
from comfyfleet.model.ids import TenantId
from comfyfleet.net.url_guard import UrlGuard
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Clock, DocumentStore, FileStore, Store
from comfyfleet.stores.factory import open_store
from comfyfleet.tenancy.services import TenantServices
from comfyfleet.worker.connectors.registry import payload_formats

TENANT = TenantId("acme")


class Answer:
    def __init__(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.status = status
        self.headers = headers
        self.content = content

    @property
    def body(self) -> Any:
        return msgspec.json.decode(self.content)

    @property
    def code(self) -> str:
        """Of a problem."""
        assert self.headers["content-type"] == "application/problem+json", self.content
        body = self.body
        assert body["status"] == self.status
        assert body["title"] and body["type"].endswith(body["code"])
        return str(body["code"])


class HubRig:
    """Asks the application itself, or over a connection where it is served at `url`."""

    def __init__(
        self,
        hub: Hub,
        engine: Engine,
        documents: DocumentStore,
        keys: dict[Role, str],
        url: str = "",
        assets: LocalFileStore | None = None,
        tenant_services: TenantServices | None = None,
    ) -> None:
        self.assets = assets
        self._tenant_services = tenant_services
        self.hub = hub
        self.engine = engine
        self.keys = keys
        self.url = url
        self.documents = documents
        self._session: aiohttp.ClientSession | None = None

    @property
    def tenant_services(self) -> TenantServices:
        assert self._tenant_services is not None
        return self._tenant_services

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self.url, "this hub is not on a port"
        self._session = self._session or aiohttp.ClientSession()
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        role: Role | None = Role.ADMIN,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Answer:
        sent = {"host": "127.0.0.1", **(headers or {})}
        key = key or (None if role is None else self.keys[role])
        if key is not None:
            sent["authorization"] = f"Bearer {key}"
        data = raw if raw is not None else b"" if body is None else msgspec.json.encode(body)
        if not self.url:
            return await ask_app(self.hub, method, path, sent, data)
        del sent["host"]
        async with self.session.request(method, self.url + path, data=data, headers=sent) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **more: Any) -> Answer:
        return await self.ask("GET", path, **more)

    async def post(self, path: str, body: Any = None, **more: Any) -> Answer:
        return await self.ask("POST", path, body, **more)

    async def submit(self, **fields: Any) -> str:
        role = fields.pop("role", Role.ADMIN)
        answer = await self.post("/api/jobs", submission(**fields), role=role)
        assert answer.status == 201, answer.content
        return str(answer.body["id"])


def graph(kind: str = "KSampler", seed: int = 7) -> dict[str, Any]:
    return {
        "1": {"class_type": kind, "inputs": {"seed": seed}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }


def submission(**fields: Any) -> dict[str, Any]:
    return {"payload": {"workflow": fields.pop("workflow", graph())}, **fields}


async def ask_app(
    app: Hub, method: str, path: str, headers: Mapping[str, str], data: bytes, address: str = "127.0.0.1"
) -> Answer:
    """One request without a connection."""
    raw_path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(raw_path),
        "raw_path": raw_path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": (address, 1),
    }
    sent: list[MutableMapping[str, Any]] = []
    messages = iter([{"type": "http.request", "body": data, "more_body": False}])

    async def receive() -> MutableMapping[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await asyncio.Event().wait()
        raise AssertionError("nobody hangs up here")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *parts = sent
    got = CIMultiDict((name.decode(), value.decode()) for name, value in start["headers"])
    return Answer(start["status"], got, b"".join(part.get("body", b"") for part in parts))


@asynccontextmanager
async def hub_in_process(
    *,
    rules: Rules | None = None,
    limits: HubLimits | None = None,
    is_open: bool = False,
    store_url: str = "memory:",
    legacy_websocket: LegacyWebsocket = "on",
    folder: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    guard: UrlGuard | None = None,
    assets_on: Callable[[DocumentStore, Clock], FileStore] | None = None,
    databases: Mapping[str, str] | None = None,
    around: Callable[[Store, Clock], Store] = lambda store, _: store,
    shred: Callable[[TenantId], Awaitable[object]] | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[HubRig]:
    clock = clock or SystemClock()
    store = around(open_store(store_url, clock), clock)
    documents = store.documents
    tenant_services = TenantServices(store, clock, databases or {})
    async with AsyncExitStack() as stack:
        stack.push_async_callback(tenant_services.close)
        engine = Engine(
            tenant_services.store if databases else store,
            rules=rules,
            clock=clock,
            formats=payload_formats(),
        )
        await stack.enter_async_context(engine)
        documents_of = tenant_services.documents_of if databases else None
        assets = None
        if folder is not None:
            assets = LocalFileStore(
                folder, documents, clock, max_bytes=max_file_bytes, documents_of=documents_of
            )
        hub = Hub(
            engine,
            documents,
            clock,
            limits=limits,
            is_open=is_open,
            legacy_websocket=legacy_websocket,
            assets=assets if assets_on is None else assets_on(documents, clock),
            guard=guard,
            tenant_services=tenant_services,
            shred=shred,
        )
        if databases:
            await stack.enter_async_context(tenant_services.background_tasks(engine.admit))
        keys = {}
        for role in Role:
            tenant = TENANT if role is Role.TENANT else None
            keys[role] = (await hub.keys.create(role, tenant=tenant))[1]
        yield HubRig(hub, engine, documents, keys, assets=assets, tenant_services=tenant_services)


@asynccontextmanager
async def running_hub(settings: HubServerSettings | None = None, **options: Any) -> AsyncIterator[HubRig]:
    async with (
        hub_in_process(**options) as rig,
        HubServer(rig.hub, settings or HubServerSettings(port=0)) as serving,
    ):
        rig.url = serving.url
        try:
            yield rig
        finally:
            await rig.close()
