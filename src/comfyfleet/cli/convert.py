"""`comfyfleet convert`: a workflow as the editor saves it, made into the graph that servers run, by a hub."""

from __future__ import annotations

from typing import Any, BinaryIO

import click

from comfyfleet.cli.options import TO_REACH, settings


@click.command("convert")
@click.argument("workflow", type=click.File("rb"))
@settings(*TO_REACH)
def command(workflow: BinaryIO, **flags: Any) -> None:
    """Print a WORKFLOW of the ComfyUI editor in the API format.

    A worker of the hub must have all of its nodes. `submit` and `run` convert by themselves; this shows the ids and
    the inputs that --set takes.
    """
    from comfyfleet.cli.reach import ask, print_json
    from comfyfleet.cli.run import Draft

    draft = Draft(workflow, ())
    if draft.is_of_editor:
        draft.change(ask(flags, lambda client: client.convert(draft.graph)))
    print_json(draft.graph)
