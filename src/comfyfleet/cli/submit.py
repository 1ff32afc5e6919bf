"""`comfyfleet submit`: jobs for a hub, and with --watch their progress and their files.

Each flag about requirements, preferences and time names the field of the request body that it fills.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click
from click.core import ParameterSource

from comfyfleet.cli.command import (
    GroupedOption,
    command,
    complete_job_ids,
    complete_worker_ids,
    hub_options,
)
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, naming_file
from comfyfleet.cli.options import OUT_HELP, OutputParam, attach_option, output_folder, set_option
from comfyfleet.cli.output import echo, print_json

if TYPE_CHECKING:
    from comfyfleet.cli.run import WorkflowDraft
    from comfyfleet.client.client import FleetClient
    from comfyfleet.pool.output_files import OutputNames


F = TypeVar("F", bound=Callable[..., Any])

WHEN = "When it runs"
NEEDS = "Requirements (only a worker that meets all of them gets the job)"
WISHES = "Preferences (the best of the workers that can run the job gets it)"

_TIERS = click.Choice(["economy", "standard", "premium"])
_SIZE = click.FloatRange(0, min_open=True)
_NUMBER = click.IntRange(1)


class _Time(click.ParamType[datetime]):
    name = "time"

    def convert(self, value: Any, _: click.Parameter | None, __: click.Context | None) -> datetime:
        try:
            at = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time. Write it like 2026-11-16T21:30 or 2026-11-16T21:30+01:00.")
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


_FIELDS = {"tenant": "tenant", "include_outputs": "include_outputs"}
"""By parameter: the field of the request body."""


def _option(group: str, flag: str, field: str, help_: str, **more: Any) -> Callable[[Any], Any]:
    name = flag.removeprefix("--").replace("-", "_")
    if more.get("multiple"):
        name = more.pop("name", name)
        help_ += " Repeatable."
    _FIELDS[name] = field
    return click.option(flag, name, cls=GroupedOption, group=group, help=help_, **more)


def _when(flag: str, field: str, help_: str, **more: Any) -> Callable[[Any], Any]:
    return _option(WHEN, flag, field, help_, **more)


def _need(flag: str, field: str, help_: str, **more: Any) -> Callable[[Any], Any]:
    return _option(NEEDS, flag, field, help_, **more)


def _wish(flag: str, field: str, help_: str, **more: Any) -> Callable[[Any], Any]:
    return _option(WISHES, flag, f"preferences.{field}", help_, **more)


_SECONDS: dict[str, Any] = {"type": _SIZE, "metavar": "SECONDS"}
_TIME: dict[str, Any] = {"type": _Time(), "metavar": "TIME"}
_GB: dict[str, Any] = {"type": _SIZE, "metavar": "GB"}
_N: dict[str, Any] = {"type": _NUMBER, "metavar": "N"}
_NAME = {"metavar": "NAME"}
_LEVEL = {"metavar": "LEVEL"}
_MODELS: dict[str, Any] = {"multiple": True, "metavar": "FILE"}
_WORKERS: dict[str, Any] = {"multiple": True, "metavar": "WORKER", "shell_complete": complete_worker_ids}

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    _when(
        "--priority",
        "priority",
        "Higher runs first.",
        type=click.IntRange(-1000, 1000),
        default=0,
        show_default=True,
    ),
    _when(
        "--urgency",
        "urgency",
        "Added to the priority. Default: normal.",
        type=click.Choice(["low", "normal", "high", "critical"]),
    ),
    _when("--not-before", "not_before", "Wait until then: 2026-11-16T21:30, UTC if it has no zone.", **_TIME),
    _when(
        "--deadline", "deadline", "The job should end by then; its priority rises as time runs out.", **_TIME
    ),
    _when(
        "--on-deadline",
        "on_deadline",
        "At the deadline: let the job fail, or continue and flag it as late. Default: fail.",
        type=click.Choice(["fail", "flag"]),
    ),
    _when(
        "--after",
        "after",
        "Wait until this job has completed. Give its id or reference.",
        multiple=True,
        metavar="JOB",
        shell_complete=complete_job_ids,
    ),
    _when(
        "--max-attempts",
        "max_attempts",
        "Give up after this many attempts. Default: 3.",
        type=click.IntRange(1, 1000),
        metavar="N",
    ),
    _when(
        "--retry-delay",
        "retry_delay_s",
        "Time before the second attempt.",
        type=click.FloatRange(0),
        metavar="SECONDS",
    ),
    _when("--timeout", "timeouts.total_s", "Give up after this time, waiting included.", **_SECONDS),
    _when(
        "--start-timeout", "timeouts.start_s", "Try another server if one does not start in time.", **_SECONDS
    ),
    _when(
        "--stall-timeout",
        "timeouts.stall_s",
        "Try another server after this time without progress.",
        **_SECONDS,
    ),
    _need("--vram", "requirements.hardware.gpu_memory_gb", "Memory of the GPU.", **_GB),
    _need("--gpus", "requirements.hardware.gpu_count", "Number of GPUs.", **_N),
    _need(
        "--gpu-model",
        "requirements.hardware.gpu_model",
        "Part of the GPU's name, such as 4090.",
        metavar="TEXT",
    ),
    _need("--ram", "requirements.hardware.ram_gb", "Memory of the machine.", **_GB),
    _need("--cores", "requirements.hardware.cpu_cores", "CPU cores.", **_N),
    _need("--threads", "requirements.hardware.cpu_threads", "CPU threads.", **_N),
    _need(
        "--model",
        "requirements.models",
        "A model file, beside those in the workflow.",
        name="models",
        **_MODELS,
    ),
    _need(
        "--node-class",
        "requirements.node_classes",
        "A node class, beside those in the workflow.",
        name="node_classes",
        multiple=True,
        metavar="CLASS",
    ),
    _need("--quality", "requirements.quality", "A quality level that the worker offers.", **_LEVEL),
    _need("--service", "service", "The service. Default: comfyui.", **_NAME),
    _need("--provider", "provider", "Who provides the service.", **_NAME),
    _need(
        "--environment",
        "requirements.environment",
        "Where the worker runs.",
        type=click.Choice(["cloud", "self_hosted"]),
    ),
    _need("--region", "requirements.location.region", "The region of the worker.", **_NAME),
    _need(
        "--compliance",
        "requirements.location.compliance",
        "What the worker complies with, such as gdpr.",
        multiple=True,
        metavar="NAME",
    ),
    _need(
        "--isolation",
        "requirements.isolation",
        "The least isolation of tenants that the worker must have.",
        type=click.Choice(["strict", "loose", "none"]),
    ),
    _need(
        "--max-cost-tier",
        "requirements.max_cost_tier",
        "The most expensive tier of worker to use.",
        type=_TIERS,
    ),
    _need(
        "--max-processing",
        "requirements.max_processing_s",
        "No worker on which this workflow took longer.",
        **_SECONDS,
    ),
    _need(
        "--worker",
        "requirements.workers",
        "Only this worker, or others named so.",
        name="workers",
        **_WORKERS,
    ),
    _need(
        "--exclude-worker",
        "requirements.exclude_workers",
        "Not this worker.",
        name="exclude_workers",
        **_WORKERS,
    ),
    _wish("--prefer-worker", "workers", "This worker.", name="prefer_workers", **_WORKERS),
    _wish(
        "--prefer-model", "models", "A worker that has this model loaded.", name="prefer_models", **_MODELS
    ),
    _wish("--prefer-quality", "quality", "A worker that offers this quality level.", **_LEVEL),
    _wish("--prefer-region", "region", "A worker in this region.", **_NAME),
    _wish("--prefer-cost-tier", "cost_tier", "A worker of this cost tier.", type=_TIERS),
)


def request_options(command: F) -> F:
    """Adds the flags that `submit_options` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def submit_options(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes these flags out of `flags`, and returns the options of a client's `submit`."""
    from comfyfleet.wire.bodies import (
        HardwareBody,
        LocationBody,
        PreferencesBody,
        RequirementsBody,
        TimeoutsBody,
    )

    found: dict[str, dict[str, Any]] = {"": {}}
    for name, path in _FIELDS.items():
        value = flags.pop(name)
        if value not in (None, ()):
            part, _, field = path.rpartition(".")
            found.setdefault(part, {})[field] = value
    # Inner parts first: each becomes a field of the part around it.
    bodies: dict[str, Callable[..., Any]] = {
        "requirements.hardware": HardwareBody,
        "requirements.location": LocationBody,
        "requirements": RequirementsBody,
        "preferences": PreferencesBody,
        "timeouts": TimeoutsBody,
    }
    for part, body in bodies.items():
        if part in found:
            outer, _, field = part.rpartition(".")
            found.setdefault(outer, {})[field] = body(**found.pop(part))
    return found[""]


@command("submit")
@click.argument("workflows", type=click.File("rb"), nargs=-1, required=True, metavar="WORKFLOW...")
@set_option
@attach_option
@click.option(
    "--take",
    "outputs",
    multiple=True,
    metavar="NODE.INPUT=JOB[/OUTPUT]",
    help="Wait for a job and use its output as an input, such as 10.image=JOB/9. Repeatable.",
)
@click.option(
    "--count", type=_NUMBER, default=1, metavar="N", help="Number of jobs of each workflow. Default: 1."
)
@click.option(
    "--metadata",
    "labels",
    multiple=True,
    metavar="NAME=VALUE",
    help="A label of the job; `jobs --metadata` finds it. Repeatable.",
)
@click.option(
    "--reference", metavar="TEXT", help="Your own id of the job. Submitted again, it is the same job."
)
@click.option("--tenant", metavar="TENANT", help="The tenant of the job. Needs an operator's key.")
@click.option(
    "--include-output",
    "include_outputs",
    multiple=True,
    metavar="NODE",
    help="Keep only the outputs of this node. Repeatable.",
)
@click.option(
    "--webhook", metavar="URL", help="Send the end of each job there, signed; see `comfyfleet webhook`."
)
@click.option("--workable", is_flag=True, help="Refuse a job that no online worker can run.")
@click.option(
    "--quote",
    is_flag=True,
    help="Submit nothing: show the expected start, end, duration and cost, as far as earlier runs tell.",
)
@click.option("-w", "--watch", is_flag=True, help="Show progress to the end, and download the outputs.")
@click.option(
    "-o", "--out", type=OutputParam(), default=".", metavar="FOLDER", help=f"With --watch. {OUT_HELP}"
)
@click.option(
    "--previews",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    help="With --watch: folder for the newest preview of each job.",
)
@request_options
@hub_options
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
    quote: bool,
    watch: bool,
    out: OutputNames,
    previews: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Submit WORKFLOW files to a hub.

    A WORKFLOW is a ComfyUI file in the API format or as the editor saves it, or - for standard input. With --service it
    is a JSON file with the payload of that service. Standard output gets the ids of the jobs, with --watch the paths of
    their outputs. Everything else goes to standard error.
    """
    from comfyfleet.cli.hub_connection import ask
    from comfyfleet.cli.run import WorkflowDraft
    from comfyfleet.model.payload import COMFYUI

    service = flags["service"] or COMFYUI
    drafts = [(workflow.name, WorkflowDraft(workflow, changes, service)) for workflow in workflows]
    if quote and (watch or attachments or count > 1):
        raise click.UsageError("--quote submits nothing: leave out --watch, --attach and --count.")
    source = click.get_current_context().get_parameter_source
    if not watch and source("out") is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "--out needs --watch, which downloads the outputs. For a job that was submitted without it: "
            "`comfyfleet job watch JOB_ID --out FOLDER`."
        )
    if reference is not None and len(drafts) * count > 1:
        raise click.UsageError("Several jobs cannot share one --reference.")
    options = {
        **submit_options(flags),
        "metadata": dict(map(label, labels)) or None,
        "require_workable": workable,
        "webhook": webhook,
    }
    for name, draft in drafts:
        if not draft.is_of_editor:
            # Report a wrong name before the first call of the hub.
            with naming_file(name):
                options |= _inputs(draft, attachments, outputs)

    async def work(client: FleetClient) -> None:
        for name, draft in drafts:
            if draft.is_of_editor:
                with naming_file(name):
                    draft.change(await client.convert(draft.graph))
                    options.update(_inputs(draft, attachments, outputs))
        if quote:
            await _quote(client, drafts, options, as_json=as_json)
            return
        graphs = [(name, draft.graph) for name, draft in drafts for _ in range(count)]
        job_ids = await _submit(client, graphs, options, reference, as_json=as_json, is_watched=watch)
        if watch:
            from comfyfleet.cli.watch import watch_jobs

            await watch_jobs(client, job_ids, out, as_json, previews)

    with output_folder(out.folder if watch else None), output_folder(previews if watch else None):
        ask(flags, work)


async def _quote(
    client: FleetClient, drafts: list[tuple[str, WorkflowDraft]], options: dict[str, Any], *, as_json: bool
) -> None:
    from comfyfleet.cli.estimates import print_quotes

    asked = {name: value for name, value in options.items() if name != "attach"}
    found = [(name, await client.quote(draft.graph, **asked)) for name, draft in drafts]
    if as_json:
        print_json([each for _, each in found])
    else:
        print_quotes(found, time.time())


def label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--metadata")
    return name, value


def _inputs(draft: WorkflowDraft, attachments: tuple[str, ...], outputs: tuple[str, ...]) -> dict[str, Any]:
    from comfyfleet.cli.run import attached_file, taken_output

    return {
        "attach": dict(attached_file(draft, text) for text in attachments),
        "inputs": [taken_output(draft, text) for text in outputs],
    }


async def _submit(
    client: FleetClient,
    graphs: list[tuple[str, dict[str, Any]]],
    options: dict[str, Any],
    reference: str | None,
    *,
    as_json: bool,
    is_watched: bool,
) -> list[str]:
    from comfyfleet.cli.watch import ProgressBar
    from comfyfleet.model.errors import Refusal
    from comfyfleet.model.payload import COMFYUI

    if len(graphs) == 1:
        jobs = [await client.submit(graphs[0][1], reference=reference, **options)]
    else:
        with ProgressBar("submitting") as bar:
            found = await client.submit_many([graph for _, graph in graphs], on_progress=bar.show, **options)
        jobs = [job for job in found if not isinstance(job, Refusal)]
        refusals = [
            f"{name}: {job.message}"
            for (name, _), job in zip(graphs, found, strict=True)
            if isinstance(job, Refusal)
        ]
        if refusals:
            # Accepted jobs run, whatever happened to the others, so print their ids.
            for job in jobs:
                echo(job.id)
            raise CommandFailed(
                f"the hub refused {len(refusals)} of {len(found)} jobs: {'; '.join(dict.fromkeys(refusals))}",
                ExitCode.REFUSED,
            )
    for job in jobs:
        for warning in job.warnings:
            echo(f"Warning: no worker can run {job.id} now: {warning}", err=True)
    if as_json and not is_watched:
        print_json(jobs)
        return [job.id for job in jobs]
    for job in jobs:
        echo(f"submitted {job.id}" if is_watched else job.id, err=is_watched)
        for node, seed in (job.seeds or {}).items():
            name = f"node {node}" if options.get("service") in (None, COMFYUI) else node
            echo(f"{name} uses the seed {seed}", err=True)
    return [job.id for job in jobs]
