"""`comfyfleet worker`: servers that take their jobs from a hub, or directly from a store with no hub in the path.

Parses, composes agents, tells of their states, and turns signals into a drain or an end. What a worker does is the
agent's; what is decided is the engine's, at the hub or, on a store, in this process.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli import fleet
from comfyfleet.cli.command_help import group
from comfyfleet.cli.options import OF_A_WORKER, fake_beside_real, settings
from comfyfleet.cli.output import echo
from comfyfleet.cli.up import ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comfyfleet.cli.hub_connection import HubTarget
    from comfyfleet.cli.process import Signals
    from comfyfleet.cli.settings import ResolvedSettings
    from comfyfleet.model.worker import Capabilities
    from comfyfleet.pool.options import Server


@group("worker", invoke_without_command=True)
@settings(
    "hub",
    "store",
    "servers",
    "services",
    *OF_A_WORKER,
    "server_folder",
    "clear_history",
    "fake",
    "fake_version",
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

    Each server becomes a worker of the fleet; several such processes, on any number of machines, share the jobs. With
    --hub only outgoing connections are made. A hub or a server that is down is waited for. The first signal lets what
    runs end and takes nothing new, a second one gives it back at once. The commands are
    those of `comfyfleet workers`: they tell a worker of a hub what to do.
    """
    if context.invoked_subcommand is not None:
        if any((config, changes, simulated, fake_beside_real, *flags.values())):
            raise click.UsageError(f"put the options behind `{context.invoked_subcommand}`")
        return
    import asyncio

    from comfyfleet.cli.hub_connection import keep_private, read_hub, tighten_data_folder
    from comfyfleet.cli.process import set_up
    from comfyfleet.cli.servers import declared_in, named, tidied, with_services
    from comfyfleet.cli.settings import read_settings

    flags |= _read_rules(changes)
    resolved = read_settings(flags, config=config)
    chosen = resolved.values
    if not (chosen.servers or chosen.services or chosen.fake or simulated):
        raise click.UsageError("there is nothing to work with: name a --server, or try --fake 1")
    if not chosen.hub and chosen.store is None and read_hub(resolved.data) is None:
        raise click.UsageError(
            "where do the jobs come from? Name a --hub (or COMFYFLEET_HUB) or a --store (or COMFYFLEET_STORE)"
        )
    if chosen.fake or simulated:
        _refuse_found(resolved)
    keep_private()
    set_up(chosen.log_level, chosen.log_format)
    tighten_data_folder(resolved.data)
    servers = named(chosen.servers, chosen.name, chosen.slots, alone=not (chosen.fake or simulated))
    servers = with_services(tidied(servers, resolved), resolved)
    declared = declared_in(resolved, fake_beside_real=fake_beside_real)
    ended(asyncio.run(_work(resolved, servers, simulated, declared)))


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
    """What was said nearer wins: a flag over the environment, that over the file."""
    chosen = resolved.values
    if chosen.hub and chosen.store is not None:
        hub, store = resolved.origin("hub"), resolved.origin("store")
        if hub.rank == store.rank:
            raise click.UsageError(
                f"a worker takes its jobs from a hub or from a store, not from both ({hub.place}, {store.place})"
            )
        return store.rank > hub.rank
    return chosen.store is not None


def _refuse_found(resolved: ResolvedSettings) -> None:
    """A fake completes jobs with pictures that nobody can use: it joins nothing that the environment led it to."""
    from comfyfleet.cli.hub_connection import find_hub
    from comfyfleet.cli.settings import masked

    takes_from_store = _takes_from_store(resolved)
    name = "store" if takes_from_store else "hub"
    if resolved.origin(name).is_flag:
        return
    found = masked("store", resolved.values.store) if takes_from_store else find_hub(resolved).url
    raise click.UsageError(
        f"fake servers join a {name} only if you name it on the command line: --{name} {found} if that one is meant"
    )


async def _work(
    resolved: ResolvedSettings, servers: list[Server], simulated: Sequence[float], declared: Capabilities
) -> Sequence[int]:
    """Answers which signals came."""
    from comfyfleet.cli.process import Signals
    from comfyfleet.cli.servers import declaring, fakes, this_process

    chosen = resolved.values
    name = chosen.name or this_process()
    with Signals() as signals:
        async with AsyncExitStack() as stack:
            servers += await fakes(stack, chosen.fake, name, resolved)
            servers += _simulated(simulated, chosen.name, chosen.slots)
            servers = declaring(servers, declared)
            if _takes_from_store(resolved):
                await _work_on_store(resolved, servers, stack, signals)
            else:
                await _work_for_hub(resolved, servers, stack, signals)
    return signals.came


async def _work_on_store(
    resolved: ResolvedSettings, servers: list[Server], stack: AsyncExitStack, signals: Signals
) -> None:
    from comfyfleet.cli.encryption_keys import worker_encryption
    from comfyfleet.cli.servers import journals, tell_state
    from comfyfleet.pool.servers import StoreWorkers
    from comfyfleet.worker.settings import AgentSettings

    chosen = resolved.values
    assert chosen.store is not None, "whoever works on a store has one"
    agent = AgentSettings(drain_grace_s=chosen.grace_s)
    workers = StoreWorkers(
        servers,
        store=chosen.store,
        on_state=tell_state,
        rules=resolved.rules(),
        agent=agent,
        comfyui=resolved.comfyui(),
        journals=journals(resolved),
        encryption=worker_encryption(resolved),
    )
    # A signal must be heard while a store or a server is still waited for.
    if await signals.before(stack.enter_async_context(workers), 1) is None:
        return
    if await signals.before(workers.drained(), 1) is None:
        _tell_of_drain()
        await signals.before(workers.drain(), 2)


async def _work_for_hub(
    resolved: ResolvedSettings, servers: list[Server], stack: AsyncExitStack, signals: Signals
) -> None:
    from comfyfleet.cli.hub_connection import find_hub
    from comfyfleet.cli.servers import journals, tell_state
    from comfyfleet.pool.servers import PoolAgents
    from comfyfleet.worker.settings import AgentSettings, AgentState, AgentStatus
    from comfyfleet.worker.transports.http import HttpWorkerApi
    from comfyfleet.worker.transports.websocket import WebSocketWorkerApi

    reach = find_hub(resolved)
    for url in reach.urls:
        if url.startswith(("ws://", "wss://")):
            raise resolved.wrong("hub", f"name it as http{url[2:]} and say --transport websocket")
    transport = WebSocketWorkerApi if resolved.values.transport == "websocket" else HttpWorkerApi
    settings_ = AgentSettings(drain_grace_s=resolved.values.grace_s)
    is_accepted = False

    def tell(worker: str, state: AgentState) -> None:
        nonlocal is_accepted
        if state.status is AgentStatus.ONLINE and not is_accepted:
            # The hub has registered a worker: the address and the key are right.
            is_accepted = True
            echo(f"works for {', '.join(reach.urls)}")
        tell_state(worker, state)

    agents = PoolAgents(tell, settings_, resolved.comfyui(), journals=journals(resolved))
    stack.push_async_callback(agents.close)
    echo(f"connects to {', '.join(reach.urls)}")
    for server in servers:
        keyed = await signals.before(_key(resolved, reach, str(server.id)), 1)
        if keyed is None:
            return
        journal = agents.journal_of(server)
        spool = None if journal is None else journal.spool
        api = transport(reach.urls, keyed[0], trust=reach.trust, spool=spool)
        stack.push_async_callback(api.close)
        await agents.add(api, server, journal)
        # Entered after the door that they report through, the agents leave before it closes.
        stack.push_async_callback(agents.close)
    if await signals.before(agents.drained(), 1) is None:
        _tell_of_drain()
        await signals.before(agents.drain(), 2)


async def _key(resolved: ResolvedSettings, reach: HubTarget, worker: str) -> str | None:
    """The key of this worker: one it got before, or gets now for the enrolment token; else the one that was given."""
    import asyncio

    from comfyfleet.cli.hub_connection import read_worker_key, write_worker_key
    from comfyfleet.client.client import FleetClient
    from comfyfleet.model.errors import Fault

    if resolved.values.key is not None:
        return resolved.values.key
    # Hubs on one store know the same keys.
    for url in reach.urls:
        if known := read_worker_key(resolved.data, url, worker):
            return known
    token = resolved.values.enrol
    if token is None:
        return reach.key
    async with FleetClient(reach.urls, patience_s=10.0, trust=reach.trust) as client:
        while True:
            try:
                made = await client.enrol(token, worker)
            except Fault as error:
                echo(f"{worker}: {error}; tries again", err=True)
                await asyncio.sleep(5.0)
                continue
            write_worker_key(resolved.data, reach.url, worker, made.key)
            echo(f"{worker}: enrolled")
            return made.key


def _tell_of_drain() -> None:
    echo("draining: what runs may end; once more stops at once")


def _simulated(seconds: Sequence[float], name: str | None, slots: int) -> list[Server]:
    """Workers without a server, for tests of the fleet: each run takes so long and is told of on standard output."""
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
            # So that whoever submitted it can see what was run for it.
            return JobResult({"9": {"made_from": [job.workflow]}})

        return behave

    names = [f"{name or this_process()}-{number}" for number in range(1, len(seconds) + 1)]
    if name is not None and len(seconds) == 1:
        names = [name]
    return [
        Server(id=worker, slots=slots, connector=SimulatedConnector(behaviour=behaviour(run_s)))
        for worker, run_s in zip(names, seconds, strict=True)
    ]
