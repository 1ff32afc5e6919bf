"""`comfyfleet worker`: servers that take their jobs directly from a store, with no hub in the path.

Parses, composes `DirectWorkers`, tells of their states, and turns signals into a drain or an end. What a worker does is
the agent's and the engine's.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.endings import CommandFailed, Terminated
from comfyfleet.cli.run import Address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comfyfleet.policy.rules import Rules
    from comfyfleet.pool.options import Server
    from comfyfleet.worker.settings import AgentState


@click.command("worker")
@click.option(
    "--store",
    required=True,
    envvar=["COMFYFLEET_STORE", "HUB_REDIS_URL", "REDIS_URL"],
    show_envvar=True,
    metavar="URL",
    help="The store to take jobs from: redis://…, rediss://… or postgresql://…",
)
@click.option(
    "-s",
    "--server",
    "addresses",
    type=Address(),
    multiple=True,
    envvar="COMFYFLEET_SERVERS",
    show_envvar=True,
    metavar="URL",
    help="A ComfyUI server, such as http://127.0.0.1:8188. Repeatable.",
)
@click.option(
    "--fake", type=click.IntRange(0), default=0, metavar="N", help="Also start so many fake servers."
)
@click.option(
    "--name",
    metavar="NAME",
    help="The worker's name in the fleet (with several servers NAME-1, NAME-2 …). Unless given: the server's host and "
    "port, with this machine's name in place of a loopback address. Every worker of a fleet needs its own.",
)
@click.option(
    "--slots", type=click.IntRange(1), default=1, show_default=True, help="Jobs a server gets at a time."
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long what runs may take to end after the first signal; then it is given back.",
)
@click.option(
    "--rules",
    "changes",
    metavar="JSON",
    help="""Change rules of the engine, such as '{"lease_ttl_s": 30}'.""",
)
@click.option("--simulated", type=click.FloatRange(0), multiple=True, hidden=True, metavar="SECONDS")
def command(
    store: str,
    addresses: tuple[str, ...],
    fake: int,
    name: str | None,
    slots: int,
    grace: float,
    changes: str | None,
    simulated: tuple[float, ...],
) -> None:
    """Work on jobs from a store until Ctrl-C or SIGTERM.

    Each server becomes a worker of the fleet on that store; several such processes, on any number of machines, share
    the jobs. A server that is down is waited for. The first signal lets what runs end and takes nothing new, a second
    one gives it back at once.
    """
    import asyncio
    import signal

    if not (addresses or fake or simulated):
        raise click.UsageError("there is nothing to work with: name a --server, or try --fake 1")
    rules = _read_rules(changes)
    known = _named(addresses, name, slots, alone=not (fake or simulated))
    signals = asyncio.run(_work(store, known, fake, simulated, name, slots, grace, rules))
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    # To be told to stop, and to end what runs, is how a worker ends well; to be told twice is not.
    if len(signals) > 1:
        raise Terminated


def _read_rules(changes: str | None) -> Rules:
    import msgspec

    from comfyfleet.policy.rules import Rules

    # As in a pool: a run that neither starts nor moves for so long is stuck.
    usual = {"start_timeout_s": 600.0, "stall_timeout_s": 600.0}
    try:
        given = msgspec.json.decode(changes or "{}", type=dict[str, Any])
        return msgspec.convert(usual | given, Rules)
    except msgspec.DecodeError as error:
        raise click.BadParameter(str(error), param_hint="--rules") from error


def _named(addresses: Sequence[str], name: str | None, slots: int, *, alone: bool) -> list[Server]:
    import socket

    from comfyfleet.pool.options import Server
    from comfyfleet.worker.connectors.comfyui.settings import parse_address

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


async def _work(
    store: str,
    servers: list[Server],
    fake: int,
    simulated: Sequence[float],
    name: str | None,
    slots: int,
    grace: float,
    rules: Rules,
) -> Sequence[int]:
    """Answers which signals came."""
    import asyncio

    from comfyfleet.pool.direct import DirectWorkers
    from comfyfleet.worker.settings import AgentSettings

    with _Signals() as signals:
        async with AsyncExitStack() as stack:
            servers += await _fakes(stack, fake, name, slots)
            servers += _simulated(simulated, name, slots)
            agent = AgentSettings(drain_grace_s=grace)
            workers = DirectWorkers(servers, store=store, on_state=_tell, rules=rules, agent=agent)
            # A signal must be heard while a store or a server is still waited for.
            entering = asyncio.create_task(stack.enter_async_context(workers))
            if not await signals.before(entering, 1):
                entering.cancel()
                await asyncio.gather(entering, return_exceptions=True)
            elif not await signals.before(asyncio.create_task(workers.drained()), 1):
                click.echo("draining: what runs may end; once more stops at once")
                await signals.before(asyncio.create_task(workers.drain()), 2)
    return signals.came


def _tell(worker: str, state: AgentState) -> None:
    click.echo(f"{worker}: {state.status.value}" + (f" ({state.reason})" if state.reason else ""))


async def _fakes(stack: AsyncExitStack, count: int, name: str | None, slots: int) -> list[Server]:
    from comfyfleet.pool.options import Server

    if not count:
        return []
    from comfyfleet.sim.fake_comfyui import FakeComfyUI, FakeSettings
    from comfyfleet.sim.fake_comfyui.pictures import PillowMissing

    servers = []
    for number in range(1, count + 1):
        try:
            fake = await stack.enter_async_context(FakeComfyUI(FakeSettings(name=f"fake-{number}")))
        except PillowMissing as error:
            raise CommandFailed(str(error)) from error
        worker = f"{name or _this_process()}-fake-{number}"
        servers.append(Server(fake.url, id=worker, slots=slots))
    return servers


def _simulated(seconds: Sequence[float], name: str | None, slots: int) -> list[Server]:
    """Workers without a server, for tests of the fleet: each run takes so long and is told of on standard output."""
    from comfyfleet.pool.options import Server

    if not seconds:
        return []
    from comfyfleet.model.calls import LeasedJob
    from comfyfleet.model.job import JobResult
    from comfyfleet.worker.connectors.simulated import Behaviour, Reporter, SimulatedConnector, takes

    def behaviour(run_s: float) -> Behaviour:
        run = takes(run_s, steps=0)

        async def behave(job: LeasedJob, report: Reporter) -> JobResult:
            click.echo(f"run {job.attempt_id}")
            result = await run(job, report)
            click.echo(f"ran {job.attempt_id}")
            return result

        return behave

    names = [f"{name or _this_process()}-{number}" for number in range(1, len(seconds) + 1)]
    if name is not None and len(seconds) == 1:
        names = [name]
    return [
        Server(id=worker, slots=slots, connector=SimulatedConnector(behaviour=behaviour(run_s)))
        for worker, run_s in zip(names, seconds, strict=True)
    ]


def _this_process() -> str:
    import os
    import socket

    return f"{socket.gethostname()}-{os.getpid()}"


class _Signals:
    """Counts SIGINT and SIGTERM while it lasts, in place of ending with them."""

    def __init__(self) -> None:
        import asyncio

        self.came: list[int] = []
        self._changed = asyncio.Event()

    def __enter__(self) -> _Signals:
        self._handle(is_wanted=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle(is_wanted=False)

    def _handle(self, *, is_wanted: bool) -> None:
        import asyncio
        import contextlib
        import signal

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # loops of Windows know no signals
                if is_wanted:
                    loop.add_signal_handler(number, self._hear, number)
                else:
                    loop.remove_signal_handler(number)

    def _hear(self, number: int) -> None:
        self.came.append(number)
        self._changed.set()

    async def before(self, task: Any, count: int) -> bool:
        """Waits for the task; False when so many signals came before its end. An error of the task is raised."""
        import asyncio

        while len(self.came) < count:
            self._changed.clear()
            heard = asyncio.create_task(self._changed.wait())
            await asyncio.wait({task, heard}, return_when=asyncio.FIRST_COMPLETED)
            heard.cancel()
            if task.done():
                task.result()
                return True
        return False
