"""`comfyfleet webhook`: who is told of jobs over HTTP, the secret that signs it, and what was delivered.

`comfyfleet files`: which files a hub keeps; deletes some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.command_help import group
from comfyfleet.cli.completion import whole_id
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.files import FileView
    from comfyfleet.wire.webhooks import DeliveryView, WebhookView


_every_tenant = click.option(
    "--every-tenant", is_flag=True, help="Of the hub itself, for all tenants' jobs; operators may."
)


@group("webhook")
def webhook_command() -> None:
    """Deliver facts of jobs to a URL, and see what was delivered."""


@webhook_command.command("add")
@click.argument("url")
@click.option(
    "--event",
    "events",
    multiple=True,
    metavar="NAME",
    help="Such as queued, leased or retrying; completed, failed and cancelled unless given. Repeatable.",
)
@click.option("--name", "label", default="", metavar="TEXT", help="What it is for.")
@_every_tenant
@as_json
@settings(*TO_REACH)
def add(
    url: str, events: tuple[str, ...], label: str, every_tenant: bool, as_json: bool, **flags: Any
) -> None:
    """Deliver facts of every job that is submitted from now on to URL."""
    from comfyfleet.cli.hub_connection import ask, print_json

    _check_events(events)
    made = ask(
        flags,
        lambda client: client.create_webhook(
            url, events=events or None, name=label, every_tenant=every_tenant
        ),
    )
    if as_json:
        print_json(made)
    else:
        echo(made.id)
        whose = " --every-tenant" if every_tenant else ""
        echo(
            f"Deliveries are signed: `comfyfleet webhook secret{whose}` makes a secret to verify them with",
            err=True,
        )


def _check_events(events: tuple[str, ...]) -> None:
    from comfyfleet.model.fact import FactKind

    unknown = [event for event in events if event not in {kind.value for kind in FactKind}]
    if unknown:
        known = ", ".join(kind.value for kind in FactKind)
        raise click.BadParameter(f"{unknown[0]!r} is not one of {known}", param_hint="--event")


@webhook_command.command("set")
@click.argument("webhook_id")
@click.option("--url", metavar="URL", help="Where facts go from now on.")
@click.option(
    "--event", "events", multiple=True, metavar="NAME", help="In place of those before. Repeatable."
)
@click.option("--name", "label", metavar="TEXT", help="What it is for.")
@as_json
@settings(*TO_REACH)
def set_(
    webhook_id: str, url: str | None, events: tuple[str, ...], label: str | None, as_json: bool, **flags: Any
) -> None:
    """Change a webhook; what is not given stays as it is."""
    from comfyfleet.cli.hub_connection import ask, print_json

    if url is None and not events and label is None:
        raise click.UsageError("say what to change: --url, --event or --name")
    _check_events(events)
    changed = ask(
        flags,
        lambda client: client.change_webhook(webhook_id, url=url, events=events or None, name=label),
    )
    if as_json:
        print_json(changed)
    else:
        echo(f"{changed.id} hears of {', '.join(changed.events)} at {changed.url}")


@webhook_command.command("test")
@click.argument("webhook_id")
@as_json
@settings(*TO_REACH)
def test(webhook_id: str, as_json: bool, **flags: Any) -> None:
    """Send a test delivery now, and say what the receiver answered; ends with 1 if it did not take it."""
    from comfyfleet.cli.exit_codes import CommandFailed
    from comfyfleet.cli.hub_connection import ask, print_json

    tested = ask(flags, lambda client: client.test_webhook(webhook_id))
    if as_json:
        print_json(tested)
    elif tested.is_delivered:
        echo(f"{tested.url} answered {tested.status} after {tested.seconds:.1f} s")
    if not tested.is_delivered:
        why = tested.error or f"it answered {tested.status}, which is not 2xx"
        raise CommandFailed(f"{tested.url} did not take the test delivery: {why}")


@webhook_command.command("list")
@as_json
@settings(*TO_REACH)
def list_webhooks(as_json: bool, **flags: Any) -> None:
    """Every standing webhook."""
    from comfyfleet.cli.hub_connection import ask, print_json, print_table

    async def every(client: FleetClient) -> list[WebhookView]:
        page = await client.webhooks()
        found = list(page.webhooks)
        while page.cursor is not None:
            page = await client.webhooks(page.cursor)
            found += page.webhooks
        return found

    found = ask(flags, every)
    if as_json:
        print_json(found)
        return
    rows = [
        [each.id, each.url, ", ".join(each.events), each.tenant or "every tenant", each.name]
        for each in found
    ]
    print_table(["webhook", "url", "events", "of", "name"], rows, empty="there are no standing webhooks")


@webhook_command.command("remove")
@click.argument("webhook_id")
@as_json
@settings(*TO_REACH)
def remove(webhook_id: str, as_json: bool, **flags: Any) -> None:
    """Deliver nothing new to it."""
    from comfyfleet.cli.hub_connection import ask, print_json

    ask(flags, lambda client: client.delete_webhook(webhook_id))
    if as_json:
        print_json({"removed": webhook_id})
    else:
        echo(f"{webhook_id} removed")


@webhook_command.command("secret")
@click.option(
    "--overlap",
    type=click.FloatRange(0),
    default=86400.0,
    show_default=True,
    metavar="SECONDS",
    help="So long the one before it signs too.",
)
@_every_tenant
@as_json
@settings(*TO_REACH)
def secret(overlap: float, every_tenant: bool, as_json: bool, **flags: Any) -> None:
    """Make a new secret that signs deliveries and print it, this once."""
    from comfyfleet.cli.hub_connection import ask, print_json

    made = ask(flags, lambda client: client.rotate_webhook_secret(overlap, every_tenant=every_tenant))
    if as_json:
        print_json(made)
    else:
        echo(made.secret)


@webhook_command.command("deliveries")
@click.argument("job_id", required=False)
@click.option("--status", type=click.Choice(["pending", "delivered", "given_up"]))
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many."
)
@as_json
@settings(*TO_REACH)
def deliveries(job_id: str | None, status: str | None, limit: int, as_json: bool, **flags: Any) -> None:
    """What was delivered, is tried again, or was given up: of JOB_ID, or of all jobs."""
    import time

    from comfyfleet.cli.hub_connection import ago, ask, print_json, print_table

    async def some(client: FleetClient) -> list[DeliveryView]:
        found: list[DeliveryView] = []
        whole = None if job_id is None else await whole_id(client, job_id)
        page = await client.deliveries(whole, status=status, limit=limit)
        while True:
            found += [each for each in page.deliveries if status in (None, each.status)]
            if page.cursor is None or len(found) >= limit:
                return found[:limit]
            page = await client.deliveries(status=status, cursor=page.cursor, limit=limit)

    found = ask(flags, some)
    if as_json:
        print_json(found)
        return
    now = time.time()
    rows = [
        [
            each.id,
            each.event,
            each.status.value,
            str(each.attempts),
            "–" if each.last_at is None else f"{ago(each.last_at, now)} ago",
            each.url,
            each.last_error or "",
        ]
        for each in found
    ]
    heads = ["delivery", "event", "status", "attempts", "last", "url", "error"]
    print_table(heads, rows, empty="there are no deliveries")


@webhook_command.command("resend")
@click.argument("delivery_ids", nargs=-1, required=True, metavar="DELIVERY...")
@as_json
@settings(*TO_REACH)
def resend(delivery_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Deliver once more, at once, whatever became of it."""
    from comfyfleet.cli.hub_connection import ask, print_json

    async def each(client: FleetClient) -> list[DeliveryView]:
        return [await client.resend_delivery(delivery_id) for delivery_id in delivery_ids]

    found = ask(flags, each)
    if as_json:
        print_json(found)
    else:
        for delivery in found:
            echo(f"{delivery.id} is sent again")


@group("files")
def files_command() -> None:
    """List and delete the files that a hub keeps."""


@files_command.command("list")
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
def list_files(
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

    from comfyfleet.cli.hub_connection import ago, ask, print_json, print_table

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


@files_command.command("delete")
@click.argument("file_ids", nargs=-1, required=True, metavar="FILE...")
@as_json
@settings(*TO_REACH)
def delete(file_ids: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Delete files with their thumbnails; one that a job which has not ended needs is refused."""
    from comfyfleet.cli.hub_connection import ask, print_json

    async def each(client: FleetClient) -> None:
        for file_id in file_ids:
            await client.delete_file(file_id)
            if not as_json:
                echo(f"{file_id} deleted")

    ask(flags, each)
    if as_json:
        print_json({"deleted": file_ids})
