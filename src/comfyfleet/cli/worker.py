"""`comfyfleet worker`: servers that get their jobs from a hub, or directly from a store without a hub.

This module reads the flags, starts the agents, prints their states and handles signals. The agents do the work. The
engine decides: at the hub or, with a store, in this process.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli import fleet
from comfyfleet.cli.command import group, runs_subcommand
from comfyfleet.cli.options import WORKER_SETTINGS, fake_beside_real, settings
from comfyfleet.cli.output import echo
from comfyfleet.cli.up import DRAIN_MESSAGE, end_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comfyfleet.cli.hub_connection import HubTarget
    from comfyfleet.cli.process import Signals
    from comfyfleet.cli.settings import ResolvedSettings
    from comfyfleet.model.worker import Capabilities
    from comfyfleet.pool.options import Server
    from comfyfleet.worker.settings import AgentState


@group("worker", invoke_without_command=True)
@settings(
    "hub",
    "store",
    "servers",
    "services",
    *WORKER_SETTINGS,
    "server_folder",
    "clear_history",
    "fake",
    "fake_version",
    "fake_load_seconds_per_gb",
    "transport",
    "key",
    "enrol",
    "trust",
    "name",
    "slots",
    "grace_s",
)
@click.option(
    "--rules",
    "changes",
    metavar="JSON",
    help="""With --store: change rules of the engine, such as '{"lease_ttl_s": 30}'.""",
)
@fake_beside_real
@settings("data", "log_level", "log_format", "config")
@click.option("--simulated", type=click.FloatRange(0), multiple=True, hidden=True, metavar="SECONDS")
@click.pass_context
def worker_command(
    context: click.Context,
    /,
    config: str | None,
    changes: str | None,
    simulated: tuple[float, ...],
    fake_beside_real: bool,
    **flags: Any,
) -> None:
    """Work on jobs from a hub, or from a store, until Ctrl-C or SIGTERM.

    Each server becomes a worker of the fleet. Any number of such processes, on any number of machines, share the jobs.
    With --hub it only makes outgoing connections. It waits for a hub or a server that is down. The first signal lets
    running jobs finish, the second returns them to the queue at once. The commands below control a worker of a hub, as
    in `comfyfleet workers`.
    """
    if runs_subcommand(context):
        return
    import asyncio

    from comfyfleet.cli.hub_connection import keep_private, read_hub, tighten_data_folder
    from comfyfleet.cli.process import set_up
    from comfyfleet.cli.servers import declared_in, named, with_cleanup, with_services
    from comfyfleet.cli.settings import read_settings

    flags |= _read_rules(changes)
    resolved = read_settings(flags, config=config)
    chosen = resolved.values
    if not (chosen.servers or chosen.services or chosen.fake or simulated):
        raise click.UsageError("There is no server to work with. Name a --server, or try --fake 1.")
    if not chosen.hub and chosen.store is None and read_hub(resolved.data) is None:
        raise click.UsageError(
            "No hub and no store. Name a --hub (or COMFYFLEET_HUB) or a --store (or COMFYFLEET_STORE)."
        )
    if chosen.fake or simulated:
        _refuse_implicit_fleet(resolved)
    keep_private()
    set_up(chosen.log_level, chosen.log_format)
    tighten_data_folder(resolved.data)
    servers = named(chosen.servers, chosen.name, chosen.slots, alone=not (chosen.fake or simulated))
    servers = with_services(with_cleanup(servers, resolved), resolved)
    declared = declared_in(resolved, fake_beside_real=fake_beside_real)
    end_with(asyncio.run(_work(resolved, servers, simulated, declared)))


for _name in ("show", "drain", "pause", "resume", "refresh", "remove"):
    worker_command.add_command(fleet.workers_command.commands[_name])


def _read_rules(changes: str | None) -> dict[str, Any]:
    import msgspec

    try:
        given = msgspec.json.decode(changes or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(str(error), param_hint="--rules") from error
    return {f"rules.{name}": value for name, value in given.items()}


def _takes_from_store(resolved: ResolvedSettings) -> bool:
    """A flag wins over the environment, and that over the file."""
    chosen = resolved.values
    if chosen.hub and chosen.store is not None:
        hub, store = resolved.origin("hub"), resolved.origin("store")
        if hub.rank == store.rank:
            raise click.UsageError(
                f"A worker gets its jobs from a hub or from a store, not from both ({hub.place}, {store.place})."
            )
        return store.rank > hub.rank
    return chosen.store is not None


def _refuse_implicit_fleet(resolved: ResolvedSettings) -> None:
    """A fake completes jobs with useless pictures, so it must not join a fleet by accident."""
    from comfyfleet.cli.hub_connection import find_hub
    from comfyfleet.cli.settings import masked

    takes_from_store = _takes_from_store(resolved)
    name = "store" if takes_from_store else "hub"
    if resolved.origin(name).is_flag:
        return
    found = masked("store", resolved.values.store) if takes_from_store else find_hub(resolved).url
    raise click.UsageError(
        f"Fake servers join a {name} only if you name it on the command line. For this one, add: --{name} {found}"
    )


async def _work(
    resolved: ResolvedSettings, servers: list[Server], simulated: Sequence[float], declared: Capabilities
) -> Sequence[int]:
    """Returns the signals that were received."""
    from comfyfleet.cli.process import Signals
    from comfyfleet.cli.servers import declaring, fakes, this_process

    chosen = resolved.values
    name = chosen.name or this_process()
    with Signals() as signals:
        async with AsyncExitStack() as stack:
            servers += await fakes(stack, name, resolved)
            servers += _simulated(simulated, chosen.name, chosen.slots)
            servers = declaring(servers, declared)
            if _takes_from_store(resolved):
                await _work_on_store(resolved, servers, stack, signals)
            else:
                await _work_for_hub(resolved, servers, stack, signals)
    return signals.received


async def _work_on_store(
    resolved: ResolvedSettings, servers: list[Server], stack: AsyncExitStack, signals: Signals
) -> None:
    from comfyfleet.cli.encryption import worker_encryption
    from comfyfleet.cli.servers import journals, print_state
    from comfyfleet.pool.servers import StoreWorkers
    from comfyfleet.worker.settings import AgentSettings

    chosen = resolved.values
    assert chosen.store is not None, "_takes_from_store was true"
    agent = AgentSettings(drain_grace_s=chosen.grace_s)
    workers = StoreWorkers(
        servers,
        store=chosen.store,
        on_state=print_state,
        rules=resolved.rules(),
        agent=agent,
        comfyui=resolved.comfyui(),
        journals=journals(resolved),
        encryption=worker_encryption(resolved),
    )
    # Signals must work while the store or a server does not answer yet.
    if await signals.before(stack.enter_async_context(workers), 1) is None:
        return
    if await signals.before(workers.drained(), 1) is None:
        echo(DRAIN_MESSAGE)
        await signals.before(workers.drain(), 2)


async def _work_for_hub(
    resolved: ResolvedSettings, servers: list[Server], stack: AsyncExitStack, signals: Signals
) -> None:
    from comfyfleet.cli.hub_connection import find_hub
    from comfyfleet.cli.servers import journals, print_state
    from comfyfleet.pool.servers import PoolAgents
    from comfyfleet.worker.settings import AgentSettings, AgentStatus
    from comfyfleet.worker.transports.http import HttpWorkerApi
    from comfyfleet.worker.transports.websocket import WebSocketWorkerApi

    target = find_hub(resolved)
    for url in target.urls:
        if url.startswith(("ws://", "wss://")):
            raise resolved.wrong("hub", f"write http{url[2:]} and add --transport websocket")
    transport = WebSocketWorkerApi if resolved.values.transport == "websocket" else HttpWorkerApi
    agent = AgentSettings(drain_grace_s=resolved.values.grace_s)
    is_accepted, has_waited = False, False

    def tell(worker: str, state: AgentState) -> None:
        nonlocal is_accepted, has_waited
        if state.status is AgentStatus.ONLINE and not is_accepted:
            # The hub has accepted a worker, so the address and the key are right.
            is_accepted = True
            echo(f"Connected to {', '.join(target.urls)}")
        print_state(worker, state)
        if (
            state.status is AgentStatus.OFFLINE
            and not (is_accepted or has_waited)
            and _waits_for_server(state)
        ):
            has_waited = True
            echo("The hub was not asked yet: a worker connects once its server responds.")

    agents = PoolAgents(tell, agent, resolved.comfyui(), journals=journals(resolved))
    stack.push_async_callback(agents.close)
    echo(f"Connecting to {', '.join(target.urls)}")
    for server in servers:
        keyed = await signals.before(_key(resolved, target, str(server.id)), 1)
        if keyed is None:
            return
        journal = agents.journal_of(server)
        spool = None if journal is None else journal.spool
        api = transport(target.urls, keyed[0], trust=target.trust, spool=spool)
        stack.push_async_callback(api.close)
        await agents.add(api, server, journal)
        # Registered after the connection that they report through, so the agents stop before it closes.
        stack.push_async_callback(agents.close)
    if await signals.before(agents.drained(), 1) is None:
        echo(DRAIN_MESSAGE)
        await signals.before(agents.drain(), 2)


def _waits_for_server(state: AgentState) -> bool:
    """Not: the hub does not answer, or refuses the worker."""
    return not state.reason.startswith("The worker could not be registered")


async def _key(resolved: ResolvedSettings, target: HubTarget, worker: str) -> str | None:
    """The key of this worker: the one in the settings, one from an earlier enrolment, or a new one for the token."""
    import asyncio

    from comfyfleet.cli.hub_connection import read_worker_key, write_worker_key
    from comfyfleet.client.client import FleetClient
    from comfyfleet.model.errors import Fault

    if resolved.values.key is not None:
        return resolved.values.key
    # Hubs on one store accept the same keys.
    for url in target.urls:
        if known := read_worker_key(resolved.data, url, worker):
            return known
    token = resolved.values.enrol
    if token is None:
        return target.key
    async with FleetClient(target.urls, patience_s=10.0, trust=target.trust) as client:
        while True:
            try:
                made = await client.enrol(token, worker)
            except Fault as error:
                echo(f"{worker}: {error} Retrying.", err=True)
                await asyncio.sleep(5.0)
                continue
            write_worker_key(resolved.data, target.url, worker, made.key)
            echo(f"{worker}: enrolled")
            return made.key


def _simulated(seconds: Sequence[float], name: str | None, slots: int) -> list[Server]:
    """Workers without a server, for tests: each run takes `seconds` and is printed."""
    from comfyfleet.cli.servers import this_process
    from comfyfleet.pool.options import Server

    if not seconds:
        return []
    from comfyfleet.model.calls import LeasedJob
    from comfyfleet.model.job import JobResult
    from comfyfleet.worker.connectors.simulated import Behaviour, Reporter, SimulatedConnector, takes

    def behaviour(run_s: float) -> Behaviour:
        run = takes(run_s, steps=0)

        async def behave(job: LeasedJob, report: Reporter) -> JobResult:
            echo(f"run {job.attempt_id}")
            await run(job, report)
            echo(f"ran {job.attempt_id}")
            # A test can see in the result which workflow ran.
            return JobResult({"9": {"made_from": [job.workflow]}})

        return behave

    names = [f"{name or this_process()}-{number}" for number in range(1, len(seconds) + 1)]
    if name is not None and len(seconds) == 1:
        names = [name]
    return [
        Server(id=worker, slots=slots, connector=SimulatedConnector(behaviour=behaviour(run_s)))
        for worker, run_s in zip(names, seconds, strict=True)
    ]
