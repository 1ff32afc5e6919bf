"""`comfyfleet reconcile`: where the store and tenants' databases differ."""

from __future__ import annotations

from typing import Any

import click

from comfyfleet.cli.options import TO_REACH, as_json, settings


@click.command("reconcile")
@click.option("--dry-run", "is_dry", is_flag=True, help="Show what would be mended, and change nothing.")
@as_json
@settings(*TO_REACH)
def command(is_dry: bool, as_json: bool, **flags: Any) -> None:
    """Compare the store with tenants' databases, and mend what a crash left between them.

    Hubs do so by themselves when they start and every minute. Books are added up too; one that is wrong, and whatever
    else somebody has to look at, is told and left alone. The exit status is 1 if there is such a thing.
    """
    from comfyfleet.cli.endings import ExitCode
    from comfyfleet.cli.reach import ask, print_json, print_table

    found = ask(flags, lambda client: client.differences() if is_dry else client.reconcile())
    if as_json:
        print_json(found)
    else:
        print_table(
            ["finding", "tenant", "", "what"],
            [
                [each.kind, each.tenant, _remedy(each.mends_itself, found.is_mended), each.message]
                for each in found.findings
            ],
            empty="the store and tenants' databases agree, and every book adds up",
        )
    if not all(each.mends_itself for each in found.findings):
        raise SystemExit(ExitCode.FAILED)


def _remedy(mends_itself: bool, is_mended: bool) -> str:
    if not mends_itself:
        return "look at it"
    return "mended" if is_mended else "would be mended"
