"""`comfyfleet submit`: jobs for a hub, and with --watch their progress and their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from comfyfleet.cli import helping
from comfyfleet.cli.asking import asked_for, asking
from comfyfleet.cli.endings import OUT_HELP, CommandFailed, ExitCode, Out, about, make_folder
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo

if TYPE_CHECKING:
    from comfyfleet.cli.run import Draft
    from comfyfleet.client.fleet import FleetClient
    from comfyfleet.pool.saving import OutputPlace


@helping.command("submit")
@click.argument("workflows", type=click.File("rb"), nargs=-1, required=True, metavar="WORKFLOW...")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NODE.INPUT=VALUE",
    help="Change an input, such as 6.text='a cat' or 3.seed=-1 (a random one). Repeatable.",
)
@click.option(
    "--attach",
    "attachments",
    multiple=True,
    metavar="NODE.INPUT=FILE",
    help="Upload a file and give it to an input, such as 10.image=photo.png. Repeatable.",
)
@click.option(
    "--take",
    "outputs",
    multiple=True,
    metavar="NODE.INPUT=JOB[/OUTPUT]",
    help="Wait for a job and give what it left to an input, such as 10.image=JOB/9. Repeatable.",
)
@click.option(
    "--count", type=click.IntRange(1), default=1, metavar="N", help="So many jobs of each workflow."
)
@click.option(
    "--metadata",
    "labels",
    multiple=True,
    metavar="NAME=VALUE",
    help="Kept with the job, to find it by. Repeatable.",
)
@click.option(
    "--reference", metavar="TEXT", help="Your own id of the job: submitted again, it is the same job."
)
@click.option(
    "--tenant", metavar="TENANT", help="For whom, where that is not the key's tenant: for operators."
)
@click.option(
    "--include-output",
    "include_outputs",
    multiple=True,
    metavar="NODE",
    help="Keep what this node leaves, and nothing of those that are not named. Repeatable.",
)
@click.option(
    "--webhook", metavar="URL", help="Deliver the end of each job there, signed; see `comfyfleet webhook`."
)
@click.option("--workable", is_flag=True, help="Refuse a job that no worker can run now.")
@click.option("-w", "--watch", is_flag=True, help="Show progress to the end, and download the outputs.")
@click.option(
    "-o",
    "--out",
    type=Out(),
    default=".",
    metavar="FOLDER",
    help=f"With --watch. {OUT_HELP}",
)
@click.option(
    "--previews",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="With --watch: folder for the newest preview of each job.",
)
@asking
@as_json
@settings(*TO_REACH)
def command(
    workflows: tuple[BinaryIO, ...],
    changes: tuple[str, ...],
    attachments: tuple[str, ...],
    outputs: tuple[str, ...],
    count: int,
    labels: tuple[str, ...],
    reference: str | None,
    webhook: str | None,
    workable: bool,
    watch: bool,
    out: OutputPlace,
    previews: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Submit WORKFLOW files to a hub.

    A WORKFLOW is a file of ComfyUI, exported or as the editor saves it, or - for standard input. The ids of the
    jobs go to standard output, with --watch the paths of their outputs; everything else to standard error.
    """
    from comfyfleet.cli.reach import ask
    from comfyfleet.cli.run import Draft

    drafts: list[tuple[str, Draft]] = []
    for workflow in workflows:
        drafts.append((workflow.name, Draft(workflow, changes)))
    if reference is not None and len(drafts) * count > 1:
        raise click.UsageError("several jobs cannot share one --reference")
    options = {
        **asked_for(flags),
        "metadata": dict(map(label, labels)) or None,
        "require_workable": workable,
        "webhook": webhook,
    }
    for name, draft in drafts:
        if not draft.is_of_editor:
            # A wrong name is told before the hub is asked for anything.
            with about(name):
                options |= _brought(draft, attachments, outputs)
    if watch:
        make_folder(out.folder)
        if previews is not None:
            make_folder(previews)

    async def work(client: FleetClient) -> None:
        for name, draft in drafts:
            if draft.is_of_editor:
                with about(name):
                    draft.change(await client.convert(draft.graph))
                    options.update(_brought(draft, attachments, outputs))
        graphs = [draft.graph for _, draft in drafts for _ in range(count)]
        job_ids = await _submit(
            client, graphs, options, reference, as_json=as_json and not watch, is_told=not watch
        )
        if watch:
            from comfyfleet.cli.watching import watch_jobs

            await watch_jobs(client, job_ids, out, as_json, previews)

    ask(flags, work)


def label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--metadata")
    return name, value


def _brought(draft: Draft, attachments: tuple[str, ...], outputs: tuple[str, ...]) -> dict[str, Any]:
    from comfyfleet.cli.run import attached_file, taken_output

    return {
        "attach": dict(attached_file(draft.graph, text) for text in attachments),
        "inputs": [taken_output(draft.graph, text) for text in outputs],
    }


async def _submit(
    client: FleetClient,
    graphs: list[dict[str, Any]],
    options: dict[str, Any],
    reference: str | None,
    *,
    as_json: bool,
    is_told: bool,
) -> list[str]:
    from comfyfleet.cli.reach import print_json
    from comfyfleet.cli.watching import Bar
    from comfyfleet.model.errors import Refusal

    if len(graphs) == 1:
        jobs = [await client.submit(graphs[0], reference=reference, **options)]
    else:
        with Bar("submitting") as bar:
            found = await client.submit_many(graphs, on_progress=bar.show, **options)
        jobs = [job for job in found if not isinstance(job, Refusal)]
        refusals = [job for job in found if isinstance(job, Refusal)]
        if refusals:
            # What was taken is told first: it runs, whatever became of the others.
            for job in jobs:
                echo(job.id)
            raise CommandFailed(
                f"{len(refusals)} of {len(found)} jobs were refused, the first one because: {refusals[0].message}",
                ExitCode.REFUSED,
            )
    for job in jobs:
        for warning in job.warnings:
            echo(f"Warning: no worker can run {job.id} now: {warning}", err=True)
    if as_json:
        print_json(jobs)
    elif is_told:
        for job in jobs:
            echo(job.id)
    return [job.id for job in jobs]
