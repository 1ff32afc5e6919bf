"""`comfyfleet demo`: a small fleet of fake servers, some of which misbehave, and a pool that gets everything done.

Plays the demo: starts the servers, submits the jobs, pulls a plug, collects what became of it. The cast is in
`demo_fleet.py`, the pictures on the terminal in `demo_show.py`, the tables at the end in `demo_report.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.endings import CommandFailed, ExitCode, Terminated, make_folder, run

if TYPE_CHECKING:
    from comfyfleet.cli.demo_fleet import Kind, Story
    from comfyfleet.cli.demo_report import Report
    from comfyfleet.cli.demo_show import Show
    from comfyfleet.pool.events import PoolEvent
    from comfyfleet.pool.pool import WorkflowPool
    from comfyfleet.pool.records import JobRecord
    from comfyfleet.sim.fake_comfyui import FakeComfyUI

_COOLDOWN_S = 4.0
_DOWN_S = 1.5
_LIMIT_S = 120.0
"""A demo that takes longer hangs."""


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="Folder for the pictures; a temporary one unless given.",
)
@click.option("--plain", is_flag=True, help="Print lines instead of live progress bars.")
@click.option("--time-scale", type=click.FloatRange(0.05, 10), default=1.0, hidden=True)
def command(out: Path | None, plain: bool, time_scale: float) -> None:
    """Watch a pool drive four fake servers for a quarter of a minute.

    24 jobs of four workflows and different priorities run on cards of different size and speed. One server fails a
    workflow and is blocked for it until its cooldown is over, another one crashes in the middle of a run and comes
    back. Nothing is lost. Ends with who ran what. Needs no GPU and no network.
    """
    import tempfile
    import time

    from rich.console import Console

    from comfyfleet.cli.demo_report import Report
    from comfyfleet.cli.demo_show import count_jobs, make_show
    from comfyfleet.sim.fake_comfyui.pictures import PillowMissing

    if out is not None:
        make_folder(out)
    console = Console(highlight=False)
    began_at = time.time()
    report = Report(began_at)
    try:
        # A temporary folder is made late: an interrupted demo leaves nothing behind.
        run(_play(make_show(console, plain, began_at), report, time_scale))
    except PillowMissing as error:
        raise CommandFailed(str(error)) from error
    except (KeyboardInterrupt, Terminated):
        click.echo(f"interrupted, {len(report.pictures)} of {count_jobs()} done", err=True)
        raise
    folder = out or Path(tempfile.mkdtemp(prefix="comfyfleet-demo-"))
    report.save_pictures(folder)
    report.print(console)
    if not report.is_complete:
        raise SystemExit(ExitCode.FAILED)


async def _play(show: Show, report: Report, time_scale: float) -> None:
    import asyncio
    import contextlib

    from comfyfleet.cli.demo_fleet import CARDS, faults_of, settings_of, stories
    from comfyfleet.pool.options import Server
    from comfyfleet.pool.pool import WorkflowPool
    from comfyfleet.sim.fake_comfyui import FakeComfyUI

    async with contextlib.AsyncExitStack() as stack:
        fakes: dict[str, FakeComfyUI] = {}
        for seed, card in enumerate(CARDS):
            faults = faults_of(card, _DOWN_S * time_scale)
            fake = FakeComfyUI(settings_of(card, time_scale, seed), faults=faults)
            fakes[card.id] = await stack.enter_async_context(fake)
        pool = await stack.enter_async_context(
            WorkflowPool(
                [Server(fake.url, id=name) for name, fake in fakes.items()],
                cooldown=_COOLDOWN_S * time_scale,
                health_check_interval=time_scale,
                reconnection_grace=0.5 * time_scale,
            )
        )
        stage = _Stage(pool, fakes, report)
        with show:
            # Heard no more before the pool closes: what an interruption takes back is no news.
            stack.callback(pool.on("*", show.hear))
            pool.on("*", report.hear)
            pool.on("job:progress", stage.pull_the_plug)
            drawing = asyncio.create_task(show.keep_drawing())
            try:
                async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
                    for story in stories():
                        group.create_task(stage.tell(story))
                await stage.let_blocks_end(_COOLDOWN_S * time_scale)
            except TimeoutError:
                report.is_short = True
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
        await report.collect(pool, fakes)


class _Stage:
    """Where the stories are played: jobs are submitted, followed, and one server is made to crash."""

    def __init__(self, pool: WorkflowPool, fakes: dict[str, FakeComfyUI], report: Report) -> None:
        self._pool = pool
        self._fakes = fakes
        self._report = report
        self._has_crashed = False

    async def tell(self, story: Story) -> None:
        """Make the picture, then what is to be made of it."""
        picture = await self._job(story, story.kind)
        if story.then is not None and picture is not None:
            await self._job(story, story.then, picture)
        elif story.then is not None:
            self._report.is_short = True

    async def _job(self, story: Story, kind: Kind, picture: bytes | None = None) -> bytes | None:
        from comfyfleet.cli.demo_fleet import workflow_of
        from comfyfleet.pool.options import attach

        graph: dict[str, Any] = workflow_of(kind, story.text)
        job_id = await self._pool.enqueue(
            graph,
            priority=story.priority,
            metadata={"title": f"{kind} {story.title}", "kind": kind},
            attachments=[] if picture is None else [attach(picture, "10", "image", "picture.png")],
        )
        self._report.submitted.append(job_id)
        record = await self._pool.wait_for_record(job_id)
        if record.result is None:
            return None
        made = await self._fetch(record)
        self._report.pictures[f"{kind} {story.title}"] = made
        return made

    async def _fetch(self, record: JobRecord) -> bytes:
        """A server that is down at this moment comes back, and its files are still there."""
        import asyncio

        from comfyfleet.model.failure import ServiceFailed

        assert record.result is not None
        while True:
            try:
                return await self._pool.fetch(record.result.files[0], record.client_id)
            except ServiceFailed:
                await asyncio.sleep(0.2)

    def pull_the_plug(self, event: PoolEvent) -> None:
        """The server crashes half-way through a run, once it has shown that it works."""
        from comfyfleet.cli.demo_fleet import CRASHING

        if self._has_crashed or event.client_id != CRASHING or not 30 <= (event.percentage or 0) < 80:
            return
        fake = self._fakes[CRASHING]
        *before, current = fake.stats.prompt_log
        # Events come a little later than what they tell of: the run may have ended.
        if current.outcome is None and any(earlier.outcome == "success" for earlier in before):
            self._has_crashed = True
            fake.faults.crash = True

    async def let_blocks_end(self, longest_s: float) -> None:
        """What is still blocked is awaited, so that every story has its end."""
        import asyncio

        ends = asyncio.Event()
        stop = self._pool.on("client:unblocked_workflow", lambda _: ends.set())
        try:
            async with asyncio.timeout(longest_s + 3):
                while await self._pool.blocks():
                    ends.clear()
                    await ends.wait()
        except TimeoutError:
            pass
        finally:
            stop()
