"""Tenants' jobs go through real hubs and the product's own agents while the way to the store takes its time. Whatever
is leased and downloaded is compared with what its caller submitted.

Nobody is killed: what is looked for is one job's payload under another's lease. Callers, agents and connectors live in
one process and speak to the hubs over HTTP, so that it is known at once what each of them asked, got and made.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from chaos.content_checker import Asked, Compared, Got, Leased, compare
from chaos.far_stores import StoreServers, Where, hubs_on
from chaos.made import file_made_from, made_from, new_nonce
from chaos.programs import HubProgram
from comfyfleet.client.client import FleetClient
from comfyfleet.model.calls import Completion, LeasedJob, Poll, ReportReply
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.worker.agent import Agent, AgentSettings
from comfyfleet.worker.connectors.simulated import Reporter, SimulatedConnector
from comfyfleet.worker.transports.http import HttpWorkerApi

Teller = Callable[[str], None]

_TENANTS = 12
_WITHIN_S = 120.0
"""So long a caller waits for the end of a job before it says that it is lost."""
_AGENT = AgentSettings(slots=8, poll_wait_s=5.0, command_wait_s=5.0)


class Cell(msgspec.Struct, frozen=True):
    store: Where
    hubs: int
    delay_ms: float
    leases: int


class Size(msgspec.Struct, frozen=True):
    cells: tuple[Cell, ...]
    tenants: int = _TENANTS
    callers: int = 4
    """Of each tenant; each has one job at a time."""
    agents: int = 3
    """At each hub."""
    filed_every: int = 10
    """One job in so many leaves a file, which its caller downloads."""


class Measured(msgspec.Struct, frozen=True):
    cell: Cell
    compared: Compared

    def __str__(self) -> str:
        cell, found = self.cell, self.compared
        return (
            f"{cell.store}, {cell.hubs} hub{'s'[: cell.hubs - 1]}, {cell.delay_ms:g} ms: {found.leases} leases, "
            f"{found.mixed} mixed ({found.across_tenants} across tenants), {found.outputs} downloads, "
            f"{found.foreign} of them of something else, {found.lost} jobs lost"
        )


class Contents(msgspec.Struct, frozen=True):
    cells: tuple[Measured, ...]

    @property
    def whole(self) -> Compared:
        return sum((each.compared for each in self.cells), Compared())

    @property
    def wrong(self) -> tuple[str, ...]:
        """Each cell with something wrong in it, and the first words of what."""
        return tuple(
            line
            for each in self.cells
            if each.compared.wrong
            for line in (str(each), *(f"  {words}" for words in each.compared.wrong))
        )


def every_cell(leases: int) -> tuple[Cell, ...]:
    """Every store, number of hubs and delay that there can be; most leases where they can go wrong."""
    apart: list[tuple[Where, int, float]] = [
        (store, hubs, delay)
        for store in ("redis", "postgres")
        for hubs in (1, 2)
        for delay in (0.0, 2.0, 5.0)
    ]
    # In the hub's own process there is no way that could take time, and no second hub.
    inside: list[tuple[Where, int, float]] = [("memory", 1, 0.0), ("sqlite", 1, 0.0)]
    few = max(1, leases // 50)
    many = -(-(leases - few * len(inside)) // len(apart))
    return (*(Cell(*each, few) for each in inside), *(Cell(*each, many) for each in apart))


def run(size: Size, seed: int, tell: Teller) -> Contents:
    measured: list[Measured] = []
    with ExitStack() as stack:
        servers = StoreServers(stack)
        for number, cell in enumerate(size.cells):
            folder = Path(tempfile.mkdtemp(prefix="chaos-"))
            try:
                with (
                    servers.store(cell.store, cell.delay_ms, number) as url,
                    hubs_on(url, cell.hubs, folder) as hubs,
                ):
                    compared = asyncio.run(_play(cell, size, hubs, random.Random(seed + number)))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            measured.append(Measured(cell, compared))
            tell(str(measured[-1]))
    return Contents(tuple(measured))


# the play


class Witness(HttpWorkerApi):
    """The workers' door over HTTP, and what came and went through it."""

    def __init__(self, hub: HubProgram, number: int, cast: Cast) -> None:
        super().__init__(hub.url, hub.key)
        self._number = number
        self._cast = cast

    async def poll(self, call: Poll) -> LeasedJob | None:
        job = await super().poll(call)
        if job is not None:
            self._cast.leased.append(Leased(job.job_id, made_from(job.workflow)))
        return job

    async def complete(self, call: Completion) -> ReportReply:
        settled = await super().complete(call)
        if settled.phase.is_final:
            # Otherwise it is tried again, and nothing can be downloaded yet.
            self._cast.ended(call.ref.job_id, self._number)
        return settled


class Painter(SimulatedConnector):
    """Makes what it makes from the graph it is given, and from nothing else."""

    def __init__(self) -> None:
        super().__init__(behaviour=self._paint)
        self._files: dict[str, bytes] = {}

    async def _paint(self, job: LeasedJob, _report: Reporter) -> JobResult:
        made = made_from(job.workflow)
        if not job.workflow["1"]["inputs"]["leaves_file"]:
            return JobResult({"1": {"made": [made]}})
        # Named after the job, and after nothing that is in it: names are not encrypted.
        name = f"{job.job_id}.txt"
        self._files[name] = file_made_from(job.workflow)
        return JobResult({"1": {"made": [made]}}, (OutputFile("1", "text", name),))

    async def save(self, file: OutputFile, path: Path) -> int:
        return await asyncio.to_thread(path.write_bytes, self._files[file.filename])


class Cast:
    """What everybody asked, got and made."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.leased: list[Leased] = []
        self.got: list[Got] = []
        self._ended: dict[str, asyncio.Future[int]] = {}

    def ended(self, job: str, hub: int) -> None:
        if not (end := self._end_of(job)).done():
            end.set_result(hub)

    async def end_of(self, job: str) -> int:
        """The hub at which it was completed."""
        return await asyncio.wait_for(asyncio.shield(self._end_of(job)), _WITHIN_S)

    def _end_of(self, job: str) -> asyncio.Future[int]:
        if job not in self._ended:
            self._ended[job] = asyncio.get_running_loop().create_future()
        return self._ended[job]


async def _play(cell: Cell, size: Size, hubs: Sequence[HubProgram], chance: random.Random) -> Compared:
    cast = Cast()
    async with AsyncExitStack() as stack:
        callers = [
            await stack.enter_async_context(_tenant(hubs, f"tenant-{number}"))
            for number in range(size.tenants)
        ]
        for number, hub in enumerate(hubs):
            for place in range(size.agents):
                api = await stack.enter_async_context(Witness(hub, number, cast))
                name = WorkerId(f"gpu-{number}-{place}")
                agent = await stack.enter_async_context(Agent(api, name, [Painter()], _AGENT))
                await agent.wait_for_first_check()
        numbers = itertools.count()
        async with asyncio.TaskGroup() as group:
            for clients in callers:
                for _ in range(size.callers):
                    group.create_task(_call(clients, cast, chance, numbers, cell.leases, size.filed_every))
    return compare(cast.asked, cast.leased, cast.got)


class _Clients(msgspec.Struct):
    tenant: str
    at: list[FleetClient]
    """One for each hub."""


@asynccontextmanager
async def _tenant(hubs: Sequence[HubProgram], tenant: str) -> AsyncIterator[_Clients]:
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(FleetClient(hubs[0].url, hubs[0].key))
        key = (await owner.create_key("tenant", tenant=tenant)).key
        yield _Clients(tenant, [await stack.enter_async_context(FleetClient(hub.url, key)) for hub in hubs])


async def _call(
    clients: _Clients,
    cast: Cast,
    chance: random.Random,
    numbers: Iterator[int],
    leases: int,
    filed_every: int,
) -> None:
    """One job after the other, each at some hub and read at some hub, until so many leases were given."""
    while len(cast.leased) < leases:
        graph = graph_of(next(numbers), filed_every)
        job = (await chance.choice(clients.at).submit(graph)).id
        cast.asked.append(Asked(job, clients.tenant, made_from(graph)))
        with contextlib.suppress(TimeoutError):
            await _download(clients, cast, chance, job, graph)


async def _download(
    clients: _Clients, cast: Cast, chance: random.Random, job: str, graph: dict[str, Any]
) -> None:
    # Hubs without a storage of their own keep what their workers brought in a folder of their own.
    keeper = clients.at[await cast.end_of(job)]
    result = (await chance.choice(clients.at).result(job)).result
    made = "nothing" if result is None else str(result.outputs.get("1", {}).get("made", ["nothing"])[0])
    cast.got.append(Got(job, "result", made))
    if graph["1"]["inputs"]["leaves_file"]:
        files = () if result is None else result.files
        content = [await keeper.fetch(file) for file in files]
        is_own = content == [file_made_from(graph)]
        cast.got.append(Got(job, "file", made_from(graph) if is_own else repr(content)[:100]))


def graph_of(number: int, filed_every: int) -> dict[str, Any]:
    inputs = {"nonce": new_nonce(), "seed": number, "leaves_file": number % filed_every == 0}
    return {"1": {"class_type": "Chaos", "inputs": inputs}}


@click.command()
@click.option("--leases", default=50_000, show_default=True, help="In all cells together.")
@click.option("--store", "stores", multiple=True, help="Only this one; may be repeated.")
@click.option("--seed", default=20_000, show_default=True)
def main(leases: int, stores: tuple[str, ...], seed: int) -> None:
    """Plays the part alone, also with the sources of another version in PYTHONPATH."""
    cells = tuple(each for each in every_cell(leases) if not stores or each.store in stores)
    found = run(Size(cells), seed, click.echo)
    click.echo(f"mixed: {found.whole.mixed} of {found.whole.leases}")
    for line in found.wrong:
        click.echo(line)


if __name__ == "__main__":
    main()
