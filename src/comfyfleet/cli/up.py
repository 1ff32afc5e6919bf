"""`comfyfleet up`: a hub, its store and the agents of its servers in one process.

Parses and composes; the hub is `bootstrap.py`'s, the servers are `servers.py`'s.

`comfyfleet hub`: the hub alone, on a store. Workers come over HTTP, or work directly on the store.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from comfyfleet.cli import command_help
from comfyfleet.cli.exit_codes import Terminated
from comfyfleet.cli.options import OF_A_WORKER, fake_beside_real, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from comfyfleet.cli.bootstrap import RunningHub
    from comfyfleet.cli.settings import ResolvedSettings
    from comfyfleet.pool.servers import PoolAgents


_POLL_S = 10.0
"""Between two looks for servers on this machine, where none was named."""


@command_help.command("up")
@settings(
    "servers",
    "fake",
    "fake_version",
    "slots",
    *OF_A_WORKER,
    "host",
    "port",
    "ws_port",
    "open",
    "certificate",
    "certificate_key",
    "data",
    "store",
    "assets",
    "pools",
    "name",
    "grace_s",
    "legacy_websocket",
    "webhook_allow",
    "trusted_proxies",
    "log_level",
    "log_format",
    "config",
)
@fake_beside_real
def up_command(config: str | None, fake_beside_real: bool, **flags: Any) -> None:
    """Run a hub and work on its jobs, until Ctrl-C or SIGTERM.

    One process: an embedded SQLite store, the API, a status page, and a worker for each server that is given. Without
    --server and --fake, ComfyUI servers on ports 8188 to 8199 of this machine are found, now and when they appear. The
    first signal lets what runs end, a second one gives it back at once.
    """
    from comfyfleet.cli.exit_codes import require
    from comfyfleet.cli.hub_connection import keep_private
    from comfyfleet.cli.process import set_up
    from comfyfleet.cli.settings import read_settings

    # What others mean by REDIS_URL is no reason to keep the jobs there.
    resolved = read_settings(flags, config=config, old_store=False)
    require("hub", *(("fake",) if resolved.values.fake else ()))
    from comfyfleet.cli.bootstrap import run_loop

    tell_of_unused_store(resolved, os.environ)
    keep_private()
    set_up(resolved.values.log_level, resolved.values.log_format)
    ended(run_loop(_run_up(resolved, fake_beside_real)))


def tell_of_unused_store(resolved: ResolvedSettings, environment: Mapping[str, str]) -> None:
    """Whoever has set such a variable for this program expects its jobs there."""
    from comfyfleet.cli.settings_schema import OLD_NAMES

    others = [name for name in OLD_NAMES["store"] if environment.get(name)]
    if others and resolved.values.store is None:
        echo(
            f"{others[0]} is not used: `up` keeps its jobs in {resolved.data}. --store, or `comfyfleet hub`, uses it",
            err=True,
        )


def ended(signals: Sequence[int]) -> None:
    """To be told to stop, and to end what runs, is how a program that serves ends well; to be told twice is not."""
    import signal

    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    if len(signals) > 1:
        raise Terminated


async def _run_up(resolved: ResolvedSettings, fake_beside_real: bool) -> Sequence[int]:
    from contextlib import AsyncExitStack

    from comfyfleet.cli.bootstrap import greet, run_hub
    from comfyfleet.cli.process import Signals
    from comfyfleet.cli.servers import declared_in, declaring, fakes, journals, named, tell_state
    from comfyfleet.pool.servers import PoolAgents
    from comfyfleet.worker.settings import AgentSettings

    chosen = resolved.values
    declared = declared_in(resolved, fake_beside_real=fake_beside_real)
    servers = named(chosen.servers, chosen.name, chosen.slots, alone=not chosen.fake)
    with Signals() as signals:
        async with AsyncExitStack() as stack:
            servers += await fakes(stack, chosen.fake, chosen.name or _machine(), resolved)
            entered = await signals.before(stack.enter_async_context(run_hub(resolved)), 1)
            if entered is None:
                return signals.came
            (running_hub,) = entered
            agents = PoolAgents(
                tell_state,
                AgentSettings(drain_grace_s=chosen.grace_s),
                resolved.comfyui(),
                journals=journals(resolved),
            )
            stack.push_async_callback(agents.close)
            greet(running_hub, resolved)
            if chosen.fake and not fake_beside_real:
                await _tell_of_real(running_hub, chosen.servers)
            for server in declaring(servers, declared):
                await agents.add(running_hub.api, server)
            if servers:
                await signals.wait()
            else:
                await signals.before(_keep_looking(running_hub, agents, resolved), 1)
            if len(agents):
                echo("draining: what runs may end; once more stops at once")
                await signals.before(agents.drain(), 2)
    return signals.came


async def _tell_of_real(running_hub: RunningHub, named: Sequence[str]) -> None:
    real = [each.worker_id for each in await running_hub.engine.workers() if not each.capabilities.is_fake]
    if real or named:
        shown = ", ".join([*named, *real][:3])
        echo(
            f"Warning: the fake servers take no jobs, because this fleet has real workers ({shown}). Give "
            "--fake-beside-real to let them, or another --data folder to try things apart",
            err=True,
        )


async def _keep_looking(running_hub: RunningHub, agents: PoolAgents, resolved: ResolvedSettings) -> None:
    import asyncio

    from comfyfleet.cli.servers import LOCAL_PORTS, declared_in, declaring, found_here, named

    is_first = True
    told: set[str] = set()
    while True:
        found = await found_here()
        for address in found.fakes:
            if address not in told:
                told.add(address)
                echo(f"A fake ComfyUI answers at {address}; it works here only if named: --server {address}")
        for address in found.servers:
            (server,) = declaring(named([address], None, resolved.values.slots), declared_in(resolved))
            assert server.id is not None, "named servers have an id"
            if server.id not in agents:
                await agents.add(running_hub.api, server)
        if is_first and not len(agents):
            echo(
                f"No ComfyUI answers on ports {LOCAL_PORTS[0]} to {LOCAL_PORTS[-1]} of this machine; one that comes is "
                "found. Or name one with --server, or try --fake 2"
            )
        is_first = False
        await asyncio.sleep(_POLL_S)


def _machine() -> str:
    import socket

    return socket.gethostname()


@command_help.command("hub")
@settings(
    "store",
    "assets",
    "pools",
    "host",
    "port",
    "ws_port",
    "open",
    "certificate",
    "certificate_key",
    "data",
    "legacy_websocket",
    "webhook_allow",
    "trusted_proxies",
    "log_level",
    "log_format",
    "config",
)
def hub_command(config: str | None, **flags: Any) -> None:
    """Run a hub without workers of its own, until Ctrl-C or SIGTERM.

    Several hubs may share a Redis or PostgreSQL store.
    """
    from comfyfleet.cli.exit_codes import require
    from comfyfleet.cli.hub_connection import keep_private
    from comfyfleet.cli.process import set_up
    from comfyfleet.cli.settings import read_settings

    require("hub")
    from comfyfleet.cli.bootstrap import run_loop

    resolved = read_settings(flags, config=config)
    keep_private()
    set_up(resolved.values.log_level, resolved.values.log_format)
    ended(run_loop(_run_hub(resolved)))


async def _run_hub(resolved: ResolvedSettings) -> Sequence[int]:
    from contextlib import AsyncExitStack

    from comfyfleet.cli.bootstrap import greet, run_hub
    from comfyfleet.cli.process import Signals

    with Signals() as signals:
        async with AsyncExitStack() as stack:
            entered = await signals.before(stack.enter_async_context(run_hub(resolved)), 1)
            if entered is not None:
                greet(entered[0], resolved)
                await signals.wait()
    return signals.came
