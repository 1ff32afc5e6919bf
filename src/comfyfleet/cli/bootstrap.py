"""Builds a hub from the settings: store, engine, tenants' databases, storage of files, the server, the owner's key.

The commands add workers or a demo, and decide when it stops.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shlex
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from comfyfleet.cli.encryption import database_encryption, encrypted_by, keep_keys_fresh, keyring_of
from comfyfleet.cli.exit_codes import CommandFailed, as_called
from comfyfleet.cli.hub_connection import LocalHub, make_data_folder, read_hub, tighten_data_folder, write_hub
from comfyfleet.cli.output import echo
from comfyfleet.cli.settings import ResolvedSettings, masked, proxies_of
from comfyfleet.cli.settings_schema import DATABASES
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
from comfyfleet.model.errors import ComfyFleetError, Fault
from comfyfleet.net.url_guard import UrlGuard
from comfyfleet.policy.rules import DAY_S
from comfyfleet.ports import Clock, DocumentStore, FileStore
from comfyfleet.stores.factory import open_store, risk_of
from comfyfleet.tenancy.database.registry import DEFAULT_DATABASE, TenantDatabases
from comfyfleet.tenancy.keys import KEY_PREFIX
from comfyfleet.tenancy.services import TenantServices
from comfyfleet.worker.connectors.registry import payload_formats

_LOG = logging.getLogger(__name__)


@asynccontextmanager
async def open_assets(
    resolved: ResolvedSettings,
    documents: DocumentStore,
    clock: Clock,
    documents_of: DocumentsOf | None = None,
) -> AsyncIterator[FileStore]:
    """`documents_of` finds the records of a tenant's files. Default: all are in `documents`."""
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
            # Only other settings help, so fail now and not at the first picture.
            if refused.status < 500 and refused.status != 429:
                raise resolved.wrong("assets", str(refused)) from refused
            _LOG.warning("Cannot store files for now: %s", refused)
        except Fault as fault:
            # The storage may come back, and jobs without files do not need it.
            _LOG.warning("Cannot store files for now: %s", fault)
        yield assets


def storage(resolved: ResolvedSettings) -> tuple[S3Bucket, str, S3Credentials]:
    """Bucket, prefix and credentials. Raises `CommandFailed` with the name of the wrong setting."""
    for mistake in storage_mistakes(resolved):
        raise mistake
    parts, chosen = urlsplit(resolved.values.assets or ""), resolved.s3()
    bucket = S3Bucket(chosen.endpoint.rstrip("/"), chosen.region, parts.netloc, chosen.path_style)
    credentials = S3Credentials(chosen.access_key, chosen.secret_key, chosen.session_token or None)
    return bucket, unquote(parts.path).strip("/"), credentials


def storage_mistakes(resolved: ResolvedSettings) -> Iterator[CommandFailed]:
    parts, chosen = urlsplit(resolved.values.assets or ""), resolved.s3()
    if parts.scheme != "s3" or not parts.hostname or parts.query or "@" in parts.netloc:
        yield resolved.wrong(
            "assets", "write s3://BUCKET or s3://BUCKET/PREFIX; everything else belongs in [s3]"
        )
    endpoint = urlsplit(chosen.endpoint)
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname or endpoint.query:
        yield resolved.wrong("s3.endpoint", "write the storage's address, such as https://storage.example")
    for name in ("access_key", "secret_key", "region"):
        if not getattr(chosen, name):
            yield resolved.wrong(f"s3.{name}", "'assets' needs it")


def database_urls(resolved: ResolvedSettings) -> dict[str, str]:
    """The tenant databases by name. An embedded store has one by default; it stays once it exists, even if the
    settings name others. With a shared store all hubs must name the same, so there is no default."""
    chosen = resolved.values
    if not (chosen.store is None or chosen.store.startswith("sqlite:")):
        return dict(chosen.databases)
    file = (resolved.data / "tenants.db").resolve()
    if chosen.databases and not file.exists():
        # The settings name the databases. A tenant for another one is refused, not put somewhere else.
        return dict(chosen.databases)
    return {DEFAULT_DATABASE: f"sqlite:///{quote(str(file))}", **chosen.databases}


T = TypeVar("T")


_MAX_OPEN_FILES = 65_536
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Hosts that stand for all addresses of this machine, and the address that commands here use."""


class RunningHub(msgspec.Struct, frozen=True):
    engine: Engine
    hub: Hub
    api: LocalWorkerApi
    """For agents in this process."""
    serving: HubServer
    url: str
    """The address on this machine."""
    key: str
    """The owner's key, of an administrator."""
    is_key_new: bool
    key_file: Path


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs on uvloop if it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    ran: T = uvloop.run(work)
    return ran


@asynccontextmanager
async def run_hub(resolved: ResolvedSettings) -> AsyncIterator[RunningHub]:
    """Inside it the hub answers. Its data stay in the data folder."""
    _raise_file_limit()
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
        store,
        clock,
        database_urls(resolved),
        around=database_encryption(keyring),
        retention=resolved.retention(),
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(tenant_services.close)
        engine = Engine(
            tenant_services.store,
            rules=resolved.rules(),
            clock=clock,
            workers_may_outlive_it=True,
            formats=payload_formats(),
        )
        try:
            await stack.enter_async_context(engine)
        except Fault as fault:
            raise _explain_lock(fault, resolved, known) from fault
        if risk := risk_of(plain):
            _LOG.warning("%s", risk)
        await stack.enter_async_context(keep_keys_fresh(keyring, store))
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
            shred=None if keyring is None else keyring.crypto_shred,
            retention=resolved.retention(),
            proxies=proxies_of(resolved),
        )
        # After the hub, which gives the engine the terms of tenants: the relay admits jobs by them.
        await stack.enter_async_context(tenant_services.background_tasks(engine.admit))
        await stack.enter_async_context(
            _check_tenant_databases(tenant_services.databases, settings.databases)
        )
        key, is_new = await _owners_key(hub, known)
        async with HubServer(hub, serving_settings) as serving:
            url = _near_url(serving, settings.host)
            host = None if is_loopback(settings.host) else settings.host
            local = LocalHub(url, key, _absolute(settings.certificate), host)
            file = write_hub(resolved.data, local)
            hub.keys.on_rotated = _save_rotated_key(resolved.data, local, key)
            _tune_process()
            yield RunningHub(engine, hub, LocalWorkerApi(engine, assets), serving, url, key, is_new, file)


def _raise_file_limit() -> None:
    """Allows as many open connections as the system permits."""
    try:
        import resource
    except ModuleNotFoundError:
        return
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, most)
    if files != resource.RLIM_INFINITY and files < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _tune_process() -> None:
    """Tunes the process for many small requests beside a thread that writes."""
    # Objects that exist now stay until the end, so the garbage collector can skip them.
    gc.collect()
    gc.freeze()
    # A request makes hundreds of objects, nearly all without cycles, so most are freed before a collection.
    gc.set_threshold(20_000, 20, 20)
    # The writer thread waits for the loop to release the GIL, by default up to five milliseconds each time.
    sys.setswitchinterval(0.0005)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def embedded_store(data: Path) -> str:
    return f"sqlite:///{quote(str((data / 'fleet.db').resolve()))}"


async def _owners_key(hub: Hub, known: LocalHub | None) -> tuple[str, bool]:
    """The owner's key, and whether it is new. The first start makes it; a lost or revoked key is replaced, because the
    user who starts a hub on its store owns it."""
    if known is not None and known.key is not None:
        key = await hub.keys.check(known.key)
        if key is not None and key.role is Role.ADMIN:
            return known.key, False
    _, made = await hub.keys.create(Role.ADMIN, name=f"owner at {socket.gethostname()}")
    return made, True


def _save_rotated_key(data: Path, local: LocalHub, owners: str) -> Callable[[str, str], None]:
    """Saves the new secret of the owner's key, so that commands on this machine keep working."""

    def follow(key_id: str, secret: str) -> None:
        if owners.removeprefix(KEY_PREFIX).partition("_")[0] != key_id:
            return
        try:
            write_hub(data, msgspec.structs.replace(local, key=secret))
        except CommandFailed as error:
            # The caller still gets the new secret, which works. Only this file has the old one.
            _LOG.error("The owner's key was rotated, but the new key cannot be saved: %s", error)

    return follow


def _serving_settings(resolved: ResolvedSettings) -> HubServerSettings:
    settings = resolved.values
    if settings.open and not is_loopback(settings.host):
        raise resolved.wrong(
            "host",
            f"with 'open' the hub needs no key, so it must not listen on {settings.host}. Use keys, or 127.0.0.1.",
        )
    if settings.certificate_key is not None and settings.certificate is None:
        raise resolved.wrong("certificate_key", "it needs a 'certificate' too")
    if settings.certificate is not None:
        for name in ("certificate", "certificate_key"):
            file = getattr(settings, name)
            if file is not None and not Path(file).is_file():
                raise resolved.wrong(name, f"there is no file {file}")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.certificate, settings.certificate_key
            )
        except (OSError, ssl.SSLError) as error:
            raise resolved.wrong("certificate", f"cannot use it with its key: {error}") from error
    return HubServerSettings(
        settings.host,
        settings.port,
        settings.ws_port,
        settings.certificate,
        settings.certificate_key or settings.certificate,
    )


def _near_url(serving: HubServer, host: str) -> str:
    near = _EVERY_ADDRESS.get(host)
    if near is None:
        return serving.url
    scheme = serving.url.partition("://")[0]
    return f"{scheme}://{near}:{serving.port}"


def greet(running_hub: RunningHub, resolved: ResolvedSettings) -> None:
    """Prints the addresses and the next steps. The key is printed once, at the first start, and only to a terminal:
    anything else may be a log."""
    settings = resolved.values
    echo(f"The hub answers at {running_hub.url}")
    if settings.host in _EVERY_ADDRESS:
        scheme = running_hub.url.partition("://")[0]
        echo(
            f"  and at every other address of this machine, such as "
            f"{scheme}://{socket.gethostname()}:{running_hub.serving.port}"
        )
    if settings.ws_port is not None and running_hub.serving.ws_port is not None:
        echo(f"  also on port {running_hub.serving.ws_port}")
    echo(f"  jobs: {masked('store', settings.store) or resolved.data}")
    if settings.assets is not None:
        echo(f"  files: {masked('assets', settings.assets)}")
    if settings.open:
        echo("  no key needed on this machine")
    elif running_hub.is_key_new and sys.stdout.isatty():
        echo(f"  admin key, shown only once: {running_hub.key}")
        echo(f"    also in {running_hub.key_file}, which only you can read")
    else:
        echo(f"  admin key: in {running_hub.key_file}, which only you can read")
    echo(
        f"  status page: {running_hub.url}/"
        + ("" if settings.open else " (any user name; the key is the password)")
    )
    if not is_loopback(settings.host) and settings.certificate is None:
        echo(
            "Warning: keys travel unencrypted to other machines. Use --certificate, or a proxy with TLS in front.",
            err=True,
        )
    if running_hub.is_key_new:
        echo(
            "Next, in another terminal on this machine (commands find the hub and the key by themselves):",
            wraps=True,
        )
        more = _data_flag(resolved)
        echo(f"  {as_called()} submit YOUR_WORKFLOW.json --watch --out pictures{more}")
        echo(f"  {as_called()} top{more}")


def _data_flag(resolved: ResolvedSettings) -> str:
    """The flag that other commands need too if this one named the data folder by a flag."""
    return f" --data {shlex.quote(str(resolved.data))}" if resolved.origin("data").is_flag else ""


def _explain_lock(fault: Fault, resolved: ResolvedSettings, known: LocalHub | None) -> Fault:
    """Names the hub that runs in the same data folder, if its process has locked the embedded store."""
    try:
        owner = (resolved.data / "fleet.db.lock").read_text().strip()
    except OSError:
        return fault
    if (
        known is None
        or resolved.values.store is not None
        or not owner
        or f"process {owner}." not in str(fault)
    ):
        return fault
    return Fault(
        f"a hub already runs with the data folder {resolved.data}: it answers at {known.url} (process {owner}). Use it "
        f"(`{as_called()} top{_data_flag(resolved)}`), stop it (`kill {owner}`), or start a second hub with another "
        "--data folder and --port 0."
    )


@asynccontextmanager
async def _check_tenant_databases(databases: TenantDatabases, urls: Mapping[str, str]) -> AsyncIterator[None]:
    """Logs a warning for each database that the settings name and that cannot be opened. The hub does not wait for it:
    databases may come back, and only their tenants need them."""

    async def check(name: str, url: str) -> None:
        try:
            await databases.get(name)
        except ComfyFleetError as error:
            _LOG.warning(
                "Cannot open the tenant database %r (%s): %s. Its tenants wait until it answers.",
                name,
                masked(f"{DATABASES}.{name}", url),
                str(error).rstrip("."),
            )

    tasks = [asyncio.create_task(check(*each), name=f"check {each[0]}") for each in urls.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
