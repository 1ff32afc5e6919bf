"""`comfyfleet job`: one job, looked at or told what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli import values
from comfyfleet.cli.endings import OUT_HELP, Out, make_folder
from comfyfleet.cli.helping import group
from comfyfleet.cli.job_ids import ask_about, whole_id
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo

if TYPE_CHECKING:
    from comfyfleet.pool.saving import OutputPlace


@group("job")
def command() -> None:
    """Look at a job, or tell it what to do."""


@command.command("show")
@click.argument("job_id", shell_complete=values.job_ids)
@as_json
@settings(*TO_REACH)
def show(job_id: str, as_json: bool, **flags: Any) -> None:
    """The state of a job, its attempts and its outputs."""
    import time

    from comfyfleet.cli.reach import ago, plain, print_json, print_table
    from comfyfleet.client.fleet import FleetClient
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


@command.command("receipt")
@click.argument("job_id", shell_complete=values.job_ids)
@as_json
@settings(*TO_REACH)
def receipt(job_id: str, as_json: bool, **flags: Any) -> None:
    """What a job was held for and what it cost, round by round."""
    from comfyfleet.cli.prices import price_text
    from comfyfleet.cli.reach import print_json, print_table

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


@command.command("watch")
@click.argument("job_id", shell_complete=values.job_ids)
@click.option(
    "-o",
    "--out",
    type=Out(),
    metavar="FOLDER",
    help=f"Download the outputs. {OUT_HELP}",
)
@as_json
@settings(*TO_REACH)
def watch(job_id: str, out: OutputPlace | None, as_json: bool, **flags: Any) -> None:
    """Follow a job to its end: 0 if it completed, 1 if not."""
    from comfyfleet.cli.watching import watch_jobs

    if out is not None:
        make_folder(out.folder)
    ask_about(flags, job_id, lambda client, whole: watch_jobs(client, [whole], out, as_json))


@command.command("cancel")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...", shell_complete=values.job_ids)
@click.option("--reason", default="", metavar="TEXT", help="Why: told to the worker, and kept with the job.")
@as_json
@settings(*TO_REACH)
def cancel(job_ids: tuple[str, ...], reason: str, as_json: bool, **flags: Any) -> None:
    """Cancel jobs: at once while they wait, else their workers are told."""
    from comfyfleet.cli.reach import ask, print_json
    from comfyfleet.client.fleet import FleetClient
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


@command.command("delete")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...", shell_complete=values.job_ids)
@as_json
@settings(*TO_REACH)
def delete(job_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Forget jobs that have ended, with payload and result; cancel others first. Files stay."""
    from comfyfleet.cli.reach import ask, print_json
    from comfyfleet.client.fleet import FleetClient

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


@command.command("retry")
@click.argument("job_id", shell_complete=values.job_ids)
@as_json
@settings(*TO_REACH)
def retry(job_id: str, as_json: bool, **flags: Any) -> None:
    """Run a job again: one that failed or was cancelled, or one that runs, which is stopped first."""
    from comfyfleet.cli.reach import print_json

    answer = ask_about(flags, job_id, lambda client, whole: client.retry(whole))
    if as_json:
        print_json(answer)
    else:
        echo(
            f"{answer.id} {'is being stopped, to run again' if answer.status == 'leased' else answer.status}"
        )


@command.command("explain")
@click.argument("job_id", shell_complete=values.job_ids)
@as_json
@settings(*TO_REACH)
def explain(job_id: str, as_json: bool, **flags: Any) -> None:
    """Why a job is not running, or what became of it."""
    from comfyfleet.cli.reach import print_json
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
    @command.command(name, help=text)
    @click.argument("job_id", shell_complete=values.job_ids)
    @as_json
    @settings(*TO_REACH)
    def change(job_id: str, as_json: bool, **flags: Any) -> None:
        from comfyfleet.cli.reach import print_json

        job = ask_about(flags, job_id, lambda client, whole: getattr(client, method)(whole))
        if as_json:
            print_json(job)
        else:
            state = "paused" if job.is_paused else job.status
            echo(f"{job.id} {'is being stopped, to be paused' if job.pause_requested else state}")


_changing("pause", "Keep a job from running; it keeps its place. One that runs is stopped first.", "pause")
_changing("resume", "Let a paused job run again.", "resume")


@command.command("priority")
@click.argument("job_id", shell_complete=values.job_ids)
@click.argument("priority", type=click.IntRange(-1000, 1000))
@as_json
@settings(*TO_REACH)
def priority(job_id: str, priority: int, as_json: bool, **flags: Any) -> None:
    """Change the priority of a waiting job."""
    from comfyfleet.cli.reach import print_json

    job = ask_about(flags, job_id, lambda client, whole: client.set_priority(whole, priority))
    if as_json:
        print_json(job)
    else:
        echo(f"{job.id} has priority {job.priority}")
