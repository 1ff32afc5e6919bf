"""`comfyfleet jobs`: which jobs a hub has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.types import StringParamType

from comfyfleet.cli import helping
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

    from comfyfleet.client.fleet import FleetClient
    from comfyfleet.wire.answers import JobBody


class Status(StringParamType):
    """A status in any of the words that the hub understands."""

    name = "status"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from comfyfleet.model.errors import Refusal
        from comfyfleet.wire.spelling import spell, understood

        try:
            return spell(understood(value))
        except Refusal as error:
            self.fail(error.message, param, ctx)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from comfyfleet.wire.spelling import KNOWN_STATUSES

        return [CompletionItem(each) for each in KNOWN_STATUSES if each.startswith(incomplete)]


_SHOWN = 60
"""Characters of an error in a list."""


@helping.command("jobs")
@click.option(
    "--status",
    type=Status(),
    help="Only those: queued, leased (or running), completed, failed, cancelled.",
)
@click.option(
    "--since",
    type=click.FloatRange(0, min_open=True),
    metavar="HOURS",
    help="Only those submitted since then.",
)
@click.option("--tenant", metavar="NAME", help="Only this tenant's.")
@click.option("--workflow", "workflow_hash", metavar="HASH", help="Only those of this workflow hash.")
@click.option(
    "--metadata", "labels", multiple=True, metavar="NAME=VALUE", help="Only those labelled so. Repeatable."
)
@click.option("--unrunnable", is_flag=True, help="Only those that wait though no worker can run them.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, …"
)
@click.option("--cursor", metavar="ID", help="… from this one on.")
@click.option(
    "--order",
    type=click.Choice(["newest", "oldest"]),
    default="newest",
    show_default=True,
    help="Which come first.",
)
@as_json
@settings(*TO_REACH)
def command(
    status: str | None,
    since: float | None,
    tenant: str | None,
    workflow_hash: str | None,
    labels: tuple[str, ...],
    unrunnable: bool,
    limit: int,
    cursor: str | None,
    order: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """List jobs by submission, the newest first."""
    import time

    from comfyfleet.cli.reach import ask, print_json
    from comfyfleet.cli.submit import label

    wanted = {
        "status": status,
        "tenant": tenant,
        "workflow_hash": workflow_hash,
        "submitted_after": None if since is None else time.time() - since * 3600,
        "metadata": dict(map(label, labels)),
        "unrunnable": unrunnable,
        "order": order,
    }
    jobs, after = ask(flags, lambda client: _list(client, wanted, limit, cursor))
    if as_json:
        print_json({"jobs": jobs, "cursor": after})
        return
    print_jobs(jobs, "there are no such jobs")
    if after is not None:
        echo(f"there is more: --cursor {after}", err=True)


async def _list(
    client: FleetClient, wanted: dict[str, Any], limit: int, cursor: str | None
) -> tuple[list[JobBody], str | None]:
    found: list[JobBody] = []
    while True:
        page = await client.jobs(**wanted, cursor=cursor, limit=min(1_000, limit - len(found)))
        found += page.jobs
        cursor = page.cursor
        if cursor is None or len(found) >= limit:
            return found, cursor


def print_jobs(jobs: Sequence[JobBody], empty: str) -> None:
    import time

    from comfyfleet.cli.job_ids import short_ids
    from comfyfleet.cli.reach import ago, print_table

    now = time.time()
    rows = [
        [
            job.id,
            job.status,
            str(job.priority),
            job.worker_id or "–",
            ago(job.submitted_at, now),
            "" if job.error is None else f"{job.error.kind.value}: {_beginning(job.error.message)}",
        ]
        for job in jobs
    ]
    short = short_ids(job.id for job in jobs)
    print_table(["job", "status", "prio", "worker", "age", "error"], rows, empty=empty, short=short)


def _beginning(message: str) -> str:
    """On one line; `job show` has the rest."""
    line = " ".join(message.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
