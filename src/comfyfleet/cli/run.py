"""`comfyfleet run`: one workflow on one of some servers, its progress and its files.

A short composition over `WorkflowPool`: the pool chooses the server, tries again and takes the job back on Ctrl-C.

`comfyfleet hash`: what a workflow is and what it needs, without any server.

`comfyfleet convert`: a workflow as the editor saves it, made into the graph that servers run, by a hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from comfyfleet.cli import command_help
from comfyfleet.cli.exit_codes import OUT_HELP, CommandFailed, ExitCode, OutputParam, about, make_folder, run
from comfyfleet.cli.options import TO_REACH, AddressParam, as_json, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from comfyfleet.cli.watch import RunProgress
    from comfyfleet.model.job import Attachment
    from comfyfleet.pool.output_files import OutputNames
    from comfyfleet.pool.pool import WorkflowPool


_TAKE_BACK_S = 5.0
"""How long a server gets to confirm that an interrupted job was stopped."""
_LEAVE_S = 1.0
"""Whatever has not ended by itself then is left so soon."""


@command_help.command("run")
@click.argument("workflow", type=click.File("rb"))
@click.option(
    "-s",
    "--server",
    "servers",
    type=AddressParam(),
    multiple=True,
    envvar="COMFYFLEET_SERVERS",
    show_envvar=True,
    metavar="URL",
    help="A ComfyUI server, such as http://gpu-a:8188. Repeatable.",
)
@click.option(
    "--store",
    metavar="URL",
    help="Leave the job to the workers on this store instead: redis://… or postgresql://…",
)
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
    help="Upload a file and give its name to an input, such as 10.image=photo.png. Repeatable.",
)
@click.option(
    "--priority", type=click.IntRange(-1000, 1000), default=0, show_default=True, help="Higher runs first."
)
@click.option(
    "--max-attempts", type=click.IntRange(1), default=3, show_default=True, help="Give up after so many."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Give up after so long, waiting included.",
)
@click.option(
    "-o",
    "--out",
    type=OutputParam(),
    default=".",
    metavar="FOLDER",
    help=OUT_HELP,
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but the paths of the outputs.")
@as_json
def run_command(
    workflow: BinaryIO,
    servers: tuple[str, ...],
    store: str | None,
    changes: tuple[str, ...],
    attachments: tuple[str, ...],
    priority: int,
    max_attempts: int,
    timeout: float | None,
    out: OutputNames,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run a WORKFLOW file on the best of some servers and download its outputs.

    WORKFLOW is a file of ComfyUI, exported or as the editor saves it, or - for standard input. The paths of the
    outputs go to standard output, everything else to standard error.
    """
    from comfyfleet.worker.connectors.comfyui.settings import parse_address

    if not servers and store is None:
        raise click.UsageError("Missing option '-s' / '--server' (env var: 'COMFYFLEET_SERVERS'), or --store")
    addresses: dict[str, str] = {}
    # With a store the workers there are meant, whatever servers the environment knows.
    for server in servers if store is None else ():
        try:
            addresses.setdefault(parse_address(server).server_id, server)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--server") from error
    draft = WorkflowDraft(workflow, changes)
    options: dict[str, Any] = {
        "priority": priority,
        "max_attempts": max_attempts,
        "timeout": timeout,
        "require_workable": True,
    }
    if not draft.is_of_editor:
        options["attachments"] = [_attachment(draft.graph, text) for text in attachments]
    # Better to know now that there is no place for the outputs than after an hour of work.
    make_folder(out.folder)
    run(_run(draft, list(addresses.values()), store, attachments, options, out, quiet, as_json))


class WorkflowDraft:
    """A workflow file with the changes asked for. One that the editor saved is converted before that."""

    def __init__(self, file: BinaryIO, changes: tuple[str, ...]) -> None:
        from comfyfleet.model.editor_conversion import is_editor_workflow
        from comfyfleet.model.workflow import parse_workflow, read_workflow_file

        self._changes = changes
        with about(file.name):
            found = read_workflow_file(file, file.name)
            self.is_of_editor = is_editor_workflow(found)
            self.graph: dict[str, Any] = found
            if not self.is_of_editor:
                # Checked before anything is changed in it, so that a fault of the file is told as one.
                self.change(parse_workflow(found).to_graph())

    def change(self, graph: dict[str, Any]) -> None:
        """Makes the changes in this graph, which is what the file means."""
        self.graph, self.is_of_editor = graph, False
        for change in self._changes:
            change_input(graph, change)


def change_input(graph: dict[str, dict[str, Any]], text: str) -> None:
    import msgspec

    node, name, value = _target(graph, text, "--set")
    if isinstance(graph[node]["inputs"][name], str):
        # Where a text was, everything is text: a prompt may well be "1984".
        graph[node]["inputs"][name] = value
        return
    try:
        graph[node]["inputs"][name] = msgspec.json.decode(value.encode())
    except msgspec.DecodeError:
        graph[node]["inputs"][name] = value


def attached_file(graph: dict[str, dict[str, Any]], text: str) -> tuple[str, Path]:
    """The input and the file in NODE.INPUT=FILE."""
    node, name, value = _target(graph, text, "--attach")
    path = Path(value)
    try:
        with path.open("rb"):
            return f"{node}.{name}", path
    except OSError as error:
        raise click.BadParameter(f"cannot read {value}: {error.strerror}", param_hint="--attach") from error


def taken_output(graph: dict[str, dict[str, Any]], text: str) -> dict[str, str]:
    """The input and the earlier job's output in NODE.INPUT=JOB or NODE.INPUT=JOB/OUTPUT."""
    node, name, value = _target(graph, text, "--take")
    job, slash, output = value.rpartition("/")
    taken = {"node": node, "input": name, "job": job if slash else value}
    return taken | ({"output": output} if slash else {})


def _attachment(graph: dict[str, dict[str, Any]], text: str) -> Attachment:
    from comfyfleet.pool.options import attach

    node, name, value = _target(graph, text, "--attach")
    try:
        return attach(Path(value), node, name)
    except OSError as error:
        raise click.BadParameter(f"cannot read {value}: {error.strerror}", param_hint="--attach") from error


def _target(graph: dict[str, dict[str, Any]], text: str, option: str) -> tuple[str, str, str]:
    """The node, its input and the value in NODE.INPUT=VALUE."""
    target, separator, value = text.partition("=")
    node, dot, name = target.partition(".")
    if not separator or not dot:
        raise click.BadParameter(f"{text!r} is not NODE.INPUT=VALUE, such as 6.text=cat", param_hint=option)
    if node not in graph:
        raise click.BadParameter(
            f"the workflow has no node {node!r}; it has {', '.join(graph)}", param_hint=option
        )
    inputs = graph[node]["inputs"]
    if name not in inputs:
        known = ", ".join(inputs) or "none"
        raise click.BadParameter(
            f"node {node} ({graph[node]['class_type']}) has no input {name!r}; it has {known}",
            param_hint=option,
        )
    return node, name, value


async def _run(
    draft: WorkflowDraft,
    servers: list[str],
    store: str | None,
    attachments: tuple[str, ...],
    options: dict[str, Any],
    out: OutputNames,
    is_quiet: bool,
    as_json: bool,
) -> None:
    import asyncio

    from comfyfleet.cli.hub_connection import print_json
    from comfyfleet.cli.watch import RunProgress
    from comfyfleet.pool.output_files import write_new
    from comfyfleet.pool.pool import WorkflowPool
    from comfyfleet.worker.settings import AgentSettings

    with RunProgress(is_quiet, as_json) as progress:
        agent = AgentSettings(stop_grace_s=_LEAVE_S)
        async with WorkflowPool(servers, store=store or "memory:", agent=agent) as pool:
            leave = pool.on("*", progress.hear)
            if store is None:
                await _must_reach_one(pool, progress)
            if draft.is_of_editor:
                draft.change(await pool.convert(draft.graph))
                options["attachments"] = [_attachment(draft.graph, text) for text in attachments]
            job_id = await pool.enqueue(draft.graph, **options)
            try:
                result = await pool.wait(job_id)
            except asyncio.CancelledError:
                # What an interruption takes back is no news.
                leave()
                await _take_back(pool, job_id, progress)
                raise
            record = await pool.get_job(job_id)
            for node, seed in record.seeds.items():
                progress.say(f"node {node} got the seed {seed}")
            if not result.files:
                progress.say("the workflow completed and left no files")
            for index, file in enumerate(result.files, start=1):
                # One after the other: what is saved is told even where the next one fails.
                content = await pool.fetch(file, record.client_id)
                progress.saved(await write_new(out, file, content, job=job_id, index=index))
            if as_json:
                print_json(
                    {
                        "status": record.status,
                        "client_id": record.client_id,
                        "workflow_hash": record.workflow_hash,
                        "attempts": record.attempts,
                        "seeds": record.seeds,
                        "outputs": [str(path) for path in progress.paths],
                    }
                )


async def _take_back(pool: WorkflowPool, job_id: str, progress: RunProgress) -> None:
    """Within `_TAKE_BACK_S`, or until a second Ctrl-C. Says where the job may still run."""
    import asyncio

    progress.answer("taking the job back… Ctrl-C again leaves at once")
    client_id = (await pool.get_job(job_id)).client_id
    try:
        await pool.cancel(job_id)
        await pool.wait_for_record(job_id, _TAKE_BACK_S)
    except TimeoutError:
        progress.warn(f"{client_id} did not confirm that the job was stopped: it may still run there")
    except asyncio.CancelledError:
        progress.warn(f"{client_id} was not waited for to stop the job: it may still run there")
        raise


async def _must_reach_one(pool: WorkflowPool, progress: RunProgress) -> None:
    from comfyfleet.pool.records import offline_words

    servers = (await pool.stats()).servers
    away = [server for server in servers if server.state != "online"]
    if len(away) == len(servers):
        told = "; ".join(
            f"{server.id} is offline: {server.reason or 'it does not answer'}" for server in servers
        )
        hint = ""
        if without := [server.id for server in servers if not _has_port(server.url or "")]:
            hint = (
                f" No port was given for {', '.join(without)}: ComfyUI's own is 8188, as in http://gpu:8188"
            )
        raise CommandFailed(f"no ComfyUI server answers. {told}{hint}", ExitCode.UNREACHABLE)
    for server in away:
        progress.say(offline_words(server.id, server.reason))


def _has_port(url: str) -> bool:
    from urllib.parse import urlsplit

    return urlsplit(url if "://" in url else f"http://{url}").port is not None


@click.command("hash")
@click.argument("workflow", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def hash_command(workflow: BinaryIO, as_json: bool) -> None:
    """Show the hashes of a WORKFLOW file and what it needs.

    WORKFLOW is a file in ComfyUI's API format, a picture that ComfyUI saved, or - for standard input. Workflows that
    differ only in prompts, seeds and numbers have the same structural hash: failures are counted, and servers blocked,
    for each structural hash. The exact hash differs with every value.
    """
    from comfyfleet.model.workflow import (
        exact_hash,
        hash_workflow,
        parse_workflow,
        read_needs,
        read_workflow_file,
    )

    with about(workflow.name):
        parsed = parse_workflow(read_workflow_file(workflow, workflow.name))
    needs = read_needs(parsed)
    lists = {
        "node_classes": sorted(needs.node_classes),
        "models": sorted(needs.models),
        "input_files": sorted(needs.input_files),
    }
    if as_json:
        import msgspec

        found = {
            "workflow_hash": hash_workflow(parsed),
            "exact_hash": exact_hash(parsed),
            "nodes": len(parsed.nodes),
            **lists,
        }
        echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return
    echo(f"workflow hash  {hash_workflow(parsed)}")
    echo(f"exact hash     {exact_hash(parsed)}")
    echo(f"nodes          {len(parsed.nodes)}")
    for name, values in lists.items():
        label = name.replace("_", " ")
        for index, value in enumerate(values or ["–"]):
            echo(f"{label if index == 0 else '':<15}{value}")


@click.command("convert")
@click.argument("workflow", type=click.File("rb"))
@settings(*TO_REACH)
def convert_command(workflow: BinaryIO, **flags: Any) -> None:
    """Print a WORKFLOW of the ComfyUI editor in the API format.

    A worker of the hub must have all of its nodes. `submit` and `run` convert by themselves; this shows the ids and
    the inputs that --set takes.
    """
    from comfyfleet.cli.hub_connection import ask, print_json

    draft = WorkflowDraft(workflow, ())
    if draft.is_of_editor:
        draft.change(ask(flags, lambda client: client.convert(draft.graph)))
    print_json(draft.graph)
