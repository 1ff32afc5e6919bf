"""`comfyfleet workers`: the workers of a hub, listed or told what to do. (`comfyfleet worker` is one.)

`comfyfleet queue`: how much waits, and whether anything is leased.

`comfyfleet dead`: the jobs that failed for good.

`comfyfleet blocks`: which worker is kept from which workflow, whose, and how that is lifted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from comfyfleet.cli import completion
from comfyfleet.cli.command_help import group
from comfyfleet.cli.completion import whole_id
from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import echo


@group("workers", invoke_without_command=True)
@as_json
@settings(*TO_REACH)
@click.pass_context
def workers_command(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """List the workers of a hub, or tell one what to do.

    The program that works is `comfyfleet worker`.
    """
    if context.invoked_subcommand is not None:
        if as_json or any(flags.values()):
            raise click.UsageError(f"put the options behind `{context.invoked_subcommand}`")
        return
    _print_workers(as_json, flags)


@workers_command.command("list")
@as_json
@settings(*TO_REACH)
def list_workers(as_json: bool, **flags: Any) -> None:
    """List the workers; so does `comfyfleet workers` alone."""
    _print_workers(as_json, flags)


def _print_workers(as_json: bool, flags: dict[str, Any]) -> None:
    import time

    from comfyfleet.cli.hub_connection import ago, ask, notes_on, print_json, print_table, rate, state_of
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.answers import WorkerBody

    async def look(client: FleetClient) -> tuple[Sequence[WorkerBody], str]:
        return await client.workers(), client.url

    workers, url = ask(flags, look)
    if as_json:
        print_json(workers)
        return
    now = time.time()
    rows = [
        [
            worker.id,
            state_of(worker),
            f"{len(worker.current_jobs)} of {worker.slots}",
            str(worker.completed),
            str(worker.failed),
            rate(worker),
            f"{ago(worker.last_seen_at, now)} ago",
        ]
        for worker in workers
    ]
    headings = ["worker", "status", "runs", "done", "failed", "per h", "seen"]
    print_table(
        headings,
        rows,
        empty=f"there are no workers: start one with `comfyfleet worker --hub {url} --server http://127.0.0.1:8188`",
    )
    for note in notes_on(list(workers), now):
        echo(note)


@workers_command.command("show")
@click.argument("worker_id", shell_complete=completion.worker_ids)
@as_json
@settings(*TO_REACH)
def show_worker(worker_id: str, as_json: bool, **flags: Any) -> None:
    """One worker, with what it offers."""
    import time

    from comfyfleet.cli.hub_connection import ask, note_on, plain, print_json, state_of

    worker = ask(flags, lambda client: client.worker(worker_id))
    if as_json:
        print_json(worker)
        return
    echo(f"{worker.id}  {state_of(worker)}")
    if note := note_on(worker, time.time()):
        echo(f"  {'why':<13} {note}")
    for name in ("environment", "slots", "current_jobs", "completed", "failed", "per_hour", "disconnects"):
        echo(f"  {name:<13} {plain(getattr(worker, name))}")
    for service in worker.capabilities.services if worker.capabilities else ():
        models = "any" if service.models is None else len(service.models)
        classes = "any" if service.node_classes is None else len(service.node_classes)
        echo(f"  {service.name}: {models} models, {classes} node classes")


def _commanding(name: str, text: str, method: str, to_all: str | None = None) -> None:
    @workers_command.command(name, help=text)
    @click.argument("worker_id", required=to_all is None, shell_complete=completion.worker_ids)
    @as_json
    @settings(*TO_REACH)
    def order(worker_id: str | None, as_json: bool, is_all: bool = False, **flags: Any) -> None:
        from comfyfleet.cli.hub_connection import ask, print_json

        if is_all is (worker_id is not None):
            raise click.UsageError("name one worker, or say --all")
        if is_all:
            assert to_all is not None
            found = ask(flags, lambda client: getattr(client, to_all)())
        else:
            found = [ask(flags, lambda client: getattr(client, method)(worker_id))]
        if as_json:
            print_json(found if is_all else found[0])
            return
        for worker in found:
            echo(f"{worker.id} {worker.status.value}")
        if not found:
            echo("no worker is concerned")

    if to_all is not None:
        click.option("--all", "is_all", is_flag=True, help="Every worker of the hub.")(order)


_commanding(
    "drain",
    "Let a worker end what it runs, and leave, until it is resumed.",
    "drain_worker",
    "drain_workers",
)
_commanding("pause", "Give a worker nothing new.", "pause_worker", "pause_workers")
_commanding("refresh", "Let a worker look at once what its servers have.", "refresh_worker")
_commanding(
    "resume",
    "Give work again to a worker that was paused, drained or removed.",
    "resume_worker",
    "resume_workers",
)


@workers_command.command("remove")
@click.argument("worker_id", shell_complete=completion.worker_ids)
@as_json
@settings(*TO_REACH)
def remove(worker_id: str, as_json: bool, **flags: Any) -> None:
    """Forget a worker and its blocks; one that is there is kept out until it is resumed."""
    from comfyfleet.cli.hub_connection import ask, print_json

    ask(flags, lambda client: client.remove_worker(worker_id))
    if as_json:
        print_json({"id": worker_id, "removed": True})
    else:
        echo(f"{worker_id} removed")


@group("queue")
def queue_command() -> None:
    """Look at the queue, pause it, resume it."""


@queue_command.command("show")
@as_json
@settings(*TO_REACH)
def show_queue(as_json: bool, **flags: Any) -> None:
    """How many jobs wait, run and ended."""
    from comfyfleet.cli.hub_connection import ask, print_json, print_pairs

    stats = ask(flags, lambda client: client.stats())
    if as_json:
        print_json(stats)
        return
    told = {name: getattr(stats, name) for name in stats.__struct_fields__}
    # Of how many jobs the figures are is known, and said, for a tenant's key alone.
    print_pairs([(name.replace("_", " "), value) for name, value in told.items() if value is not None])


@queue_command.command("pause")
@as_json
@settings(*TO_REACH)
def pause(as_json: bool, **flags: Any) -> None:
    """Lease nothing until resumed. What runs goes on, and jobs are still taken."""
    _set(flags, as_json, "pause_queue")


@queue_command.command("resume")
@as_json
@settings(*TO_REACH)
def resume(as_json: bool, **flags: Any) -> None:
    """Lease again."""
    _set(flags, as_json, "resume_queue")


def _set(flags: dict[str, Any], as_json: bool, method: str) -> None:
    from comfyfleet.cli.hub_connection import ask, print_json

    queue = ask(flags, lambda client: getattr(client, method)())
    if as_json:
        print_json(queue)
    else:
        echo("the queue is paused" if queue.is_paused else "the queue runs")


@group("dead")
def dead_command() -> None:
    """The dead letter: jobs that failed for good."""


@dead_command.command("list")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@click.option("--cursor", metavar="ID", help="From this one on.")
@as_json
@settings(*TO_REACH)
def list_dead(limit: int, cursor: str | None, as_json: bool, **flags: Any) -> None:
    """List them."""
    from comfyfleet.cli.hub_connection import ask, print_json
    from comfyfleet.cli.jobs import print_jobs

    page = ask(flags, lambda client: client.dead_letter(cursor, limit))
    if as_json:
        print_json(page)
        return
    print_jobs(page.jobs, "no job failed for good")
    if page.cursor is not None:
        echo(f"there is more: --cursor {page.cursor}", err=True)


@dead_command.command("retry")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...")
@as_json
@settings(*TO_REACH)
def retry(job_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Run them again."""
    from comfyfleet.cli.hub_connection import ask, print_json
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.answers import SubmittedBody

    async def each(client: FleetClient) -> list[SubmittedBody]:
        whole = [await whole_id(client, job_id) for job_id in job_ids]
        return [await client.retry_dead(job_id) for job_id in whole]

    found = ask(flags, each)
    if as_json:
        print_json(found)
        return
    for answer in found:
        echo(f"{answer.id} {answer.status}")


@dead_command.command("purge")
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    metavar="HOURS",
    help="Only what ended so long ago; all unless given.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@settings(*TO_REACH)
def purge(older_than: float | None, yes: bool, as_json: bool, **flags: Any) -> None:
    """Forget them, oldest first. They cannot be brought back."""
    import time

    from comfyfleet.cli.hub_connection import ask, print_json
    from comfyfleet.client.client import FleetClient

    if not yes:
        # Where nobody can be asked the answer is no, not an interruption.
        is_asked = sys.stdin is not None and sys.stdin.isatty()
        if not (is_asked and click.confirm("Forget dead jobs for good?", err=True)):
            raise CommandFailed("nothing was forgotten; --yes does it without a question")
    before = None if older_than is None else time.time() - older_than * 3600

    async def all_of_them(client: FleetClient) -> int:
        purged = 0
        while count := await client.purge_dead(before, 10_000):
            purged += count
        return purged

    purged = ask(flags, all_of_them)
    if as_json:
        print_json({"purged": purged})
    else:
        echo(f"{purged} forgotten")


@group("blocks", invoke_without_command=True)
@as_json
@settings(*TO_REACH)
@click.pass_context
def blocks_command(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """List what is blocked, or lift a block.

    The worker `*` stands for every worker: servers died while they ran that workflow, and it is refused to its tenant
    until it is lifted here. All other blocks end by themselves.
    """
    if context.invoked_subcommand is not None:
        if as_json or any(flags.values()):
            raise click.UsageError(f"put the options behind `{context.invoked_subcommand}`")
        return
    _print_blocks(as_json, flags)


@blocks_command.command("list")
@as_json
@settings(*TO_REACH)
def list_blocks(as_json: bool, **flags: Any) -> None:
    """List the blocks; so does `comfyfleet blocks` alone."""
    _print_blocks(as_json, flags)


def _print_blocks(as_json: bool, flags: dict[str, Any]) -> None:
    import time

    from comfyfleet.cli.hub_connection import ask, print_json, print_table

    blocks = ask(flags, lambda client: client.blocks())
    if as_json:
        print_json(blocks)
        return
    now = time.time()
    rows = [
        [
            block.worker_id,
            block.target,
            "one job" if block.workflow_hash is None else block.tenant or "everybody",
            f"{block.reason}: lacks {', '.join(block.missing)}" if block.missing else block.reason,
            "until lifted" if block.blocked_until is None else f"{max(0.0, block.blocked_until - now):.0f} s",
        ]
        for block in blocks
    ]
    print_table(["worker", "target", "counts for", "reason", "left"], rows, empty="nothing is blocked")


@blocks_command.command("lift")
@click.argument("worker_id", metavar="WORKER")
@click.argument("target")
@as_json
@settings(*TO_REACH)
def lift(worker_id: str, target: str, as_json: bool, **flags: Any) -> None:
    """Lift a block by hand, as the list names it. A workflow hash alone lifts it for every tenant.

    Quote the worker that stands for all: comfyfleet blocks lift '*' TARGET
    """
    from comfyfleet.cli.hub_connection import ask, print_json

    ask(flags, lambda client: client.lift_block(worker_id, target))
    if as_json:
        print_json({"worker_id": worker_id, "target": target, "lifted": True})
        return
    echo(f"lifted {target} for {'every worker' if worker_id == '*' else worker_id}")
