"""`comfyfleet job`: one job, looked at or told what to do.

`comfyfleet jobs`: which jobs a hub has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.types import StringParamType

from comfyfleet.cli import command_help, completion
from comfyfleet.cli.command_help import group
from comfyfleet.cli.completion import ask_about, whole_id
from comfyfleet.cli.exit_codes import OUT_HELP, OutputParam, make_folder
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

    from comfyfleet.client.client import FleetClient
    from comfyfleet.pool.output_files import OutputNames
    from comfyfleet.wire.answers import JobBody


@group("job")
def job_command() -> None:
    """Look at a job, or tell it what to do."""


@job_command.command("show")
@click.argument("job_id", shell_complete=completion.job_ids)
@as_json
@settings(*TO_REACH)
def show(job_id: str, as_json: bool, **flags: Any) -> None:
    """The state of a job, its attempts and its outputs."""
    import time

    from comfyfleet.cli.hub_connection import ago, plain, print_json, print_table
    from comfyfleet.wire.answers import JobDetails, ResultBody
    from comfyfleet.wire.bodies import IDEMPOTENCY_PREFIX

    async def look(client: FleetClient, job_id: str) -> tuple[JobDetails, ResultBody]:
        job = await client.get(job_id)
        is_readable = job.unreadable is None
        return job, await client.result(job_id) if is_readable else ResultBody(job.id, job.status)

    job, ended = ask_about(flags, job_id, look)
    if as_json:
        print_json({**plain(job), "result": plain(ended.result)})
        return
    now = time.time()
    # Of a submission that may be repeated: nobody chose it.
    is_made_up = (job.reference or "").startswith(IDEMPOTENCY_PREFIX)
    echo(f"{job.id}  {job.status}" + (", paused" if job.is_paused else ""))
    told = {
        "workflow": job.workflow_hash,
        "tenant": job.tenant,
        "priority": job.priority,
        "reference": None if is_made_up else job.reference,
        "worker": job.worker_id,
        "submitted": f"{ago(job.submitted_at, now)} ago",
        "metadata": job.metadata,
        "cancelled": job.cancel_reason or None,
        "unreadable": job.unreadable,
    }
    for name, value in told.items():
        if value is not None:
            echo(f"  {name:<10} {value}")
    if job.error is not None:
        echo(f"  {'error':<10} {job.error.kind.value}: {job.error.message}")
    if job.history:
        rows = [
            [str(each.lease), each.worker_id, each.outcome, "" if each.error is None else each.error.message]
            for each in job.history
        ]
        print_table(["lease", "worker", "outcome", "error"], rows, empty="")
    for file in ended.result.files if ended.result else ():
        echo(f"  {file.filename}  {file.url or ''}")


@job_command.command("receipt")
@click.argument("job_id", shell_complete=completion.job_ids)
@as_json
@settings(*TO_REACH)
def receipt(job_id: str, as_json: bool, **flags: Any) -> None:
    """What a job was held for and what it cost, round by round."""
    from comfyfleet.cli.hub_connection import print_json, print_table
    from comfyfleet.cli.tenants import price_text

    found = ask_about(flags, job_id, lambda client, whole: client.receipt(whole))
    if as_json:
        print_json(found)
        return
    rows = [
        [
            str(each.round),
            each.status,
            price_text(each.price),
            str(each.held),
            str(each.consumed),
            str(each.returned),
            each.worker_id or "–",
            f"{each.gpu_s:.1f}",
            each.verified_by or "–",
        ]
        for each in found.rounds
    ]
    heads = ["round", "status", "price", "held", "consumed", "returned", "worker", "GPU s", "verified by"]
    print_table(heads, rows, empty=f"jobs of tenant {found.tenant} cost no credits")


@job_command.command("watch")
@click.argument("job_id", shell_complete=completion.job_ids)
@click.option(
    "-o",
    "--out",
    type=OutputParam(),
    metavar="FOLDER",
    help=f"Download the outputs. {OUT_HELP}",
)
@as_json
@settings(*TO_REACH)
def watch(job_id: str, out: OutputNames | None, as_json: bool, **flags: Any) -> None:
    """Follow a job to its end: 0 if it completed, 1 if not."""
    from comfyfleet.cli.watch import watch_jobs

    if out is not None:
        make_folder(out.folder)
    ask_about(flags, job_id, lambda client, whole: watch_jobs(client, [whole], out, as_json))


@job_command.command("cancel")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...", shell_complete=completion.job_ids)
@click.option("--reason", default="", metavar="TEXT", help="Why: told to the worker, and kept with the job.")
@as_json
@settings(*TO_REACH)
def cancel(job_ids: tuple[str, ...], reason: str, as_json: bool, **flags: Any) -> None:
    """Cancel jobs: at once while they wait, else their workers are told."""
    from comfyfleet.cli.hub_connection import ask, print_json
    from comfyfleet.wire.answers import CancelBody

    async def each(client: FleetClient) -> list[CancelBody]:
        # All are known before the first is cancelled.
        whole = [await whole_id(client, job_id) for job_id in job_ids]
        return [await client.cancel(job_id, reason) for job_id in whole]

    found = ask(flags, each)
    if as_json:
        print_json(found)
        return
    for answer in found:
        state = (
            "is being cancelled" if answer.cancel_requested and answer.status == "leased" else answer.status
        )
        echo(f"{answer.id} {state}")


@job_command.command("delete")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...", shell_complete=completion.job_ids)
@as_json
@settings(*TO_REACH)
def delete(job_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Forget jobs that have ended, with payload and result; cancel others first. Files stay."""
    from comfyfleet.cli.hub_connection import ask, print_json

    async def each(client: FleetClient) -> list[str]:
        whole = [await whole_id(client, job_id) for job_id in job_ids]
        for job_id in whole:
            await client.delete(job_id)
            if not as_json:
                echo(f"{job_id} deleted")
        return whole

    found = ask(flags, each)
    if as_json:
        print_json({"deleted": found})


@job_command.command("retry")
@click.argument("job_id", shell_complete=completion.job_ids)
@as_json
@settings(*TO_REACH)
def retry(job_id: str, as_json: bool, **flags: Any) -> None:
    """Run a job again: one that failed or was cancelled, or one that runs, which is stopped first."""
    from comfyfleet.cli.hub_connection import print_json

    answer = ask_about(flags, job_id, lambda client, whole: client.retry(whole))
    if as_json:
        print_json(answer)
    else:
        echo(
            f"{answer.id} {'is being stopped, to run again' if answer.status == 'leased' else answer.status}"
        )


@job_command.command("explain")
@click.argument("job_id", shell_complete=completion.job_ids)
@as_json
@settings(*TO_REACH)
def explain(job_id: str, as_json: bool, **flags: Any) -> None:
    """Why a job is not running, or what became of it."""
    from comfyfleet.cli.hub_connection import print_json
    from comfyfleet.model.dispatch import Phase

    answer = ask_about(flags, job_id, lambda client, whole: client.explain(whole))
    if as_json:
        print_json(answer)
        return
    echo(answer.summary)
    if answer.phase in (Phase.FAILED, Phase.CANCELLED):
        echo(f"  again: comfyfleet job retry {answer.job_id}")
    if answer.position is not None:
        echo(f"  its place in line: {answer.position}")
    for worker in answer.workers:
        others = f" ({worker.count} of them)" if worker.count > 1 else ""
        echo(f"  {worker.worker_id}{others}: {'; '.join(worker.reasons) or worker.reason}")


def _changing(name: str, text: str, method: str) -> None:
    @job_command.command(name, help=text)
    @click.argument("job_id", shell_complete=completion.job_ids)
    @as_json
    @settings(*TO_REACH)
    def change(job_id: str, as_json: bool, **flags: Any) -> None:
        from comfyfleet.cli.hub_connection import print_json

        job = ask_about(flags, job_id, lambda client, whole: getattr(client, method)(whole))
        if as_json:
            print_json(job)
        else:
            state = "paused" if job.is_paused else job.status
            echo(f"{job.id} {'is being stopped, to be paused' if job.pause_requested else state}")


_changing("pause", "Keep a job from running; it keeps its place. One that runs is stopped first.", "pause")
_changing("resume", "Let a paused job run again.", "resume")


@job_command.command("priority")
@click.argument("job_id", shell_complete=completion.job_ids)
@click.argument("priority", type=click.IntRange(-1000, 1000))
@as_json
@settings(*TO_REACH)
def priority(job_id: str, priority: int, as_json: bool, **flags: Any) -> None:
    """Change the priority of a waiting job."""
    from comfyfleet.cli.hub_connection import print_json

    job = ask_about(flags, job_id, lambda client, whole: client.set_priority(whole, priority))
    if as_json:
        print_json(job)
    else:
        echo(f"{job.id} has priority {job.priority}")


class StatusParam(StringParamType):
    """A status in any of the words that the hub understands."""

    name = "status"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from comfyfleet.model.errors import Refusal
        from comfyfleet.wire.status_names import parse_status, status_name

        try:
            return status_name(parse_status(value))
        except Refusal as error:
            self.fail(error.message, param, ctx)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from comfyfleet.wire.status_names import KNOWN_STATUSES

        return [CompletionItem(each) for each in KNOWN_STATUSES if each.startswith(incomplete)]


_SHOWN = 60
"""Characters of an error in a list."""


@command_help.command("jobs")
@click.option(
    "--status",
    type=StatusParam(),
    help="Only those: queued, leased (or running), completed, failed, cancelled.",
)
@click.option(
    "--since",
    type=click.FloatRange(0, min_open=True),
    metavar="HOURS",
    help="Only those submitted since then.",
)
@click.option("--tenant", metavar="NAME", help="Only this tenant's.")
@click.option("--workflow", "workflow_hash", metavar="HASH", help="Only those of this workflow hash.")
@click.option(
    "--metadata", "labels", multiple=True, metavar="NAME=VALUE", help="Only those labelled so. Repeatable."
)
@click.option("--unrunnable", is_flag=True, help="Only those that wait though no worker can run them.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, …"
)
@click.option("--cursor", metavar="ID", help="… from this one on.")
@click.option(
    "--order",
    type=click.Choice(["newest", "oldest"]),
    default="newest",
    show_default=True,
    help="Which come first.",
)
@as_json
@settings(*TO_REACH)
def jobs_command(
    status: str | None,
    since: float | None,
    tenant: str | None,
    workflow_hash: str | None,
    labels: tuple[str, ...],
    unrunnable: bool,
    limit: int,
    cursor: str | None,
    order: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """List jobs by submission, the newest first."""
    import time

    from comfyfleet.cli.hub_connection import ask, print_json
    from comfyfleet.cli.submit import label

    wanted = {
        "status": status,
        "tenant": tenant,
        "workflow_hash": workflow_hash,
        "submitted_after": None if since is None else time.time() - since * 3600,
        "metadata": dict(map(label, labels)),
        "unrunnable": unrunnable,
        "order": order,
    }
    jobs, after = ask(flags, lambda client: _list(client, wanted, limit, cursor))
    if as_json:
        print_json({"jobs": jobs, "cursor": after})
        return
    print_jobs(jobs, "there are no such jobs")
    if after is not None:
        echo(f"there is more: --cursor {after}", err=True)


async def _list(
    client: FleetClient, wanted: dict[str, Any], limit: int, cursor: str | None
) -> tuple[list[JobBody], str | None]:
    found: list[JobBody] = []
    while True:
        page = await client.jobs(**wanted, cursor=cursor, limit=min(1_000, limit - len(found)))
        found += page.jobs
        cursor = page.cursor
        if cursor is None or len(found) >= limit:
            return found, cursor


def print_jobs(jobs: Sequence[JobBody], empty: str) -> None:
    import time

    from comfyfleet.cli.completion import short_ids
    from comfyfleet.cli.hub_connection import ago, print_table

    now = time.time()
    rows = [
        [
            job.id,
            job.status,
            str(job.priority),
            job.worker_id or "–",
            ago(job.submitted_at, now),
            "" if job.error is None else f"{job.error.kind.value}: {_beginning(job.error.message)}",
        ]
        for job in jobs
    ]
    short = short_ids(job.id for job in jobs)
    print_table(["job", "status", "prio", "worker", "age", "error"], rows, empty=empty, short=short)


def _beginning(message: str) -> str:
    """On one line; `job show` has the rest."""
    line = " ".join(message.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
