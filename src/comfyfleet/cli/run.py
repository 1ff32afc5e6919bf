"""`comfyfleet run`, `hash` and `convert`: workflow files run on servers, described, or converted.

`run` composes a `WorkflowPool`: the pool chooses the server and retries. Ctrl-C cancels the job.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from comfyfleet.cli.command import command
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, naming_file, run
from comfyfleet.cli.options import (
    HUB_SETTINGS,
    OUT_HELP,
    AddressParam,
    OutputParam,
    as_json,
    attach_option,
    output_folder,
    set_option,
    settings,
)
from comfyfleet.cli.output import print_json, print_pairs

if TYPE_CHECKING:
    from comfyfleet.cli.watch import RunProgress
    from comfyfleet.model.job import Attachment
    from comfyfleet.pool.options import Server
    from comfyfleet.pool.output_files import OutputNames
    from comfyfleet.pool.pool import WorkflowPool


_CANCEL_TIMEOUT_S = 5.0
"""How long a server gets to confirm that it stopped an interrupted job."""
_STOP_GRACE_S = 1.0
"""How long anything else may take to stop."""


@command("run")
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
    help="Use the workers on this store instead: redis://… or postgresql://…",
)
@click.option(
    "--service",
    "services",
    multiple=True,
    metavar="NAME[=ADDRESS]",
    help="WORKFLOW is a JSON file with the payload of this service, and at ADDRESS is one. Repeatable.",
)
@set_option
@attach_option
@click.option(
    "--priority", type=click.IntRange(-1000, 1000), default=0, show_default=True, help="Higher runs first."
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Give up after this many attempts.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Give up after this time, waiting included.",
)
@click.option("-o", "--out", type=OutputParam(), default=".", metavar="FOLDER", help=OUT_HELP)
@click.option("-q", "--quiet", is_flag=True, help="Print only the paths of the outputs.")
@as_json
def run_command(
    workflow: BinaryIO,
    servers: tuple[str, ...],
    store: str | None,
    services: tuple[str, ...],
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

    WORKFLOW is a ComfyUI file in the API format or as the editor saves it, or - for standard input. Standard output
    gets the paths of the outputs, standard error everything else.
    """
    from comfyfleet.model.payload import COMFYUI
    from comfyfleet.worker.connectors.comfyui.settings import parse_address

    service, others = _services(services)
    if service != COMFYUI and store is None:
        # Servers from the environment are ComfyUI servers.
        servers = ()
    if not (servers or others) and store is None:
        raise click.UsageError(
            "Missing option '-s' / '--server' (env var: 'COMFYFLEET_SERVERS'), or --store."
        )
    addresses: dict[str, str] = {}
    # --store means the workers there, so servers from the environment do not count.
    for server in servers if store is None else ():
        try:
            addresses.setdefault(parse_address(server).server_id, server)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--server") from error
    draft = WorkflowDraft(workflow, changes, service)
    options: dict[str, Any] = {
        "service": service,
        "priority": priority,
        "max_attempts": max_attempts,
        "timeout": timeout,
        "require_workable": True,
    }
    if not draft.is_of_editor:
        options["attachments"] = [_attachment(draft, text) for text in attachments]
    # Fail now rather than after an hour of work if the outputs cannot be written.
    with output_folder(out.folder):
        every = [*addresses.values(), *(others if store is None else ())]
        run(_run(draft, every, store, attachments, options, out, quiet, as_json))


def _services(given: tuple[str, ...]) -> tuple[str, list[Server]]:
    """The service of the payload, and the servers that run it."""
    from comfyfleet.cli.settings import read_settings
    from comfyfleet.model.payload import COMFYUI
    from comfyfleet.pool.options import Server
    from comfyfleet.worker.connectors.registry import connect, names

    found: list[Server] = []
    services: set[str] = set()
    settings = read_settings({}) if given else None
    for text in given:
        name, separator, address = text.partition("=")
        if not separator:
            services.add(name)
            continue
        assert settings is not None
        try:
            connector = connect(name, address, settings.connector(name))
        except ValueError as error:
            raise click.BadParameter(f"{name}: {error}", param_hint="--service") from error
        services.add(connector.service_name)
        found.append(Server(id=f"{name}-{len(found) + 1}", connector=connector))
    if len(services) > 1:
        raise click.BadParameter(
            f"a payload is of one service, not of {' and '.join(sorted(services))}; known: {', '.join(names())}",
            param_hint="--service",
        )
    return next(iter(services), COMFYUI), found


class WorkflowDraft:
    """A workflow file with the changes of --set. A workflow of the editor is converted before it is changed. A file for
    another service contains its payload."""

    def __init__(self, file: BinaryIO, changes: tuple[str, ...], service: str = "comfyui") -> None:
        from comfyfleet.model.editor_conversion import is_editor_workflow
        from comfyfleet.model.payload import COMFYUI
        from comfyfleet.model.workflow import read_payload_file, read_workflow_file
        from comfyfleet.model.workflow_graph import parse_workflow

        self._changes = changes
        self.is_graph, self.is_of_editor = service == COMFYUI, False
        with naming_file(file.name):
            if not self.is_graph:
                self.change(read_payload_file(file, file.name))
                return
            found = read_workflow_file(file, file.name)
            self.is_of_editor = is_editor_workflow(found)
            self.graph: dict[str, Any] = found
            if not self.is_of_editor:
                # Checked before the changes, so that a mistake in the file is reported as one.
                self.change(parse_workflow(found).to_graph())

    def change(self, graph: dict[str, Any]) -> None:
        """Makes the changes in this graph: the one of the file, in the API format."""
        self.graph, self.is_of_editor = graph, False
        for change in self._changes:
            if self.is_graph:
                change_input(graph, change)
            else:
                change_payload(graph, change)

    def target(self, text: str, option: str) -> tuple[str, str, str]:
        """The node, its input and the value in NODE.INPUT=VALUE."""
        if self.is_graph:
            return _target(self.graph, text, option)
        place, value = _assignment(text, option)
        # The hub knows which places of a payload take a file.
        node, _, name = place.partition(".")
        return node, name, value


def change_input(graph: dict[str, dict[str, Any]], text: str) -> None:
    node, name, value = _target(graph, text, "--set")
    graph[node]["inputs"][name] = _value(value, graph[node]["inputs"][name])


def change_payload(payload: dict[str, Any], text: str) -> None:
    """Changes a field, such as body.prompt='a cat'. The objects around it must be there, the field need not."""
    place, value = _assignment(text, "--set")
    *parents, last = place.split(".")
    inner: Any = payload
    for name in parents:
        inner = inner.get(name) if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        raise click.BadParameter(f"the payload has no object {'.'.join(parents)!r}", param_hint="--set")
    inner[last] = _value(value, inner.get(last))


def _value(text: str, before: Any) -> Any:
    import msgspec

    if isinstance(before, str):
        # A text stays a text: a prompt may be "1984".
        return text
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text


def attached_file(draft: WorkflowDraft, text: str) -> tuple[str, Path]:
    """The input and the file in NODE.INPUT=FILE."""
    node, name, path = _readable_file(draft, text)
    return f"{node}.{name}", path


def _readable_file(draft: WorkflowDraft, text: str) -> tuple[str, str, Path]:
    node, name, value = draft.target(text, "--attach")
    try:
        with Path(value).open("rb"):
            return node, name, Path(value)
    except OSError as error:
        raise click.BadParameter(f"cannot read {value}: {error.strerror}", param_hint="--attach") from error


def taken_output(draft: WorkflowDraft, text: str) -> dict[str, str]:
    """The input and the earlier job's output in NODE.INPUT=JOB or NODE.INPUT=JOB/OUTPUT."""
    node, name, value = draft.target(text, "--take")
    job, slash, output = value.rpartition("/")
    taken = {"node": node, "input": name, "job": job if slash else value}
    return taken | ({"output": output} if slash else {})


def _attachment(draft: WorkflowDraft, text: str) -> Attachment:
    from comfyfleet.pool.options import attach

    node, name, path = _readable_file(draft, text)
    return attach(path, node, name)


_FORMS = {
    "--set": "NODE.INPUT=VALUE, such as 6.text=cat",
    "--attach": "NODE.INPUT=FILE, such as 10.image=photo.png",
    "--take": "NODE.INPUT=JOB or NODE.INPUT=JOB/OUTPUT",
}


def _assignment(text: str, option: str) -> tuple[str, str]:
    """The place in a payload, and what the option gives to it."""
    place, separator, value = text.partition("=")
    if not separator or (option != "--set" and "." not in place) or not all(place.split(".")):
        form = "PLACE=VALUE, such as body.prompt=cat" if option == "--set" else _FORMS[option]
        raise click.BadParameter(f"{text!r} is not {form}", param_hint=option)
    return place, value


def _target(graph: dict[str, dict[str, Any]], text: str, option: str) -> tuple[str, str, str]:
    """The node, its input and what the option gives to it."""
    target, separator, value = text.partition("=")
    node, dot, name = target.partition(".")
    if not separator or not dot:
        raise click.BadParameter(f"{text!r} is not {_FORMS[option]}", param_hint=option)
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
    servers: list[str | Server],
    store: str | None,
    attachments: tuple[str, ...],
    options: dict[str, Any],
    out: OutputNames,
    is_quiet: bool,
    as_json: bool,
) -> None:
    import asyncio

    from comfyfleet.cli.watch import RunProgress
    from comfyfleet.pool.output_files import write_new
    from comfyfleet.pool.pool import WorkflowPool
    from comfyfleet.worker.settings import AgentSettings

    with RunProgress(is_quiet, as_json) as progress:
        agent = AgentSettings(stop_grace_s=_STOP_GRACE_S)
        async with WorkflowPool(servers, store=store or "memory:", agent=agent) as pool:
            leave = pool.on("*", progress.on_event)
            if store is None:
                await _must_reach_one(pool, progress)
            if draft.is_of_editor:
                draft.change(await pool.convert(draft.graph))
                options["attachments"] = [_attachment(draft, text) for text in attachments]
            job_id = await pool.enqueue(draft.graph, **options)
            try:
                result = await pool.wait(job_id)
            except asyncio.CancelledError:
                # The user asked to stop: do not report it as a failure.
                leave()
                await _cancel(pool, job_id, progress)
                raise
            record = await pool.get_job(job_id)
            for node, seed in record.seeds.items():
                progress.print_line(f"{'node ' if draft.is_graph else ''}{node} used the seed {seed}")
            if not result.files:
                progress.print_line("The workflow completed without output files.")
            for index, file in enumerate(result.files, start=1):
                # One after the other: each saved path is printed even if the next file fails.
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


async def _cancel(pool: WorkflowPool, job_id: str, progress: RunProgress) -> None:
    """Within `_CANCEL_TIMEOUT_S`, or until a second Ctrl-C. Warns if the job may still run."""
    import asyncio

    progress.answer("Cancelling the job … Ctrl-C again exits at once.")
    client_id = (await pool.get_job(job_id)).client_id
    try:
        await pool.cancel(job_id)
        await pool.wait_for_record(job_id, _CANCEL_TIMEOUT_S)
    except TimeoutError:
        progress.warn(f"{client_id} did not confirm that it stopped the job, which may still run there.")
    except asyncio.CancelledError:
        progress.warn(f"did not wait until {client_id} stopped the job, which may still run there.")
        raise


async def _must_reach_one(pool: WorkflowPool, progress: RunProgress) -> None:
    from comfyfleet.pool.records import offline_words

    servers = (await pool.stats()).servers
    away = [server for server in servers if server.state != "online"]
    if len(away) == len(servers):
        states = "; ".join(
            f"{server.id} is offline: {server.reason or 'it does not answer'}" for server in servers
        )
        hint = ""
        urls = [server.url for server in servers if server.url]
        if without := [url for url in urls if not _has_port(url)]:
            hint = f" {', '.join(without)} has no port. ComfyUI's default is 8188, as in http://gpu:8188."
        raise CommandFailed(f"no server answers. {states}{hint}", ExitCode.UNREACHABLE)
    for server in away:
        progress.print_line(offline_words(server.id, server.reason))


def _has_port(url: str) -> bool:
    from urllib.parse import urlsplit

    return urlsplit(url if "://" in url else f"http://{url}").port is not None


@click.command("hash")
@click.argument("workflow", type=click.File("rb"))
@click.option("--service", metavar="NAME", help="WORKFLOW is a JSON file with the payload of this service.")
@as_json
def hash_command(workflow: BinaryIO, service: str | None, as_json: bool) -> None:
    """Show the hashes of a WORKFLOW file and what it needs.

    WORKFLOW is a file in ComfyUI's API format, a picture that ComfyUI saved, or - for standard input. Workflows that
    differ only in prompts, seeds and numbers have the same workflow hash. Failures are counted, and servers blocked,
    by workflow hash. The exact hash changes with every value.
    """
    from comfyfleet.model.payload import COMFYUI

    with naming_file(workflow.name):
        found = (
            _described(workflow)
            if service in (None, COMFYUI)
            else _payload_described(workflow, service or COMFYUI)
        )
    if as_json:
        print_json(found)
        return
    # One line for each item of a list, the name on the first.
    pairs: list[tuple[str, object]] = []
    for name, value in found.items():
        items = (value or [None]) if isinstance(value, list) else [value]
        pairs += [(name.replace("_", " ") if index == 0 else "", item) for index, item in enumerate(items)]
    print_pairs(pairs)


def _described(file: BinaryIO) -> dict[str, Any]:
    from comfyfleet.model.workflow import read_needs, read_workflow_file
    from comfyfleet.model.workflow_graph import parse_workflow
    from comfyfleet.model.workflow_hash import exact_hash, hash_workflow

    parsed = parse_workflow(read_workflow_file(file, file.name))
    needs = read_needs(parsed)
    return {
        "workflow_hash": hash_workflow(parsed),
        "exact_hash": exact_hash(parsed),
        "nodes": len(parsed.nodes),
        "node_classes": sorted(needs.node_classes),
        "models": sorted(needs.models),
        "input_files": sorted(needs.input_files),
    }


def _payload_described(file: BinaryIO, service: str) -> dict[str, Any]:
    from comfyfleet.model.payload import OpaqueFormat
    from comfyfleet.model.workflow import read_payload_file
    from comfyfleet.worker.connectors.registry import payload_formats

    reader = payload_formats().get(service) or OpaqueFormat(service)
    reading = reader.read(read_payload_file(file, file.name))
    return {
        "workflow_hash": reading.workflow_hash,
        "node_classes": sorted(reading.node_classes),
        "models": sorted(reading.models),
        "seeds": sorted(reading.seeds),
        "inputs": None if reading.inputs is None else sorted(reading.inputs),
    }


@click.command("convert")
@click.argument("workflow", type=click.File("rb"))
@settings(*HUB_SETTINGS)
def convert_command(workflow: BinaryIO, **flags: Any) -> None:
    """Print a WORKFLOW of the ComfyUI editor in the API format.

    A worker of the hub must have all of its nodes. `submit` and `run` convert by themselves; use this to see the node
    ids and inputs for --set.
    """
    from comfyfleet.cli.hub_connection import ask

    draft = WorkflowDraft(workflow, ())
    if draft.is_of_editor:
        draft.change(ask(flags, lambda client: client.convert(draft.graph)))
    print_json(draft.graph)
