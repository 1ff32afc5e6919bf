"""`comfyfleet jobs`, `job`, `dead` and `files`: the jobs of a hub, one job, failed jobs, and files."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click
from click.types import StringParamType

from comfyfleet.cli.command import (
    command,
    cursor_option,
    group,
    hub_options,
    job_argument,
    jobs_argument,
    limit_option,
    of_job,
    of_jobs,
    report,
    report_list,
    short_ids,
    whole_id,
)
from comfyfleet.cli.estimates import expectation
from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.options import OUT_HELP, DurationParam, OutputParam, output_folder
from comfyfleet.cli.output import ago, echo, plain, print_json, print_pairs, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

    from comfyfleet.client.client import FleetClient
    from comfyfleet.model.calls import Explanation
    from comfyfleet.pool.output_files import OutputNames
    from comfyfleet.wire.answers import CancelBody, JobBody, JobDetails, ResultBody
    from comfyfleet.wire.credits import ReceiptView
    from comfyfleet.wire.files import FileView

_SHORT_ERROR = 60
"""Characters of an error in a list; `job show` prints all of it."""
_STATUS_SYNONYMS = {"waiting": "queued", "done": "completed"}
"""Words that tables of this program print. The hub does not know them as statuses."""
_STATUSES = "queued (or waiting), leased (or running), completed (or done), failed or cancelled"


@group("job")
def job_command() -> None:
    """Show or change one job."""


@job_command.command("show")
@job_argument
@hub_options
def show(job_id: str, **flags: Any) -> None:
    """Show the state of a job, its attempts and its outputs."""
    from comfyfleet.wire.answers import ResultBody

    async def look(client: FleetClient, job_id: str) -> tuple[JobDetails, ResultBody]:
        job = await client.get(job_id)
        is_readable = job.unreadable is None
        return job, await client.result(job_id) if is_readable else ResultBody(job.id, job.status)

    report(
        flags,
        of_job(job_id, look),
        _print_job,
        json=lambda found: {**plain(found[0]), "result": plain(found[1].result)},
    )


def _print_job(found: tuple[JobDetails, ResultBody]) -> None:
    from comfyfleet.wire.bodies import IDEMPOTENCY_PREFIX

    job, ended = found
    # A client makes such a reference itself to repeat a submission safely; the user did not choose it.
    is_generated = (job.reference or "").startswith(IDEMPOTENCY_PREFIX)
    echo(f"{job.id}  {job.status}" + (", paused" if job.is_paused else ""))
    details = {
        "workflow": job.workflow_hash,
        "tenant": job.tenant,
        "priority": job.priority,
        "reference": None if is_generated else job.reference,
        "worker": _worker(job),
        "submitted": f"{ago(job.submitted_at, time.time())} ago",
        "expected": expectation(job, time.time()) or None,
        "metadata": job.metadata,
        "cancelled": job.cancel_reason or None,
        "unreadable": job.unreadable,
        "error": None if job.error is None else f"{job.error.kind.value}: {job.error.message}",
    }
    print_pairs({name: value for name, value in details.items() if value is not None}, indent="  ")
    if job.history:
        rows = [
            [each.lease, each.worker_id, each.outcome, "" if each.error is None else each.error.message]
            for each in job.history
        ]
        print_table(["lease", "worker", "outcome", "error"], rows, empty="")
    for file in ended.result.files if ended.result else ():
        echo(f"  {file.filename}  {file.url or ''}")


@job_command.command("receipt")
@job_argument
@hub_options
def receipt(job_id: str, **flags: Any) -> None:
    """Show the credits that a job held and cost, for each retry."""
    report(flags, of_job(job_id, lambda client, whole: client.receipt(whole)), _print_receipt)


def _print_receipt(found: ReceiptView) -> None:
    from comfyfleet.cli.tenants import price_text

    rows = [
        [
            each.round,
            each.status,
            price_text(each.price),
            each.held,
            each.consumed,
            each.returned,
            each.worker_id,
            f"{each.gpu_s:.1f}",
            each.verified_by,
        ]
        for each in found.rounds
    ]
    headings = ["round", "status", "price", "held", "consumed", "returned", "worker", "GPU s", "verified by"]
    print_table(headings, rows, empty=f"Jobs of tenant {found.tenant} cost no credits.")


@job_command.command("watch")
@jobs_argument
@click.option("-o", "--out", type=OutputParam(), metavar="FOLDER", help=f"Download the outputs. {OUT_HELP}")
@hub_options
def watch(job_ids: tuple[str, ...], out: OutputNames | None, as_json: bool, **flags: Any) -> None:
    """Follow jobs to their end.

    Exit code 0 means that all completed, 3 that a workflow is not valid or lacks an input file, 1 that a job failed
    otherwise or was cancelled.
    """
    from comfyfleet.cli.hub_connection import ask
    from comfyfleet.cli.watch import watch_jobs

    async def follow(client: FleetClient) -> None:
        whole = [await whole_id(client, job_id) for job_id in job_ids]
        await watch_jobs(client, list(dict.fromkeys(whole)), out, as_json)

    with output_folder(None if out is None else out.folder):
        ask(flags, follow)


@job_command.command("cancel")
@jobs_argument
@click.option("--reason", default="", metavar="TEXT", help="Why. The worker is told, and the job keeps it.")
@hub_options
def cancel(job_ids: tuple[str, ...], reason: str, **flags: Any) -> None:
    """Cancel jobs. A waiting job ends at once; a running one when its worker has stopped it."""

    def show(found: list[CancelBody]) -> None:
        for answer in found:
            is_pending = answer.cancel_requested and answer.status == "leased"
            echo(f"{answer.id} {'is being cancelled' if is_pending else answer.status}")

    report(flags, of_jobs(job_ids, lambda client, whole: client.cancel(whole, reason)), show)


@job_command.command("delete")
@jobs_argument
@hub_options
def delete(job_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Delete ended jobs with payload and result. Cancel other jobs first. Files stay."""
    from comfyfleet.cli.hub_connection import ask

    async def remove(client: FleetClient, job_id: str) -> str:
        await client.delete(job_id)
        if not as_json:
            echo(f"{job_id} deleted")
        return job_id

    deleted = ask(flags, of_jobs(job_ids, remove))
    if as_json:
        print_json({"deleted": deleted})


@job_command.command("retry")
@job_argument
@hub_options
def retry(job_id: str, **flags: Any) -> None:
    """Run a failed or cancelled job again. A running job is stopped first."""
    report(
        flags,
        of_job(job_id, lambda client, whole: client.retry(whole)),
        lambda job: echo(
            f"{job.id} {'is being stopped, then runs again' if job.status == 'leased' else job.status}"
        ),
    )


@job_command.command("explain")
@job_argument
@hub_options
def explain(job_id: str, **flags: Any) -> None:
    """Explain why a job does not run, or how it ended."""
    report(flags, of_job(job_id, lambda client, whole: client.explain(whole)), _print_explanation)


def _print_explanation(found: Explanation) -> None:
    from comfyfleet.model.dispatch import Phase

    echo(found.summary)
    if found.phase in (Phase.FAILED, Phase.CANCELLED):
        echo(f"  to run it again: comfyfleet job retry {found.job_id}")
    if found.position is not None:
        echo(f"  jobs ahead of it: {found.position}")
    for worker in found.workers:
        others = f" ({worker.count} of them)" if worker.count > 1 else ""
        echo(f"  {worker.worker_id}{others}: {'; '.join(worker.reasons) or worker.reason}")


def _add_change(name: str, text: str, method: str) -> None:
    def show(job: JobDetails) -> None:
        state = "paused" if job.is_paused else job.status
        echo(f"{job.id} {'is being stopped, then pauses' if job.pause_requested else state}")

    @job_command.command(name, help=text)
    @job_argument
    @hub_options
    def change(job_id: str, **flags: Any) -> None:
        report(flags, of_job(job_id, lambda client, whole: getattr(client, method)(whole)), show)


_add_change("pause", "Pause a job. It keeps its place; a running job is stopped first.", "pause")
_add_change("resume", "Let a paused job run again.", "resume")


@job_command.command("priority")
@job_argument
@click.argument("priority", type=click.IntRange(-1000, 1000))
@hub_options
def priority(job_id: str, priority: int, **flags: Any) -> None:
    """Change the priority of a waiting job."""
    report(
        flags,
        of_job(job_id, lambda client, whole: client.set_priority(whole, priority)),
        lambda job: echo(f"{job.id} has priority {job.priority}"),
    )


class StatusParam(StringParamType):
    """A status in any spelling that the hub or the tables of this program use."""

    name = "status"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from comfyfleet.model.errors import Refusal
        from comfyfleet.wire.status_names import parse_status, status_name

        try:
            return status_name(parse_status(_STATUS_SYNONYMS.get(str(value).lower(), value)))
        except Refusal:
            self.fail(f"{value!r} is not a status. Use {_STATUSES}.", param, ctx)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(each) for each in _statuses() if each.startswith(incomplete)]


def _statuses() -> list[str]:
    from comfyfleet.wire.status_names import KNOWN_STATUSES

    return sorted([*KNOWN_STATUSES, *_STATUS_SYNONYMS])


@command("jobs")
@click.option(
    "--status",
    type=StatusParam(),
    help=f"Only jobs that are {_STATUSES}.",
)
@click.option(
    "--since",
    "since_s",
    type=DurationParam(),
    metavar="TIME",
    help="Only jobs submitted in the last 30m, 12h, 7d … A number is hours.",
)
@click.option("--tenant", metavar="NAME", help="Only jobs of this tenant.")
@click.option("--workflow", "workflow_hash", metavar="HASH", help="Only jobs with this workflow hash.")
@click.option(
    "--metadata",
    "labels",
    multiple=True,
    metavar="NAME=VALUE",
    help="Only jobs with this metadata. Repeatable.",
)
@click.option("--unrunnable", is_flag=True, help="Only waiting jobs that no online worker can run.")
@limit_option(50)
@cursor_option
@click.option(
    "--order",
    type=click.Choice(["newest", "oldest"]),
    default="newest",
    show_default=True,
    help="Which jobs come first.",
)
@hub_options
def jobs_command(
    since_s: float | None, labels: tuple[str, ...], limit: int, cursor: str | None, **flags: Any
) -> None:
    """List jobs, the newest first."""
    from comfyfleet.cli.submit import label

    wanted = {name: flags.pop(name) for name in ("status", "tenant", "workflow_hash", "unrunnable", "order")}
    wanted["submitted_after"] = None if since_s is None else time.time() - since_s
    wanted["metadata"] = dict(map(label, labels))
    is_filtered = cursor is not None or any(value for name, value in wanted.items() if name != "order")

    report_list(
        flags,
        "jobs",
        lambda client, after, size: client.jobs(**wanted, cursor=after, limit=size),
        lambda jobs: print_jobs(jobs, "No job matches." if is_filtered else "There are no jobs."),
        limit=limit,
        cursor=cursor,
    )


def print_jobs(jobs: Sequence[JobBody], empty: str) -> None:
    now = time.time()
    # Only open jobs have it.
    has_expected = any(job.estimate is not None for job in jobs)
    rows = [
        [
            job.id,
            job.status,
            job.priority,
            _worker(job),
            ago(job.submitted_at, now),
            *([expectation(job, now)] if has_expected else []),
            "" if job.error is None else f"{job.error.kind.value}: {_shortened(job.error.message)}",
        ]
        for job in jobs
    ]
    short = short_ids(job.id for job in jobs)
    expected = ["expected"] if has_expected else []
    headings = ["job", "status", "prio", "worker", "age", *expected, "error"]
    print_table(headings, rows, empty=empty, short=short)


def _worker(job: JobBody) -> str | None:
    """The worker that runs the job or ran it last. None if the job waits: its last worker does not run it now."""
    return None if job.status == "queued" else job.worker_id


def _shortened(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _SHORT_ERROR else f"{line[: _SHORT_ERROR - 1]}…"


@group("dead")
def dead_command() -> None:
    """Show, retry or delete the dead letter: jobs that failed for good."""


@dead_command.command("list")
@limit_option(50, 1000)
@cursor_option
@hub_options
def list_dead(limit: int, cursor: str | None, **flags: Any) -> None:
    """List the jobs that failed for good."""
    report_list(
        flags,
        "jobs",
        lambda client, after, size: client.dead_letter(after, size),
        lambda jobs: print_jobs(jobs, "No job failed for good."),
        limit=limit,
        cursor=cursor,
    )


@dead_command.command("retry")
@jobs_argument
@hub_options
def retry_dead(job_ids: tuple[str, ...], **flags: Any) -> None:
    """Run failed jobs again."""
    report(
        flags,
        of_jobs(job_ids, lambda client, whole: client.retry_dead(whole)),
        lambda found: echo("\n".join(f"{answer.id} {answer.status}" for answer in found)),
    )


@dead_command.command("purge")
@click.option(
    "--older-than",
    "age_s",
    type=DurationParam(may_be_zero=True),
    metavar="TIME",
    help="Only jobs that ended at least 12h, 7d … ago. A number is hours. Default: all.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@hub_options
def purge(age_s: float | None, yes: bool, **flags: Any) -> None:
    """Delete failed jobs for good, the oldest first."""
    if not yes:
        # A script cannot answer: that means no, and is not an interruption.
        can_answer = sys.stdin is not None and sys.stdin.isatty()
        if not (can_answer and click.confirm("Delete the failed jobs for good?", err=True)):
            raise CommandFailed("nothing was deleted. Add --yes to delete without a question.")
    before = None if age_s is None else time.time() - age_s

    async def purge_all(client: FleetClient) -> int:
        purged = 0
        while count := await client.purge_dead(before, 10_000):
            purged += count
        return purged

    report(flags, purge_all, lambda purged: echo(f"{purged} deleted"), json=lambda purged: {"purged": purged})


@group("files")
def files_command() -> None:
    """List and delete the files that a hub keeps."""


@files_command.command("list")
@click.option(
    "--kind",
    type=click.Choice(["input", "output", "thumbnail"]),
    help="Only uploads, only outputs of jobs, or only thumbnails. Default: all but thumbnails.",
)
@click.option("--job", "job_id", metavar="ID", help="Only outputs of this job.")
@click.option("--tenant", metavar="NAME", help="Only files of this tenant.")
@limit_option(50)
@cursor_option
@hub_options
def list_files(limit: int, cursor: str | None, **flags: Any) -> None:
    """List files, the oldest first."""
    wanted = {name: flags.pop(name) for name in ("kind", "job_id", "tenant")}
    report_list(
        flags,
        "files",
        lambda client, after, size: client.files(**wanted, cursor=after, limit=size),
        _print_files,
        limit=limit,
        cursor=cursor,
    )


def _print_files(files: list[FileView]) -> None:
    now = time.time()
    rows = [
        [
            file.id,
            file.kind,
            file.size,
            "complete" if file.is_complete else "expected",
            f"{ago(file.created_at, now)} ago",
            file.name,
            file.job_id,
        ]
        for file in files
    ]
    print_table(["file", "kind", "bytes", "state", "made", "name", "of job"], rows, empty="No file matches.")


@files_command.command("delete")
@click.argument("file_ids", nargs=-1, required=True, metavar="FILE...")
@hub_options
def delete_files(file_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Delete files and their thumbnails. The hub refuses a file that an open job needs."""
    from comfyfleet.cli.hub_connection import ask

    async def remove(client: FleetClient) -> None:
        for file_id in file_ids:
            await client.delete_file(file_id)
            if not as_json:
                echo(f"{file_id} deleted")

    ask(flags, remove)
    if as_json:
        print_json({"deleted": file_ids})
