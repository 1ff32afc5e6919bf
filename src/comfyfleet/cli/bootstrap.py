"""A hub put together from settings: a store, an engine on it, the hub on a port, and a key for the owner.

Who lives in it (agents, a demo) and when it ends is for the commands.

Where a hub's files lie, from its settings: a folder beside its store, or a bucket of S3-compatible storage.

The databases of tenants, from the settings of a hub. Each is opened when the first tenant needs it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shlex
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from comfyfleet.cli.encryption_keys import attended, database_encryption, encrypted_by, keyring_of
from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.hub_connection import LocalHub, make_data_folder, read_hub, tighten_data_folder, write_hub
from comfyfleet.cli.output import echo
from comfyfleet.cli.settings import ResolvedSettings, masked, proxies_of
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.files.local import LocalFileStore
from comfyfleet.files.record_store import DocumentsOf
from comfyfleet.files.s3 import S3FileStore
from comfyfleet.files.s3_storage import S3Bucket, S3Credentials, StorageRefused
from comfyfleet.hub.app import Hub
from comfyfleet.hub.http.credentials import is_loopback
from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.hub.local_worker_api import LocalWorkerApi
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Fault
from comfyfleet.net.url_guard import UrlGuard
from comfyfleet.policy.rules import DAY_S
from comfyfleet.ports import Clock, DocumentStore, FileStore
from comfyfleet.stores.factory import open_store, risk_of
from comfyfleet.tenancy.database.registry import DEFAULT_POOL
from comfyfleet.tenancy.keys import KEY_PREFIX
from comfyfleet.tenancy.services import TenantServices

_LOG = logging.getLogger(__name__)


@asynccontextmanager
async def open_assets(
    resolved: ResolvedSettings,
    documents: DocumentStore,
    clock: Clock,
    documents_of: DocumentsOf | None = None,
) -> AsyncIterator[FileStore]:
    """`documents_of`: where the records of each tenant's files lie; unless said, all in `documents`."""
    keep_s = resolved.retention().files_days * DAY_S
    tenant_bytes = resolved.limits().max_tenant_file_bytes
    if resolved.values.assets is None:
        folder = resolved.data / "files"
        yield LocalFileStore(
            folder, documents, clock, keep_s=keep_s, documents_of=documents_of, tenant_bytes=tenant_bytes
        )
        return
    bucket, prefix, credentials = storage(resolved)
    async with S3FileStore(
        bucket,
        credentials,
        documents,
        clock,
        prefix=prefix,
        keep_s=keep_s,
        documents_of=documents_of,
        tenant_bytes=tenant_bytes,
    ) as assets:
        try:
            await assets.look()
        except StorageRefused as refused:
            # Nothing but other settings will help; told now, nobody finds out by the first picture.
            if refused.status < 500 and refused.status != 429:
                raise resolved.wrong("assets", str(refused)) from refused
            _LOG.warning("files cannot be kept for now: %s", refused)
        except Fault as fault:
            # It may come back, and jobs without files need none of it.
            _LOG.warning("files cannot be kept for now: %s", fault)
        yield assets


def storage(resolved: ResolvedSettings) -> tuple[S3Bucket, str, S3Credentials]:
    """Bucket, prefix and credentials. Raises `CommandFailed` with the name of the setting that will not do."""
    for mistake in storage_mistakes(resolved):
        raise mistake
    parts, chosen = urlsplit(resolved.values.assets or ""), resolved.s3()
    bucket = S3Bucket(chosen.endpoint.rstrip("/"), chosen.region, parts.netloc, chosen.path_style)
    credentials = S3Credentials(chosen.access_key, chosen.secret_key, chosen.session_token or None)
    return bucket, unquote(parts.path).strip("/"), credentials


def storage_mistakes(resolved: ResolvedSettings) -> Iterator[CommandFailed]:
    parts, chosen = urlsplit(resolved.values.assets or ""), resolved.s3()
    if parts.scheme != "s3" or not parts.hostname or parts.query or "@" in parts.netloc:
        yield resolved.wrong("assets", "write s3://BUCKET or s3://BUCKET/PREFIX; all else is said in [s3]")
    endpoint = urlsplit(chosen.endpoint)
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname or endpoint.query:
        yield resolved.wrong("s3.endpoint", "write the storage's address, such as https://storage.example")
    for name in ("access_key", "secret_key", "region"):
        if not getattr(chosen, name):
            yield resolved.wrong(f"s3.{name}", "it is needed beside 'assets'")


def pool_urls(resolved: ResolvedSettings) -> dict[str, str]:
    """Beside an embedded store there is one without being asked for; once tenants lie in it, it stays when others are
    named. On a shared one every hub must name the same, so nothing is guessed."""
    chosen = resolved.values
    if not (chosen.store is None or chosen.store.startswith("sqlite:")):
        return dict(chosen.pools)
    file = (resolved.data / "tenants.db").resolve()
    if chosen.pools and not file.exists():
        # Whoever names every pool means those: a tenant without one is refused, not put somewhere else.
        return dict(chosen.pools)
    return {DEFAULT_POOL: f"sqlite:///{quote(str(file))}", **chosen.pools}


T = TypeVar("T")


_FILES = 65_536


class RunningHub(msgspec.Struct, frozen=True):
    engine: Engine
    hub: Hub
    api: LocalWorkerApi
    """The door of agents in this process."""
    serving: HubServer
    url: str
    """As this machine reaches it."""
    key: str
    """The owner's, an administrator."""
    is_key_new: bool
    key_file: Path


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """On the faster loop where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    ran: T = uvloop.run(work)
    return ran


@asynccontextmanager
async def run_hub(resolved: ResolvedSettings) -> AsyncIterator[RunningHub]:
    """Inside it the hub answers. What wants to stay in its data folder does so."""
    _take_files()
    settings = resolved.values
    serving_settings = _serving_settings(resolved)
    make_data_folder(resolved.data)
    known = read_hub(resolved.data)
    await asyncio.to_thread(tighten_data_folder, resolved.data)
    clock = SystemClock()
    plain = open_store(settings.store or embedded_store(resolved.data), clock)
    keyring = keyring_of(resolved, plain.documents, clock)
    store = encrypted_by(keyring, plain)
    tenant_services = TenantServices(
        store, clock, pool_urls(resolved), around=database_encryption(keyring), retention=resolved.retention()
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(tenant_services.close)
        engine = Engine(tenant_services.store, rules=resolved.rules(), clock=clock)
        await stack.enter_async_context(engine)
        if risk := risk_of(plain):
            _LOG.warning("%s", risk)
        await stack.enter_async_context(attended(keyring, store))
        assets = await stack.enter_async_context(
            open_assets(resolved, store.documents, engine.clock, tenant_services.documents_of)
        )
        hub = Hub(
            engine,
            store.documents,
            engine.clock,
            limits=resolved.limits(),
            is_open=settings.open,
            legacy_websocket=settings.legacy_websocket,
            assets=assets,
            guard=UrlGuard(resolved.allowed()),
            tenant_services=tenant_services,
            shred=None if keyring is None else keyring.shred,
            retention=resolved.retention(),
            proxies=proxies_of(resolved),
        )
        # Behind the hub, which has told the engine of tenants' terms: what a relay brings in is placed by them.
        await stack.enter_async_context(tenant_services.kept(engine.admit))
        key, is_new = await _owners_key(hub, known)
        async with HubServer(hub, serving_settings) as serving:
            url = _near_url(serving, settings.host)
            local = LocalHub(url, key, _absolute(settings.certificate))
            file = write_hub(resolved.data, local)
            hub.keys.on_rotated = _following(resolved.data, local, key)
            _settle()
            yield RunningHub(engine, hub, LocalWorkerApi(engine, assets), serving, url, key, is_new, file)


def _take_files() -> None:
    """As many connections as the system allows, where it gives a process fewer to begin with."""
    try:
        import resource
    except ModuleNotFoundError:
        return
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
    if files != resource.RLIM_INFINITY and files < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _settle() -> None:
    """The process is a server from now on: tuned for many small requests beside a thread that writes."""
    # What is there now stays to the end; the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    # A request makes hundreds of objects, nearly all without cycles: most are gone before so many have come together.
    gc.set_threshold(20_000, 20, 20)
    # Between two statements the writer waits for the loop to let go, by default up to five milliseconds each time.
    sys.setswitchinterval(0.0005)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def embedded_store(data: Path) -> str:
    return f"sqlite:///{quote(str((data / 'fleet.db').resolve()))}"


async def _owners_key(hub: Hub, known: LocalHub | None) -> tuple[str, bool]:
    """Made at the first start. One that was lost or revoked is made anew: whoever starts a hub on its store owns it."""
    if known is not None and known.key is not None:
        key = await hub.keys.check(known.key)
        if key is not None and key.role is Role.ADMIN:
            return known.key, False
    _, made = await hub.keys.create(Role.ADMIN, name=f"owner at {socket.gethostname()}")
    return made, True


def _following(data: Path, local: LocalHub, owners: str) -> Callable[[str, str], None]:
    """Keeps the commands of this machine working when the owner's key gets a new secret."""

    def follow(key_id: str, secret: str) -> None:
        if owners.removeprefix(KEY_PREFIX).partition("_")[0] != key_id:
            return
        try:
            write_hub(data, msgspec.structs.replace(local, key=secret))
        except CommandFailed as error:
            # The new secret is on its way to whoever asked for it, and works; only this file has the old one.
            _LOG.error("the owner's key was rotated, and the new one could not be kept: %s", error)

    return follow


def _serving_settings(resolved: ResolvedSettings) -> HubServerSettings:
    settings = resolved.values
    if settings.open and not is_loopback(settings.host):
        raise resolved.wrong(
            "host", f"with 'open' nobody needs a key, so {settings.host} is refused: use keys, or 127.0.0.1"
        )
    if settings.certificate_key is not None and settings.certificate is None:
        raise resolved.wrong("certificate_key", "there is no 'certificate' to go with it")
    if settings.certificate is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.certificate, settings.certificate_key
            )
        except (OSError, ssl.SSLError) as error:
            raise resolved.wrong("certificate", f"it cannot be used with its key: {error}") from error
    return HubServerSettings(
        settings.host,
        settings.port,
        settings.ws_port,
        settings.certificate,
        settings.certificate_key or settings.certificate,
    )


def _near_url(serving: HubServer, host: str) -> str:
    near = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host)
    if near is None:
        return serving.url
    scheme = serving.url.partition("://")[0]
    return f"{scheme}://{near}:{serving.port}"


def greet(running_hub: RunningHub, resolved: ResolvedSettings) -> None:
    """Where to go next. The key is shown the first time only, and only to somebody who sits at a terminal: what goes
    anywhere else is kept by whoever keeps logs."""
    settings = resolved.values
    echo(f"The hub answers at {running_hub.url}")
    if settings.ws_port is not None and running_hub.serving.ws_port is not None:
        echo(f"  and on port {running_hub.serving.ws_port}")
    echo(f"  keeps its jobs in {masked('store', settings.store) or resolved.data}")
    if settings.assets is not None:
        echo(f"  keeps its files in {masked('assets', settings.assets)}")
    if settings.open:
        echo("  asks nobody on this machine for a key")
    elif running_hub.is_key_new and sys.stdout.isatty():
        echo(f"  admin key, shown this once: {running_hub.key}")
        echo(f"    it is in {running_hub.key_file} too, which nobody else can read")
    else:
        echo(f"  admin key: in {running_hub.key_file}, which nobody else can read")
    echo(
        f"  status page: {running_hub.url}/"
        + ("" if settings.open else " (any user name, the key as password)")
    )
    if not is_loopback(settings.host) and settings.certificate is None:
        echo(
            "Warning: keys travel unencrypted to other machines: give --certificate, or put a proxy with TLS in front",
            err=True,
        )
    if running_hub.is_key_new:
        echo("Next, in another terminal of this machine (it finds the hub and the key by itself):")
        # Named by a flag, the folder is unknown to whoever does not name it too.
        more = f" --data {shlex.quote(str(resolved.data))}" if "flag" in resolved.origin("data").place else ""
        echo(f"  {as_called()} submit workflow.json --watch --out pictures{more}")
        echo(f"  {as_called()} top{more}")


def as_called() -> str:
    """The command as the user has to type it: by its path, where it is in an environment that is not active."""
    called = sys.argv[0]
    return called if os.sep in called and shutil.which("comfyfleet") is None else "comfyfleet"
