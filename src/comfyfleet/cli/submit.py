"""`comfyfleet submit`: jobs for a hub, and with --watch their progress and their files.

The flags of `comfyfleet submit` that say for whom a job is, what it needs, what it would like, and when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from comfyfleet.cli import command_help, completion
from comfyfleet.cli.command_help import GroupedOption
from comfyfleet.cli.exit_codes import OUT_HELP, CommandFailed, ExitCode, OutputParam, about, make_folder
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from comfyfleet.cli.run import WorkflowDraft
    from comfyfleet.client.client import FleetClient
    from comfyfleet.pool.output_files import OutputNames


F = TypeVar("F", bound=Callable[..., Any])

WHEN = "When it runs"
NEEDS = "What it needs (a worker that lacks one of these never gets it)"
WISHES = "What it would like (of the workers that may run it, the best gets it)"

_TIERS = click.Choice(["economy", "standard", "premium"])
_SIZE = click.FloatRange(0, min_open=True)
_NUMBER = click.IntRange(1)


class _Time(click.ParamType[datetime]):
    name = "time"

    def convert(self, value: Any, _: click.Parameter | None, __: click.Context | None) -> datetime:
        try:
            at = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is no time: write it like 2026-11-16T21:30 or 2026-11-16T21:30+01:00")
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _option(group: str, *names: str, **more: Any) -> Callable[[F], F]:
    return click.option(*names, cls=GroupedOption, group=group, **more)


def _many(group: str, flag: str, name: str, metavar: str, help_: str, **more: Any) -> Callable[[F], F]:
    return _option(group, flag, name, multiple=True, metavar=metavar, help=f"{help_} Repeatable.", **more)


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    _option(
        WHEN,
        "--priority",
        type=click.IntRange(-1000, 1000),
        default=0,
        show_default=True,
        help="Higher runs first.",
    ),
    _option(
        WHEN,
        "--urgency",
        type=click.Choice(["low", "normal", "high", "critical"]),
        help="Added to the priority; normal unless given.",
    ),
    _option(
        WHEN,
        "--not-before",
        type=_Time(),
        metavar="TIME",
        help="Wait until then: 2026-11-16T21:30, in UTC unless it has a zone.",
    ),
    _option(
        WHEN,
        "--deadline",
        type=_Time(),
        metavar="TIME",
        help="It is to have ended by then, and comes forward as the time draws near.",
    ),
    _option(
        WHEN,
        "--on-deadline",
        type=click.Choice(["fail", "flag"]),
        help="What happens at the deadline: it fails, or goes on and is marked as late; fail unless given.",
    ),
    _many(
        WHEN,
        "--after",
        "after",
        "JOB",
        "Wait until this job has completed, by its id or reference.",
        shell_complete=completion.job_ids,
    ),
    _option(
        WHEN,
        "--max-attempts",
        type=click.IntRange(1, 1000),
        metavar="N",
        help="Give up after so many; 3 unless given.",
    ),
    _option(
        WHEN,
        "--retry-delay",
        type=click.FloatRange(0),
        metavar="SECONDS",
        help="Wait so long before the second attempt.",
    ),
    _option(
        WHEN, "--timeout", type=_SIZE, metavar="SECONDS", help="Give up after so long, waiting included."
    ),
    _option(
        WHEN,
        "--start-timeout",
        type=_SIZE,
        metavar="SECONDS",
        help="Try elsewhere if a server has not begun after so long.",
    ),
    _option(
        WHEN,
        "--stall-timeout",
        type=_SIZE,
        metavar="SECONDS",
        help="Try elsewhere if a node has told nothing for so long.",
    ),
    _option(NEEDS, "--vram", type=_SIZE, metavar="GB", help="Memory of the graphics card."),
    _option(NEEDS, "--gpus", type=_NUMBER, metavar="N", help="Graphics cards."),
    _option(NEEDS, "--gpu-model", metavar="TEXT", help="Part of the card's name, such as 4090."),
    _option(NEEDS, "--ram", type=_SIZE, metavar="GB", help="Memory of the machine."),
    _option(NEEDS, "--cores", type=_NUMBER, metavar="N", help="Cores of its processor."),
    _option(NEEDS, "--threads", type=_NUMBER, metavar="N", help="Threads of its processor."),
    _many(NEEDS, "--model", "models", "FILE", "A model file, beside those that the workflow names."),
    _many(NEEDS, "--node-class", "node_classes", "CLASS", "A node class, beside those of the workflow."),
    _option(NEEDS, "--quality", metavar="LEVEL", help="A quality level that the worker offers."),
    _option(NEEDS, "--service", metavar="NAME", help="The service; comfyui unless given."),
    _option(NEEDS, "--provider", metavar="NAME", help="Who provides it."),
    _option(
        NEEDS, "--environment", type=click.Choice(["cloud", "self_hosted"]), help="Where the worker runs."
    ),
    _option(NEEDS, "--region", metavar="NAME", help="Where the worker is."),
    _many(NEEDS, "--compliance", "compliance", "NAME", "What the worker complies with, such as gdpr."),
    _option(
        NEEDS,
        "--isolation",
        type=click.Choice(["strict", "loose", "none"]),
        help="How the worker keeps tenants apart, at least.",
    ),
    _option(NEEDS, "--max-cost-tier", type=_TIERS, help="The dearest worker that will do."),
    _option(
        NEEDS,
        "--max-processing",
        type=_SIZE,
        metavar="SECONDS",
        help="No worker on which it was seen to take longer.",
    ),
    _many(
        NEEDS,
        "--worker",
        "workers",
        "WORKER",
        "This worker alone, or another one named so.",
        shell_complete=completion.worker_ids,
    ),
    _many(
        NEEDS,
        "--exclude-worker",
        "exclude_workers",
        "WORKER",
        "Not this worker.",
        shell_complete=completion.worker_ids,
    ),
    _many(
        WISHES,
        "--prefer-worker",
        "prefer_workers",
        "WORKER",
        "This worker.",
        shell_complete=completion.worker_ids,
    ),
    _many(WISHES, "--prefer-model", "prefer_models", "FILE", "A worker that has this model loaded."),
    _option(WISHES, "--prefer-quality", metavar="LEVEL", help="A worker that offers this quality level."),
    _option(WISHES, "--prefer-region", metavar="NAME", help="A worker there."),
    _option(WISHES, "--prefer-cost-tier", type=_TIERS, help="A worker of this price."),
)


def asking(command: F) -> F:
    """Adds the flags; what they say is read by `asked_for`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def asked_for(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes these flags out of `flags`; what is left are the settings. The options of a client's `submit`."""
    from comfyfleet.wire.bodies import (
        HardwareBody,
        LocationBody,
        PreferencesBody,
        RequirementsBody,
        TimeoutsBody,
    )

    def taken(**names: str) -> dict[str, Any]:
        """Those that were given, under the names of the body."""
        found = {name: flags.pop(flag) for name, flag in names.items()}
        return {name: value for name, value in found.items() if value not in (None, ())}

    hardware = taken(
        gpu_memory_gb="vram",
        gpu_count="gpus",
        gpu_model="gpu_model",
        ram_gb="ram",
        cpu_cores="cores",
        cpu_threads="threads",
    )
    location = taken(region="region", compliance="compliance")
    needs = taken(
        models="models",
        node_classes="node_classes",
        quality="quality",
        environment="environment",
        isolation="isolation",
        max_cost_tier="max_cost_tier",
        max_processing_s="max_processing",
        workers="workers",
        exclude_workers="exclude_workers",
    )
    if hardware:
        needs["hardware"] = HardwareBody(**hardware)
    if location:
        needs["location"] = LocationBody(**location)
    wishes = taken(
        workers="prefer_workers",
        models="prefer_models",
        quality="prefer_quality",
        region="prefer_region",
        cost_tier="prefer_cost_tier",
    )
    times = taken(total_s="timeout", start_s="start_timeout", stall_s="stall_timeout")
    asked = taken(
        tenant="tenant",
        service="service",
        provider="provider",
        priority="priority",
        urgency="urgency",
        not_before="not_before",
        deadline="deadline",
        on_deadline="on_deadline",
        after="after",
        max_attempts="max_attempts",
        retry_delay_s="retry_delay",
        include_outputs="include_outputs",
    )
    if needs:
        asked["requirements"] = RequirementsBody(**needs)
    if wishes:
        asked["preferences"] = PreferencesBody(**wishes)
    if times:
        asked["timeouts"] = TimeoutsBody(**times)
    return asked


@command_help.command("submit")
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
    type=OutputParam(),
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
def submit_command(
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
    out: OutputNames,
    previews: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Submit WORKFLOW files to a hub.

    A WORKFLOW is a file of ComfyUI, exported or as the editor saves it, or - for standard input. The ids of the
    jobs go to standard output, with --watch the paths of their outputs; everything else to standard error.
    """
    from comfyfleet.cli.hub_connection import ask
    from comfyfleet.cli.run import WorkflowDraft

    drafts: list[tuple[str, WorkflowDraft]] = []
    for workflow in workflows:
        drafts.append((workflow.name, WorkflowDraft(workflow, changes)))
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
            from comfyfleet.cli.watch import watch_jobs

            await watch_jobs(client, job_ids, out, as_json, previews)

    ask(flags, work)


def label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--metadata")
    return name, value


def _brought(draft: WorkflowDraft, attachments: tuple[str, ...], outputs: tuple[str, ...]) -> dict[str, Any]:
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
    from comfyfleet.cli.hub_connection import print_json
    from comfyfleet.cli.watch import ProgressBar
    from comfyfleet.model.errors import Refusal

    if len(graphs) == 1:
        jobs = [await client.submit(graphs[0], reference=reference, **options)]
    else:
        with ProgressBar("submitting") as bar:
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
