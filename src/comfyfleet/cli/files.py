"""`comfyfleet files`: which files a hub keeps; deletes some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.helping import group
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo

if TYPE_CHECKING:
    from comfyfleet.client.fleet import FleetClient
    from comfyfleet.wire.files import FileView


@group("files")
def command() -> None:
    """List and delete the files that a hub keeps."""


@command.command("list")
@click.option(
    "--kind",
    type=click.Choice(["input", "output", "thumbnail"]),
    help="Only what was uploaded, what runs left, or thumbnails, which else are left out.",
)
@click.option("--job", "job_id", metavar="ID", help="Only what this job left.")
@click.option("--tenant", metavar="NAME", help="Only this tenant's.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, …"
)
@click.option("--cursor", metavar="ID", help="… from this one on.")
@as_json
@settings(*TO_REACH)
def list_(
    kind: str | None,
    job_id: str | None,
    tenant: str | None,
    limit: int,
    cursor: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """List files, the oldest first."""
    import time

    from comfyfleet.cli.reach import ago, ask, print_json, print_table

    wanted = {"kind": kind, "job_id": job_id, "tenant": tenant}
    files, after = ask(flags, lambda client: _list(client, wanted, limit, cursor))
    if as_json:
        print_json({"files": files, "cursor": after})
        return
    now = time.time()
    rows = [
        [
            file.id,
            file.kind,
            "–" if file.size is None else str(file.size),
            "whole" if file.is_complete else "expected",
            f"{ago(file.created_at, now)} ago",
            file.name,
            file.job_id or "–",
        ]
        for file in files
    ]
    print_table(
        ["file", "kind", "bytes", "state", "made", "name", "of job"], rows, empty="there are no such files"
    )
    if after is not None:
        echo(f"there is more: --cursor {after}", err=True)


async def _list(
    client: FleetClient, wanted: dict[str, Any], limit: int, cursor: str | None
) -> tuple[list[FileView], str | None]:
    found: list[FileView] = []
    while True:
        page = await client.files(**wanted, cursor=cursor, limit=min(1_000, limit - len(found)))
        found += page.files
        cursor = page.cursor
        if cursor is None or len(found) >= limit:
            return found, cursor


@command.command("delete")
@click.argument("file_ids", nargs=-1, required=True, metavar="FILE...")
@as_json
@settings(*TO_REACH)
def delete(file_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Delete files with their thumbnails; one that a job which has not ended needs is refused."""
    from comfyfleet.cli.reach import ask, print_json

    async def each(client: FleetClient) -> None:
        for file_id in file_ids:
            await client.delete_file(file_id)
            if not as_json:
                echo(f"{file_id} deleted")

    ask(flags, each)
    if as_json:
        print_json({"deleted": file_ids})
