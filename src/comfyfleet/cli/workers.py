"""`comfyfleet workers`: the workers of a hub, listed or told what to do. (`comfyfleet worker` is one.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from comfyfleet.cli import values
from comfyfleet.cli.helping import group
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo


@group("workers", invoke_without_command=True)
@as_json
@settings(*TO_REACH)
@click.pass_context
def command(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """List the workers of a hub, or tell one what to do.

    The program that works is `comfyfleet worker`.
    """
    if context.invoked_subcommand is not None:
        if as_json or any(flags.values()):
            raise click.UsageError(f"put the options behind `{context.invoked_subcommand}`")
        return
    _list(as_json, flags)


@command.command("list")
@as_json
@settings(*TO_REACH)
def list_(as_json: bool, **flags: Any) -> None:
    """List the workers; so does `comfyfleet workers` alone."""
    _list(as_json, flags)


def _list(as_json: bool, flags: dict[str, Any]) -> None:
    import time

    from comfyfleet.cli.reach import ago, ask, print_json, print_table, rate, state_of
    from comfyfleet.cli.worker_notes import notes_on
    from comfyfleet.client.fleet import FleetClient
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


@command.command("show")
@click.argument("worker_id", shell_complete=values.worker_ids)
@as_json
@settings(*TO_REACH)
def show(worker_id: str, as_json: bool, **flags: Any) -> None:
    """One worker, with what it offers."""
    import time

    from comfyfleet.cli.reach import ask, plain, print_json, state_of
    from comfyfleet.cli.worker_notes import note_on

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
    @command.command(name, help=text)
    @click.argument("worker_id", required=to_all is None, shell_complete=values.worker_ids)
    @as_json
    @settings(*TO_REACH)
    def order(worker_id: str | None, as_json: bool, is_all: bool = False, **flags: Any) -> None:
        from comfyfleet.cli.reach import ask, print_json

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


@command.command("remove")
@click.argument("worker_id", shell_complete=values.worker_ids)
@as_json
@settings(*TO_REACH)
def remove(worker_id: str, as_json: bool, **flags: Any) -> None:
    """Forget a worker and its blocks; one that is there is kept out until it is resumed."""
    from comfyfleet.cli.reach import ask, print_json

    ask(flags, lambda client: client.remove_worker(worker_id))
    if as_json:
        print_json({"id": worker_id, "removed": True})
    else:
        echo(f"{worker_id} removed")
