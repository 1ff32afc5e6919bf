"""`comfyfleet up` and `hub`: a hub with workers in the same process, or a hub alone.

`bootstrap.py` builds the hub, `servers.py` the servers; this module reads the flags and handles signals.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from comfyfleet.cli.command import command
from comfyfleet.cli.exit_codes import Terminated, require
from comfyfleet.cli.options import SERVING_SETTINGS, WORKER_SETTINGS, fake_beside_real, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from comfyfleet.cli.bootstrap import RunningHub
    from comfyfleet.cli.settings import ResolvedSettings
    from comfyfleet.pool.servers import PoolAgents


_POLL_S = 10.0
"""Time between two searches for servers on this machine, if none was named."""
DRAIN_MESSAGE = "Draining: running jobs may finish. Press Ctrl-C again to stop at once."


@command("up")
@settings(
    "servers",
    "services",
    "fake",
    "fake_version",
    "fake_load_seconds_per_gb",
    "slots",
    *WORKER_SETTINGS,
    "name",
    "grace_s",
    *SERVING_SETTINGS,
)
@fake_beside_real
def up_command(config: str | None, fake_beside_real: bool, **flags: Any) -> None:
    """Run a hub and work on its jobs, until Ctrl-C or SIGTERM.

    One process has an embedded SQLite store, the API, a status page, and a worker for each --server and --service.
    Without --server, --service and --fake it finds ComfyUI servers on ports 8188 to 8199 of this machine, also those
    that start later. The first signal lets running jobs finish, the second returns them to the queue at once.
    """
    from comfyfleet.cli.settings import read_settings

    # REDIS_URL of another program is no reason to keep our jobs there.
    resolved = read_settings(flags, config=config, old_store=False)
    require("hub", *(("fake",) if resolved.values.fake else ()))
    warn_about_unused_store(resolved, os.environ)
    _serve(resolved, _run_up(resolved, fake_beside_real))


def warn_about_unused_store(resolved: ResolvedSettings, environment: Mapping[str, str]) -> None:
    """A user who set such a variable may expect the jobs there."""
    from comfyfleet.cli.settings_schema import OLD_NAMES

    others = [name for name in OLD_NAMES["store"] if environment.get(name)]
    if others and resolved.values.store is None:
        echo(
            f"`up` does not use {others[0]}; it keeps its jobs in {resolved.data}. Use --store, or `comfyfleet hub`.",
            err=True,
        )


def end_with(signals: Sequence[int]) -> None:
    """One SIGTERM ends a program with success. Ctrl-C, or a second signal, does not."""
    import signal

    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    if len(signals) > 1:
        raise Terminated


async def _run_up(resolved: ResolvedSettings, fake_beside_real: bool) -> Sequence[int]:
    from contextlib import AsyncExitStack

    from comfyfleet.cli.bootstrap import greet, run_hub
    from comfyfleet.cli.process import Signals
    from comfyfleet.cli.servers import (
        declared_in,
        declaring,
        fakes,
        journals,
        named,
        print_state,
        service_workers,
    )
    from comfyfleet.pool.servers import PoolAgents
    from comfyfleet.worker.settings import AgentSettings

    chosen = resolved.values
    declared = declared_in(resolved, fake_beside_real=fake_beside_real)
    servers = named(chosen.servers, chosen.name, chosen.slots, alone=not chosen.fake)
    resolved.check_connectors()
    servers += service_workers(resolved)
    with Signals() as signals:
        async with AsyncExitStack() as stack:
            servers += await fakes(stack, chosen.name or socket.gethostname(), resolved)
            entered = await signals.before(stack.enter_async_context(run_hub(resolved)), 1)
            if entered is None:
                return signals.received
            (running_hub,) = entered
            agents = PoolAgents(
                print_state,
                AgentSettings(drain_grace_s=chosen.grace_s),
                resolved.comfyui(),
                journals=journals(resolved),
            )
            stack.push_async_callback(agents.close)
            greet(running_hub, resolved)
            if chosen.fake and not fake_beside_real:
                await _warn_about_real_workers(running_hub, chosen.servers)
            for server in declaring(servers, declared):
                await agents.add(running_hub.api, server)
            if servers:
                await signals.wait()
            else:
                await signals.before(_find_servers(running_hub, agents, resolved), 1)
            if len(agents):
                echo(DRAIN_MESSAGE)
                await signals.before(agents.drain(), 2)
    return signals.received


async def _warn_about_real_workers(running_hub: RunningHub, named: Sequence[str]) -> None:
    from comfyfleet.cli.exit_codes import as_called
    from comfyfleet.policy.feasibility import is_known_real

    real = [each.worker_id for each in await running_hub.engine.workers() if is_known_real(each)]
    more = (
        "Add --fake-beside-real to let them, use another --data folder for a separate fleet, or remove workers that "
        f"are gone for good: {as_called()} workers remove ID"
    )
    if real:
        shown = ", ".join(real[:3])
        echo(
            f"Warning: the fake servers take no jobs, because this fleet has real workers ({shown}), online or not. "
            + more,
            err=True,
        )
    elif named:
        shown = ", ".join(named[:3])
        echo(
            f"Warning: the fake servers take no jobs once a real server ({shown}) has answered. {more}",
            err=True,
        )


async def _find_servers(running_hub: RunningHub, agents: PoolAgents, resolved: ResolvedSettings) -> None:
    import asyncio

    from comfyfleet.cli.servers import LOCAL_PORTS, declared_in, declaring, found_here, named

    is_first = True
    told: set[str] = set()
    while True:
        found = await found_here()
        for address in found.fakes:
            if address not in told:
                told.add(address)
                echo(f"Found a fake ComfyUI at {address}. To use it, add: --server {address}")
        for address in found.servers:
            (server,) = declaring(named([address], None, resolved.values.slots), declared_in(resolved))
            assert server.id is not None, "named servers have an id"
            if server.id not in agents:
                await agents.add(running_hub.api, server)
        if is_first and not len(agents):
            what = "No real ComfyUI" if found.fakes else "No ComfyUI"
            echo(
                f"{what} answers on ports {LOCAL_PORTS[0]} to {LOCAL_PORTS[-1]} of this machine. The search goes on. "
                "You can also name one with --server, or try --fake 2.",
                wraps=True,
            )
        is_first = False
        await asyncio.sleep(_POLL_S)


@command("hub")
@settings(*SERVING_SETTINGS)
def hub_command(config: str | None, **flags: Any) -> None:
    """Run a hub without workers, until Ctrl-C or SIGTERM.

    Several hubs can share a Redis or PostgreSQL store. Workers connect over HTTP, or use the store directly.
    """
    from comfyfleet.cli.settings import read_settings

    require("hub")
    resolved = read_settings(flags, config=config)
    _serve(resolved, _run_hub(resolved))


def _serve(resolved: ResolvedSettings, program: Coroutine[Any, Any, Sequence[int]]) -> None:
    from comfyfleet.cli.bootstrap import run_loop
    from comfyfleet.cli.hub_connection import keep_private
    from comfyfleet.cli.process import set_up

    keep_private()
    set_up(resolved.values.log_level, resolved.values.log_format)
    end_with(run_loop(program))


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
    return signals.received
