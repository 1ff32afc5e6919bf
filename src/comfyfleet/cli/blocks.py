"""`comfyfleet blocks`: which worker is kept from which workflow, whose, and how that is lifted."""

from __future__ import annotations

from typing import Any

import click

from comfyfleet.cli.helping import group
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo


@group("blocks", invoke_without_command=True)
@as_json
@settings(*TO_REACH)
@click.pass_context
def command(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """List what is blocked, or lift a block.

    The worker `*` stands for every worker: servers died while they ran that workflow, and it is refused to its tenant
    until it is lifted here. All other blocks end by themselves.
    """
    if context.invoked_subcommand is not None:
        if as_json or any(flags.values()):
            raise click.UsageError(f"put the options behind `{context.invoked_subcommand}`")
        return
    _list(as_json, flags)


@command.command("list")
@as_json
@settings(*TO_REACH)
def list_(as_json: bool, **flags: Any) -> None:
    """List the blocks; so does `comfyfleet blocks` alone."""
    _list(as_json, flags)


def _list(as_json: bool, flags: dict[str, Any]) -> None:
    import time

    from comfyfleet.cli.reach import ask, print_json, print_table

    blocks = ask(flags, lambda client: client.blocks())
    if as_json:
        print_json(blocks)
        return
    now = time.time()
    rows = [
        [
            block.worker_id,
            block.target,
            "one job" if block.workflow_hash is None else block.tenant or "everybody",
            f"{block.reason}: lacks {', '.join(block.missing)}" if block.missing else block.reason,
            "until lifted" if block.blocked_until is None else f"{max(0.0, block.blocked_until - now):.0f} s",
        ]
        for block in blocks
    ]
    print_table(["worker", "target", "counts for", "reason", "left"], rows, empty="nothing is blocked")


@command.command("lift")
@click.argument("worker_id", metavar="WORKER")
@click.argument("target")
@as_json
@settings(*TO_REACH)
def lift(worker_id: str, target: str, as_json: bool, **flags: Any) -> None:
    """Lift a block by hand, as the list names it. A workflow hash alone lifts it for every tenant.

    Quote the worker that stands for all: comfyfleet blocks lift '*' TARGET
    """
    from comfyfleet.cli.reach import ask, print_json

    ask(flags, lambda client: client.lift_block(worker_id, target))
    if as_json:
        print_json({"worker_id": worker_id, "target": target, "lifted": True})
        return
    echo(f"lifted {target} for {'every worker' if worker_id == '*' else worker_id}")
