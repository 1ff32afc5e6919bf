"""`comfyfleet hash`: what a workflow is and what it needs, without any server."""

from __future__ import annotations

from typing import BinaryIO

import click

from comfyfleet.cli.endings import about
from comfyfleet.cli.printing import echo


@click.command("hash")
@click.argument("workflow", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(workflow: BinaryIO, as_json: bool) -> None:
    """Show the hashes of a WORKFLOW file and what it needs.

    WORKFLOW is a file in ComfyUI's API format, a picture that ComfyUI saved, or - for standard input. Workflows that
    differ only in prompts, seeds and numbers have the same structural hash: failures are counted, and servers blocked,
    for each structural hash. The exact hash differs with every value.
    """
    from comfyfleet.model.workflow import exact_hash, hash_workflow, parse_workflow, read_needs
    from comfyfleet.model.workflow_files import read_workflow_file

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
