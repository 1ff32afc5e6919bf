"""Many watch jobs over Server-Sent Events at several hubs while the way to the store takes its time. Every stream must
end within ten seconds of its job, with what came of that job.

Nobody is killed. Streams begin at all moments: with the job, while it runs, around its end and after it; some jobs fail
and are retried, so that a stream may see one end or two. They are read by hand, not by our client, and none of them is
taken up again: one that breaks off counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec

from chaos.far_stores import StoreServers, Where, hubs_on
from chaos.kill_loop import Teller
from chaos.made import made_from, new_nonce
from chaos.programs import HubProgram
from chaos.stream_checker import Ended, Streamed, Streams, check_streams
from comfyfleet.client.client import FleetClient
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, ReportReply
from comfyfleet.model.errors import Refusal
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.worker.agent import Agent, AgentSettings
from comfyfleet.worker.connectors.simulated import Reporter, SimulatedConnector
from comfyfleet.worker.transports.http import HttpWorkerApi

WITHIN_S = 10.0
"""After the end of its job a stream has so long to end."""
_LOST_S = 60.0
_AGENT = AgentSettings(slots=8, poll_wait_s=5.0, command_wait_s=5.0)
_FINAL = frozenset({"completed", "failed", "cancelled"})


class Cell(msgspec.Struct, frozen=True):
    store: Where
    hubs: int
    delay_ms: float
    streams: int


class Size(msgspec.Struct, frozen=True):
    cells: tuple[Cell, ...]
    jobs_at_once: int = 24
    streams_a_job: int = 6
    agents: int = 2
    """At each hub."""
    failing_every: int = 5
    """One job in so many fails at first and is retried by its caller."""


class Measured(msgspec.Struct, frozen=True):
    cell: Cell
    found: Streams

    def __str__(self) -> str:
        cell, found = self.cell, self.found
        return (
            f"{cell.store}, {cell.hubs} hub{'s'[: cell.hubs - 1]}, {cell.delay_ms:g} ms: {found.streams} streams of "
            f"{found.jobs} jobs, {found.open} open {WITHIN_S:g} s after the end, {found.without} without their result"
        )


class Watched(msgspec.Struct, frozen=True):
    cells: tuple[Measured, ...]

    @property
    def whole(self) -> Streams:
        return sum((each.found for each in self.cells), Streams())

    @property
    def wrong(self) -> tuple[str, ...]:
        """Each cell with something wrong in it, and the first words of what."""
        return tuple(
            line
            for each in self.cells
            if each.found.wrong
            for line in (str(each), *(f"  {words}" for words in each.found.wrong))
        )


def every_cell(streams: int) -> tuple[Cell, ...]:
    """Both stores that hubs can share, one hub and two, near and far."""
    stores: tuple[Where, ...] = ("redis", "postgres")
    kinds = list(itertools.product(stores, (1, 2), (0.0, 2.0, 5.0)))
    each = -(-streams // len(kinds))
    return tuple(Cell(*kind, each) for kind in kinds)


def run(size: Size, seed: int, tell: Teller) -> Watched:
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
                    found = asyncio.run(_play(cell, size, hubs, random.Random(seed + number)))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            measured.append(Measured(cell, found))
            tell(str(measured[-1]))
    return Watched(tuple(measured))


# who runs the jobs


class _Ends:
    """When each round of a job ended, as its worker was answered."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int], asyncio.Future[None]] = {}

    def of(self, job: str, round_: int) -> asyncio.Future[None]:
        if (job, round_) not in self._ends:
            self._ends[job, round_] = asyncio.get_running_loop().create_future()
        return self._ends[job, round_]

    def note(self, job: str, round_: int) -> None:
        if not (end := self.of(job, round_)).done():
            end.set_result(None)


class _Witness(HttpWorkerApi):
    """The workers' door over HTTP; it notes what was answered with a final phase."""

    def __init__(self, hub: HubProgram, ends: _Ends) -> None:
        super().__init__(hub.url, hub.key)
        self._ends = ends

    async def complete(self, call: Completion) -> ReportReply:
        settled = await super().complete(call)
        self._ends.note(call.ref.job_id, call.ref.round)
        return settled

    async def fail(self, call: FailureReport) -> ReportReply:
        settled = await super().fail(call)
        if settled.phase.is_final:
            self._ends.note(call.ref.job_id, call.ref.round)
        return settled


class _Painter(SimulatedConnector):
    """Makes what it makes from the graph it is given; in its first round a job may be asked to fail."""

    def __init__(self) -> None:
        super().__init__(behaviour=self._paint)

    async def _paint(self, job: LeasedJob, _report: Reporter) -> JobResult:
        asked = job.workflow["1"]["inputs"]
        await asyncio.sleep(asked["takes_s"])
        made = made_from(job.workflow)
        if asked["fails_first"] and job.ref.round == 1:
            raise ServiceFailed(Failure(FailureKind.INVALID_WORKFLOW, made))
        return JobResult({"1": {"made": [made]}})


# who watches


class _Caller:
    def __init__(
        self, clients: Sequence[FleetClient], hubs: Sequence[HubProgram], key: str, ends: _Ends
    ) -> None:
        self.clients = clients
        self._hubs = hubs
        self._key = key
        self._ends = ends

    async def play(
        self, session: aiohttp.ClientSession, graph: dict[str, Any], chance: random.Random, streams: int
    ) -> list[Streamed]:
        """One job with its streams, to the end of its last round and of the time they have."""
        client = chance.choice(self.clients)
        job = (await client.submit(graph)).id
        rounds = 2 if graph["1"]["inputs"]["fails_first"] else 1
        found: list[Streamed] = []
        for round_ in range(1, rounds + 1):
            # Most while it runs, or just as it ends; one when it is over.
            starts = [chance.uniform(0.0, 0.1) for _ in range(streams // rounds - 1)]
            watching = [self._later(session, job, start, chance) for start in starts]
            tasks = [asyncio.ensure_future(each) for each in watching]
            with contextlib.suppress(TimeoutError):
                # Without an end its streams stay open, and count.
                await asyncio.wait_for(asyncio.shield(self._ends.of(job, round_)), _LOST_S)
            tasks.append(asyncio.ensure_future(self._later(session, job, 0.0, chance)))
            found += [await _by_then(job, task) for task in await _within(tasks)]
            if round_ < rounds:
                try:
                    await client.retry(job)
                except Refusal as refusal:
                    # It did not fail: a worker was given another job's graph.
                    return [*found, Streamed(job, Ended(f"a job that was not to be retried: {refusal}"))]
        return found

    async def _later(
        self, session: aiohttp.ClientSession, job: str, start_s: float, chance: random.Random
    ) -> Ended:
        hub = chance.choice(self._hubs)
        await asyncio.sleep(start_s)
        headers = {"authorization": f"Bearer {self._key}", "accept": "text/event-stream"}
        async with session.get(f"{hub.url}/api/jobs/{job}/progress", headers=headers) as response:
            if response.status != 200:
                return Ended(f"answered {response.status}")
            facts = [fact async for fact in _facts(response)]
        return _ended(facts)


async def _within(tasks: list[asyncio.Task[Ended]]) -> list[asyncio.Task[Ended]]:
    await asyncio.wait(tasks, timeout=WITHIN_S)
    return tasks


async def _by_then(job: str, task: asyncio.Task[Ended]) -> Streamed:
    if not task.done():
        task.cancel()
        return Streamed(job, None)
    error = task.exception()
    return Streamed(job, Ended(f"broke off: {error!r}") if error is not None else task.result())


async def _facts(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    number, data = "", ""
    async for line in response.content:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            number = value
        elif name == "data":
            data = value
        elif not name and data:
            if number:
                yield msgspec.json.decode(data)
            number = data = ""


def _ended(facts: list[dict[str, Any]]) -> Ended:
    if [fact["number"] for fact in facts] != list(range(1, len(facts) + 1)):
        return Ended(f"facts {[fact['number'] for fact in facts]}")
    if not facts or facts[-1]["kind"] not in _FINAL:
        return Ended(f"no end after {[fact['kind'] for fact in facts]}")
    last = facts[-1]
    if last["kind"] == "failed":
        return Ended("failed", last["round"], last.get("error", {}).get("message"))
    made = last.get("result", {}).get("outputs", {}).get("1", {}).get("made", [None])
    return Ended(last["kind"], last["round"], made[0])


# the play


async def _play(cell: Cell, size: Size, hubs: Sequence[HubProgram], chance: random.Random) -> Streams:
    ends = _Ends()
    asked: dict[str, str] = {}
    found: list[Streamed] = []
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(FleetClient(hubs[0].url, hubs[0].key))
        key = (await owner.create_key("tenant", tenant="watched")).key
        clients = [await stack.enter_async_context(FleetClient(hub.url, key)) for hub in hubs]
        caller = _Caller(clients, hubs, key, ends)
        for number, hub in enumerate(hubs):
            for place in range(size.agents):
                api = await stack.enter_async_context(_Witness(hub, ends))
                name = WorkerId(f"gpu-{number}-{place}")
                agent = await stack.enter_async_context(Agent(api, name, [_Painter()], _AGENT))
                await agent.wait_for_first_check()
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        )
        graphs = _graphs(size, chance, -(-cell.streams // size.streams_a_job))

        async def one_after_the_other() -> None:
            for graph in graphs:
                streams = await caller.play(session, graph, chance, size.streams_a_job)
                asked[streams[0].job] = made_from(graph)
                found.extend(streams)

        async with asyncio.TaskGroup() as group:
            for _ in range(size.jobs_at_once):
                group.create_task(one_after_the_other())
    return check_streams(asked, found)


def _graphs(size: Size, chance: random.Random, jobs: int) -> Iterator[dict[str, Any]]:
    for number in range(jobs):
        inputs = {
            "nonce": new_nonce(),
            "takes_s": chance.uniform(0.0, 0.08),
            "fails_first": number % size.failing_every == size.failing_every - 1,
        }
        yield {"1": {"class_type": "Chaos", "inputs": inputs}}


@click.command()
@click.option("--streams", default=10_000, show_default=True, help="In all cells together.")
@click.option("--store", "stores", multiple=True, help="Only this one; may be repeated.")
@click.option("--seed", default=20_000, show_default=True)
def main(streams: int, stores: tuple[str, ...], seed: int) -> None:
    """Plays the part alone, also with the sources of another version in PYTHONPATH."""
    cells = tuple(each for each in every_cell(streams) if not stores or each.store in stores)
    whole = (watched := run(Size(cells), seed, click.echo)).whole
    click.echo(f"{whole.streams} streams: {whole.open} open, {whole.without} without their result")
    for line in watched.wrong:
        click.echo(line)


if __name__ == "__main__":
    main()
