"""The ComfyUI servers of `up` and `worker`: those that were named, those found on this machine, and fake ones."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.output import echo
from comfyfleet.cli.settings import ResolvedSettings
from comfyfleet.model.ids import TenantId
from comfyfleet.model.worker import (
    Capabilities,
    Cost,
    Cpu,
    Gpu,
    Hardware,
    Location,
    Memory,
    Performance,
    Service,
    TenantAccess,
)
from comfyfleet.pool.options import Server
from comfyfleet.ports import Connector
from comfyfleet.worker.connectors.comfyui.inventory import is_fake
from comfyfleet.worker.connectors.comfyui.settings import parse_address
from comfyfleet.worker.connectors.registry import connect
from comfyfleet.worker.connectors.registry import names as connector_names
from comfyfleet.worker.settings import AgentState

LOCAL_PORTS = range(8188, 8200)
_ANSWER_S = 2.0


def named(addresses: Sequence[str], name: str | None, slots: int, *, alone: bool = True) -> list[Server]:
    """Each server once. `alone`: there are no others, so a single server gets the name without a number."""
    servers: dict[str, Server] = {}
    for number, address in enumerate(addresses, start=1):
        try:
            server_id = parse_address(address).server_id
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--server") from error
        if name is not None:
            server_id = name if alone and len(addresses) == 1 else f"{name}-{number}"
        else:
            host, separator, port = server_id.rpartition(":")
            if host in ("127.0.0.1", "localhost", "[::1]"):
                server_id = f"{socket.gethostname()}{separator}{port}"
        servers.setdefault(server_id, Server(address, id=server_id, slots=slots))
    return list(servers.values())


def with_cleanup(servers: list[Server], resolved: ResolvedSettings) -> list[Server]:
    """The servers with their settings for cleaning up."""
    chosen = resolved.values
    folder = None if chosen.server_folder is None else Path(chosen.server_folder).expanduser()
    if folder is not None:
        if len(servers) != 1:
            raise resolved.wrong(
                "server_folder", "it belongs to one server. Start a worker for each --server."
            )
        if not (folder / "output").is_dir():
            raise resolved.wrong(
                "server_folder",
                f"{folder} has no folder 'output'. Name the folder that ComfyUI was started in.",
            )
    return [
        msgspec.structs.replace(server, folder=folder, clears_history=chosen.clear_history)
        for server in servers
    ]


def with_services(servers: list[Server], resolved: ResolvedSettings) -> list[Server]:
    """The servers with other services. There is only one worker then."""
    chosen = resolved.values
    resolved.check_connectors()
    more = tuple(_service(resolved, given) for given in chosen.services)
    if more and (len(servers) > 1 or chosen.fake):
        raise resolved.wrong("services", "they belong to one worker. Start it with at most one --server.")
    if more and servers:
        servers = [msgspec.structs.replace(servers[0], more=more)]
    elif more:
        worker = chosen.name or socket.gethostname()
        servers = [Server(id=worker, slots=chosen.slots, connector=more[0], more=more[1:])]
    names = [each.service_name for each in more] + (["comfyui"] if chosen.servers else [])
    if len(set(names)) != len(names):
        raise resolved.wrong(
            "services", "a worker has one connector for each service. Name each service once."
        )
    return servers


def service_workers(resolved: ResolvedSettings) -> list[Server]:
    """A worker for each service of `up`."""
    chosen = resolved.values
    found: dict[str, Server] = {}
    for given in chosen.services:
        connector = _service(resolved, given)
        name = f"{chosen.name or socket.gethostname()}-{given.partition('=')[0]}"
        while name in found:
            name = f"{name}-{len(found) + 1}"
        found[name] = Server(id=name, slots=chosen.slots, connector=connector)
    return list(found.values())


def declared_in(resolved: ResolvedSettings, *, fake_beside_real: bool = False) -> Capabilities:
    """The capabilities that the settings declare for the workers of this process."""
    chosen = resolved.values
    isolation = chosen.tenant_isolation or "none"
    if isolation == "strict" and not chosen.allow_tenants:
        raise resolved.wrong(
            "tenant_isolation",
            "a strict worker serves allowed tenants only. Name them with --allow-tenant.",
        )
    if isolation == "none" and chosen.allow_tenants:
        # A list of allowed tenants means that the others are refused or come later.
        raise resolved.wrong(
            "allow_tenants",
            "add --tenant-isolation strict to serve only these tenants, or loose to serve them first",
        )
    names = dict.fromkeys(["comfyui", "simulated", *(each.partition("=")[0] for each in chosen.services)])
    return Capabilities(
        tuple(Service(name, chosen.providers) for name in names) if chosen.providers else (),
        Hardware(
            Gpu(chosen.gpu_count or 0, chosen.gpu_memory_gb or 0, chosen.gpu_model or ""),
            Cpu(chosen.cpu_cores or 0, chosen.cpu_threads or 0),
            Memory(chosen.memory_gb or 0),
        ),
        tenant_access=TenantAccess(
            isolation,
            tuple(map(TenantId, chosen.allow_tenants)),
            tuple(map(TenantId, chosen.deny_tenants)),
        ),
        location=Location(chosen.region, chosen.compliance),
        performance=Performance(chosen.quality_levels, 1.0 if chosen.speed is None else chosen.speed),
        cost=Cost(chosen.cost_tier or "standard", chosen.rate),
        environment=chosen.environment or "self_hosted",
        works_beside_real=fake_beside_real,
    )


def declaring(servers: list[Server], declared: Capabilities) -> list[Server]:
    return [msgspec.structs.replace(server, capabilities=declared) for server in servers]


def _service(resolved: ResolvedSettings, given: str) -> Connector:
    name, separator, address = given.partition("=")
    try:
        if not separator:
            known = ", ".join(connector_names())
            raise ValueError(f"{given!r} is not NAME=ADDRESS. Known names: {known}.")
        return connect(name, address, resolved.connector(name))
    except ValueError as error:
        raise resolved.wrong("services", str(error)) from error


_A1111 = "comfyfleet.testing.fake_a1111:FakeA1111"
_LANGFLOW = "comfyfleet.testing.fake_langflow:FakeLangFlow"
_COMFY_CLOUD = "comfyfleet.testing.fake_comfy_cloud:FakeComfyCloud"
FAKES: Mapping[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "a1111": (_A1111, lambda _: {}),
    "langflow": (_LANGFLOW, lambda fake: {"key": fake.settings.key}),
    "comfy_cloud": (_COMFY_CLOUD, lambda fake: {"key": fake.settings.key, "allow": ["127.0.0.1"]}),
}
"""By connector: the fake server, and the settings that reach it. Those of the user's real server do not count."""


async def fakes(stack: AsyncExitStack, name: str, resolved: ResolvedSettings) -> list[Server]:
    """Starts fake servers in this process. They stop with the stack."""
    found: list[Server] = []
    for connector, count in resolved.fakes().items():
        if connector == "comfyui":
            found += await _fake_comfyuis(stack, count, name, resolved)
        else:
            found += [
                await _fake_of(stack, connector, f"{name}-{connector}-fake-{number}", resolved)
                for number in range(1, count + 1)
            ]
    return found


async def _fake_of(stack: AsyncExitStack, connector: str, name: str, resolved: ResolvedSettings) -> Server:
    """A fake server of another connector than ComfyUI's."""
    if connector not in FAKES or connector not in connector_names():
        known = ", ".join(each for each in FAKES if each in connector_names())
        raise resolved.wrong(
            "fake", f"there is no fake server of {connector!r}; choose one of: comfyui, {known}"
        )
    place, settings_of = FAKES[connector]
    module, _, attribute = place.partition(":")
    try:
        fake = await stack.enter_async_context(getattr(importlib.import_module(module), attribute)())
    except ImportError as error:
        raise CommandFailed(f"cannot start a fake server of {connector!r}: {error}") from error
    made = connect(connector, fake.url, settings_of(fake))
    # It stops with this process, so a journal would be useless.
    return Server(id=name, slots=resolved.values.slots, connector=made, keeps_journal=False)


async def _fake_comfyuis(
    stack: AsyncExitStack, count: int, name: str, resolved: ResolvedSettings
) -> list[Server]:
    from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings
    from comfyfleet.testing.fake_comfyui.pictures import PillowMissing
    from comfyfleet.testing.fake_comfyui.settings import behaviour_of

    versions = resolved.values.fake_version or (FakeSettings().version,)
    servers = []
    for number in range(1, count + 1):
        settings = FakeSettings(
            name=f"fake-{number}",
            version=versions[(number - 1) % len(versions)],
            load_seconds_per_gb=resolved.values.fake_load_seconds_per_gb,
        )
        try:
            behaviour_of(settings.version)
        except ValueError as error:
            raise resolved.wrong("fake_version", str(error)) from error
        try:
            fake = await stack.enter_async_context(FakeComfyUI(settings))
        except PillowMissing as error:
            raise CommandFailed(str(error)) from error
        # It stops with this process, so a journal would be useless.
        server = Server(
            fake.url, id=f"{name}-fake-{number}", slots=resolved.values.slots, keeps_journal=False
        )
        servers.append(server)
    return servers


class FoundServers(msgspec.Struct, frozen=True):
    """The addresses of the real and the fake ComfyUI servers that answer on this machine."""

    servers: tuple[str, ...]
    fakes: tuple[str, ...]


async def found_here(ports: Iterable[int] = LOCAL_PORTS) -> FoundServers:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        answers = await asyncio.gather(*(_stats(session, url) for url in urls))
    found = [(url, is_fake(stats)) for url, stats in zip(urls, answers, strict=True) if stats is not None]
    return FoundServers(
        tuple(url for url, is_a_fake in found if not is_a_fake),
        tuple(url for url, is_a_fake in found if is_a_fake),
    )


async def _stats(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """ComfyUI's answer about its machine. None: no ComfyUI answers there."""
    try:
        async with session.get(f"{url}/system_stats", allow_redirects=False) as response:
            body = msgspec.json.decode(await response.content.read(1024 * 1024))
    except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return body if isinstance(body, dict) and "system" in body and "devices" in body else None


def journals(resolved: ResolvedSettings) -> Path:
    """The folder in which workers note the jobs that they run."""
    return resolved.data / "journal"


def this_process() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def print_state(worker: str, state: AgentState) -> None:
    has_reason = state.reason not in ("", "drain", "stop")
    echo(f"{worker}: {state.status.value}" + (f" ({state.reason})" if has_reason else ""))
