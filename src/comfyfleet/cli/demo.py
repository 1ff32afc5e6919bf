"""`comfyfleet demo`: a hub and a small fleet of fake servers. Some fail, and all jobs complete.

This module starts the hub and the servers, submits the jobs through the API, crashes a server and collects the results.
`demo_fleet.py` has the servers and jobs, `demo_show.py` the live view and the tables at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.exit_codes import ExitCode, Terminated, as_called, run
from comfyfleet.cli.options import output_folder
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from rich.console import Console

    from comfyfleet.cli.demo_fleet import Kind, Story
    from comfyfleet.cli.demo_show import DemoReport, Show
    from comfyfleet.cli.settings import ResolvedSettings
    from comfyfleet.client.client import FleetClient
    from comfyfleet.engine.engine import Engine
    from comfyfleet.model.job import OutputFile
    from comfyfleet.pool.events import EventDispatcher, PoolEvent
    from comfyfleet.testing.fake_comfyui import FakeComfyUI
    from comfyfleet.worker.settings import AgentState

_COOLDOWN_S = 4.0
_DOWN_S = 1.5
_LIMIT_S = 120.0
"""A demo that takes longer has stopped working."""
_PORT = 3001


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="Folder for the pictures. Default: a temporary one.",
)
@click.option(
    "--once", is_flag=True, help="Exit when every job is done. Otherwise the hub keeps running for you."
)
@click.option("--plain", is_flag=True, help="Print lines instead of the live view.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of the hub. Default: 3001 or, if that is in use, a free one.",
)
@click.option("--time-scale", type=click.FloatRange(0.05, 10), default=1.0, hidden=True)
def demo_command(out: Path | None, once: bool, plain: bool, port: int | None, time_scale: float) -> None:
    """Watch a hub and four fake servers for about 20 seconds.

    The demo submits 24 jobs of four workflows and different priorities through the API. They run on GPUs of different
    size and speed. One server fails a workflow and is blocked for it until its cooldown is over; another crashes during
    a run and comes back. No job is lost. At the end it prints who ran what and how many model loads were saved, and the
    hub runs until Ctrl-C. The demo needs no GPU and no network.
    """
    import tempfile
    import time

    from comfyfleet.cli.exit_codes import require

    require("hub", "fake")
    from comfyfleet.cli.demo_show import DemoConsole, DemoReport, count_jobs, make_show

    console = DemoConsole(highlight=False)
    began_at = time.time()
    report = DemoReport(began_at, time_scale)
    try:
        with output_folder(out), tempfile.TemporaryDirectory(prefix="comfyfleet-demo-") as data:
            settings = _settings(data, _PORT if port is None else port, port is None, time_scale)
            show = make_show(console, plain, began_at)
            run(_play(show, report, settings, time_scale, console, out, once=once))
    except (KeyboardInterrupt, Terminated):
        if not report.is_printed:
            echo(f"interrupted, {len(report.pictures)} of {count_jobs()} done", err=True)
            raise
    if not report.is_complete:
        raise SystemExit(ExitCode.FAILED)


def _settings(data: str, port: int, may_move: bool, time_scale: float) -> ResolvedSettings:
    """A hub for this machine only, which needs no key. Settings in the environment are for real hubs."""
    import socket

    from comfyfleet.cli.settings import read_settings

    with socket.socket() as probe:
        if may_move and probe.connect_ex(("127.0.0.1", port)) == 0:
            port = 0
    flags = {"data": data, "port": port, "open": True, "rules.cooldown_s": _COOLDOWN_S * time_scale}
    return read_settings(flags, config=_no_file(), environment={})


def _no_file() -> str:
    import os

    return os.devnull


async def _play(
    show: Show,
    report: DemoReport,
    settings: ResolvedSettings,
    time_scale: float,
    console: Console,
    out: Path | None,
    *,
    once: bool,
) -> None:
    import asyncio
    import contextlib

    from comfyfleet.cli.bootstrap import run_hub
    from comfyfleet.cli.demo_fleet import CARDS, faults_of, settings_of, stories
    from comfyfleet.client.client import FleetClient
    from comfyfleet.pool.events import EventDispatcher
    from comfyfleet.pool.options import Server
    from comfyfleet.pool.servers import PoolAgents
    from comfyfleet.testing.fake_comfyui import FakeComfyUI
    from comfyfleet.worker.settings import AgentSettings

    async with contextlib.AsyncExitStack() as stack:
        fakes: dict[str, FakeComfyUI] = {}
        for seed, card in enumerate(CARDS):
            faults = faults_of(card, _DOWN_S * time_scale)
            fake = FakeComfyUI(settings_of(card, time_scale, seed), faults=faults)
            fakes[card.id] = await stack.enter_async_context(fake)
        running_hub = await stack.enter_async_context(run_hub(settings))
        dispatcher = EventDispatcher(running_hub.engine)
        dispatcher.start()
        stack.push_async_callback(dispatcher.close)
        agent = AgentSettings(health_interval_s=time_scale, reconnect_grace_s=0.5 * time_scale)
        agents = PoolAgents(lambda worker, state: _publish(running_hub.engine, worker, state), agent)
        stack.push_async_callback(agents.close)
        for name, fake in fakes.items():
            await agents.add(running_hub.api, Server(fake.url, id=name))
        await agents.wait_for_first_checks()
        client = await stack.enter_async_context(FleetClient(running_hub.url))
        stage = _Stage(client, dispatcher, fakes, report)
        console.print(f"The hub answers at {running_hub.url}", soft_wrap=True)
        with show:
            # Stop listening before the agents stop: jobs that an interruption returns are not events of the demo.
            leave = dispatcher.on("*", show.on_event, None)
            stack.callback(leave)
            stack.callback(dispatcher.on("*", report.on_event, None))
            dispatcher.on("job:progress", stage.crash_server, None)
            drawing = asyncio.create_task(show.keep_drawing())
            try:
                async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
                    for story in stories():
                        group.create_task(stage.play(story))
                await stage.wait_for_unblock(_COOLDOWN_S * time_scale)
            except TimeoutError:
                report.is_short = True
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
        await report.collect(client, fakes)
        _print_report(report, console, out)
        report.is_printed = True
        if not once and report.is_complete:
            leave()
            console.print(
                f"\nThe hub keeps running at {running_hub.url}: open it in a browser, or try", soft_wrap=True
            )
            # Without markup, because a path may look like it.
            for next_one in ("submit WORKFLOW.json --watch", "top"):
                console.print(
                    f"  {as_called()} {next_one} --hub {running_hub.url}", soft_wrap=True, markup=False
                )
            console.print("Ctrl-C stops it.")
            await asyncio.Event().wait()


def _publish(engine: Engine, worker: str, state: AgentState) -> None:
    import time

    from comfyfleet.model.fact import FleetEvent
    from comfyfleet.model.ids import WorkerId

    data = {"state": state.status.value, "message": state.reason}
    engine.bus.publish(FleetEvent("state", time.time(), WorkerId(worker), data))


def _print_report(report: DemoReport, console: Console, out: Path | None) -> None:
    import tempfile

    # Create a temporary folder only now, so that an interrupted demo leaves nothing behind.
    report.save_pictures(out or Path(tempfile.mkdtemp(prefix="comfyfleet-pictures-")))
    report.print(console)


class _Stage:
    """Submits the jobs, follows them, and crashes one server."""

    def __init__(
        self,
        client: FleetClient,
        dispatcher: EventDispatcher,
        fakes: dict[str, FakeComfyUI],
        report: DemoReport,
    ) -> None:
        self._client = client
        self._dispatcher = dispatcher
        self._fakes = fakes
        self._report = report
        self._has_crashed = False

    async def play(self, story: Story) -> None:
        """Makes the picture, then the one that follows it."""
        made = await self._job(story, story.kind)
        if story.then is not None and made is not None:
            await self._job(story, story.then, after=made)
        elif story.then is not None:
            self._report.is_short = True

    async def _job(self, story: Story, kind: Kind, after: str | None = None) -> str | None:
        """Submits a job and waits for it. Returns its id, or None if it made no picture."""
        from comfyfleet.cli.demo_fleet import workflow_of

        graph: dict[str, Any] = workflow_of(kind, story.text)
        title = f"{kind} {story.title}"
        job = await self._client.submit(
            graph, priority=story.priority, metadata={"title": title, "kind": kind}
        )
        self._report.submitted[job.id] = after
        ended = await self._client.wait(job.id)
        if ended.result is None:
            return None
        self._report.pictures[title] = await self._fetch(ended.result.files[0])
        return job.id

    async def _fetch(self, file: OutputFile) -> bytes:
        """Retries: a server that is down comes back with its files."""
        import asyncio

        from comfyfleet.model.errors import Fault

        while True:
            try:
                return await self._client.fetch(file)
            except Fault:
                await asyncio.sleep(0.2)

    def crash_server(self, event: PoolEvent) -> None:
        """Crashes the server during a run, after it has completed one."""
        from comfyfleet.cli.demo_fleet import CRASHING

        if self._has_crashed or event.client_id != CRASHING or not 30 <= (event.percentage or 0) < 80:
            return
        fake = self._fakes[CRASHING]
        *before, current = fake.stats.prompt_log
        # Events arrive a little late, so the run may have ended.
        if current.outcome is None and any(earlier.outcome == "success" for earlier in before):
            self._has_crashed = True
            fake.faults.crash = True

    async def wait_for_unblock(self, longest_s: float) -> None:
        """Waits until the last block has ended."""
        import asyncio

        ends = asyncio.Event()
        stop = self._dispatcher.on("client:unblocked_workflow", lambda _: ends.set(), None)
        try:
            async with asyncio.timeout(longest_s + 3):
                while await self._client.blocks():
                    ends.clear()
                    await ends.wait()
        except TimeoutError:
            pass
        finally:
            stop()
