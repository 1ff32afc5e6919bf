"""A hub put together from settings: a store, an engine on it, the hub on a port, and a key for the owner.

Who lives in it (agents, a demo) and when it ends is for the commands.
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
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from comfyfleet.cli.assets import open_assets
from comfyfleet.cli.encrypting import attended, keyring_of, sealed_by, sealing_by
from comfyfleet.cli.endings import CommandFailed
from comfyfleet.cli.local import LocalHub, make_data_folder, read_hub, tighten_data_folder, write_hub
from comfyfleet.cli.pools import pool_urls
from comfyfleet.cli.printing import echo
from comfyfleet.cli.proxies import proxies_of
from comfyfleet.cli.settings import Resolved, masked
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.shell import SystemClock
from comfyfleet.hub.app import Hub
from comfyfleet.hub.credentials import is_loopback
from comfyfleet.hub.inside import InsideApi
from comfyfleet.hub.serving import Serving, ServingSettings
from comfyfleet.model.access import Role
from comfyfleet.outbound.guard import Guard
from comfyfleet.stores.opening import open_store, risk_of
from comfyfleet.tenancy.estate import Estate
from comfyfleet.tenancy.keys import KEY_PREFIX

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_FILES = 65_536


class House(msgspec.Struct, frozen=True):
    engine: Engine
    hub: Hub
    api: InsideApi
    """The door of agents in this process."""
    serving: Serving
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
async def open_house(resolved: Resolved) -> AsyncIterator[House]:
    """Inside it the hub answers. What wants to stay in its data folder does so."""
    _take_files()
    settings = resolved.values
    serving_settings = _serving_settings(resolved)
    make_data_folder(resolved.data)
    known = read_hub(resolved.data)
    await asyncio.to_thread(tighten_data_folder, resolved.data)
    clock = SystemClock()
    plain = open_store(settings.store or embedded_store(resolved.data), clock)
    keyring = keyring_of(resolved, plain.cabinet, clock)
    store = sealed_by(keyring, plain)
    estate = Estate(
        store, clock, pool_urls(resolved), around=sealing_by(keyring), retention=resolved.retention()
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(estate.close)
        engine = Engine(estate.store, rules=resolved.rules(), clock=clock)
        await stack.enter_async_context(engine)
        if risk := risk_of(plain):
            _LOG.warning("%s", risk)
        await stack.enter_async_context(attended(keyring, store))
        assets = await stack.enter_async_context(
            open_assets(resolved, store.cabinet, engine.clock, estate.cabinet_of)
        )
        hub = Hub(
            engine,
            store.cabinet,
            engine.clock,
            limits=resolved.limits(),
            is_open=settings.open,
            legacy_websocket=settings.legacy_websocket,
            assets=assets,
            guard=Guard(resolved.allowed()),
            estate=estate,
            shred=None if keyring is None else keyring.shred,
            retention=resolved.retention(),
            proxies=proxies_of(resolved),
        )
        # Behind the hub, which has told the engine of tenants' terms: what a relay brings in is placed by them.
        await stack.enter_async_context(estate.kept(engine.admit))
        key, is_new = await _owners_key(hub, known)
        async with Serving(hub, serving_settings) as serving:
            url = _near_url(serving, settings.host)
            local = LocalHub(url, key, _absolute(settings.certificate))
            file = write_hub(resolved.data, local)
            hub.keys.on_rotated = _following(resolved.data, local, key)
            _settle()
            yield House(engine, hub, InsideApi(engine, assets), serving, url, key, is_new, file)


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


def _serving_settings(resolved: Resolved) -> ServingSettings:
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
    return ServingSettings(
        settings.host,
        settings.port,
        settings.ws_port,
        settings.certificate,
        settings.certificate_key or settings.certificate,
    )


def _near_url(serving: Serving, host: str) -> str:
    near = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host)
    if near is None:
        return serving.url
    scheme = serving.url.partition("://")[0]
    return f"{scheme}://{near}:{serving.port}"


def greet(house: House, resolved: Resolved) -> None:
    """Where to go next. The key is shown the first time only, and only to somebody who sits at a terminal: what goes
    anywhere else is kept by whoever keeps logs."""
    settings = resolved.values
    echo(f"The hub answers at {house.url}")
    if settings.ws_port is not None and house.serving.ws_port is not None:
        echo(f"  and on port {house.serving.ws_port}")
    echo(f"  keeps its jobs in {masked('store', settings.store) or resolved.data}")
    if settings.assets is not None:
        echo(f"  keeps its files in {masked('assets', settings.assets)}")
    if settings.open:
        echo("  asks nobody on this machine for a key")
    elif house.is_key_new and sys.stdout.isatty():
        echo(f"  admin key, shown this once: {house.key}")
        echo(f"    it is in {house.key_file} too, which nobody else can read")
    else:
        echo(f"  admin key: in {house.key_file}, which nobody else can read")
    echo(f"  status page: {house.url}/" + ("" if settings.open else " (any user name, the key as password)"))
    if not is_loopback(settings.host) and settings.certificate is None:
        echo(
            "Warning: keys travel unencrypted to other machines: give --certificate, or put a proxy with TLS in front",
            err=True,
        )
    if house.is_key_new:
        echo("Next, in another terminal of this machine (it finds the hub and the key by itself):")
        # Named by a flag, the folder is unknown to whoever does not name it too.
        more = f" --data {shlex.quote(str(resolved.data))}" if "flag" in resolved.origin("data").place else ""
        echo(f"  {as_called()} submit workflow.json --watch --out pictures{more}")
        echo(f"  {as_called()} top{more}")


def as_called() -> str:
    """The command as the user has to type it: by its path, where it is in an environment that is not active."""
    called = sys.argv[0]
    return called if os.sep in called and shutil.which("comfyfleet") is None else "comfyfleet"
