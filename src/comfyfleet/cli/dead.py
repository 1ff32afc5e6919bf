"""`comfyfleet dead`: the jobs that failed for good."""

from __future__ import annotations

import sys
from typing import Any

import click

from comfyfleet.cli.endings import CommandFailed
from comfyfleet.cli.helping import group
from comfyfleet.cli.job_ids import whole_id
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo


@group("dead")
def command() -> None:
    """The dead letter: jobs that failed for good."""


@command.command("list")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@click.option("--cursor", metavar="ID", help="From this one on.")
@as_json
@settings(*TO_REACH)
def list_(limit: int, cursor: str | None, as_json: bool, **flags: Any) -> None:
    """List them."""
    from comfyfleet.cli.jobs import print_jobs
    from comfyfleet.cli.reach import ask, print_json

    page = ask(flags, lambda client: client.dead_letter(cursor, limit))
    if as_json:
        print_json(page)
        return
    print_jobs(page.jobs, "no job failed for good")
    if page.cursor is not None:
        echo(f"there is more: --cursor {page.cursor}", err=True)


@command.command("retry")
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...")
@as_json
@settings(*TO_REACH)
def retry(job_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Run them again."""
    from comfyfleet.cli.reach import ask, print_json
    from comfyfleet.client.fleet import FleetClient
    from comfyfleet.wire.answers import SubmittedBody

    async def each(client: FleetClient) -> list[SubmittedBody]:
        whole = [await whole_id(client, job_id) for job_id in job_ids]
        return [await client.retry_dead(job_id) for job_id in whole]

    found = ask(flags, each)
    if as_json:
        print_json(found)
        return
    for answer in found:
        echo(f"{answer.id} {answer.status}")


@command.command("purge")
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    metavar="HOURS",
    help="Only what ended so long ago; all unless given.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
@settings(*TO_REACH)
def purge(older_than: float | None, yes: bool, as_json: bool, **flags: Any) -> None:
    """Forget them, oldest first. They cannot be brought back."""
    import time

    from comfyfleet.cli.reach import ask, print_json
    from comfyfleet.client.fleet import FleetClient

    if not yes:
        # Where nobody can be asked the answer is no, not an interruption.
        is_asked = sys.stdin is not None and sys.stdin.isatty()
        if not (is_asked and click.confirm("Forget dead jobs for good?", err=True)):
            raise CommandFailed("nothing was forgotten; --yes does it without a question")
    before = None if older_than is None else time.time() - older_than * 3600

    async def all_of_them(client: FleetClient) -> int:
        purged = 0
        while count := await client.purge_dead(before, 10_000):
            purged += count
        return purged

    purged = ask(flags, all_of_them)
    if as_json:
        print_json({"purged": purged})
    else:
        echo(f"{purged} forgotten")
