"""`comfyfleet webhook`: where a hub sends the events of jobs, the secret that signs them, and what was delivered."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.command import collect_all, group, hub_options, limit_option, report, whole_id
from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.output import ago, echo, print_table

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.webhooks import DeliveryView, WebhookTested, WebhookView


_every_tenant = click.option(
    "--every-tenant", is_flag=True, help="For the jobs of all tenants. Needs an operator's key."
)


@group("webhook")
def webhook_command() -> None:
    """Send events of jobs to a URL, and see what was delivered."""


@webhook_command.command("add")
@click.argument("url")
@click.option(
    "--event",
    "events",
    multiple=True,
    metavar="NAME",
    help="Such as queued, leased or retrying. Default: completed, failed and cancelled. Repeatable.",
)
@click.option("--name", "label", default="", metavar="TEXT", help="What the webhook is for.")
@_every_tenant
@hub_options
def add(url: str, events: tuple[str, ...], label: str, every_tenant: bool, **flags: Any) -> None:
    """Send the events of every job submitted from now on to URL."""
    _check_events(events)

    def show(made: WebhookView) -> None:
        echo(made.id)
        option = " --every-tenant" if every_tenant else ""
        echo(
            f"Deliveries are signed. `comfyfleet webhook secret{option}` makes the secret to verify them.",
            err=True,
        )

    report(
        flags,
        lambda client: client.create_webhook(
            url, events=events or None, name=label, every_tenant=every_tenant
        ),
        show,
    )


def _check_events(events: tuple[str, ...]) -> None:
    from comfyfleet.model.fact import FactKind

    known = [kind.value for kind in FactKind]
    for event in events:
        if event not in known:
            raise click.BadParameter(f"{event!r} is not one of {', '.join(known)}", param_hint="--event")


@webhook_command.command("set")
@click.argument("webhook_id")
@click.option("--url", metavar="URL", help="The new address.")
@click.option(
    "--event", "events", multiple=True, metavar="NAME", help="Replaces the events before. Repeatable."
)
@click.option("--name", "label", metavar="TEXT", help="What the webhook is for.")
@hub_options
def set_(webhook_id: str, url: str | None, events: tuple[str, ...], label: str | None, **flags: Any) -> None:
    """Change a webhook. What you do not give stays as it is."""
    if url is None and not events and label is None:
        raise click.UsageError("Nothing to change: give --url, --event or --name.")
    _check_events(events)
    report(
        flags,
        lambda client: client.change_webhook(webhook_id, url=url, events=events or None, name=label),
        lambda changed: echo(f"{changed.id} sends {', '.join(changed.events)} to {changed.url}"),
    )


@webhook_command.command("test")
@click.argument("webhook_id")
@hub_options
def test(webhook_id: str, **flags: Any) -> None:
    """Send a test delivery now and print the answer. Exit code 1 means that the receiver did not accept it."""

    def show(tested: WebhookTested) -> None:
        if tested.is_delivered:
            echo(f"{tested.url} answered {tested.status} after {tested.seconds:.1f} s")

    tested = report(flags, lambda client: client.test_webhook(webhook_id), show)
    if not tested.is_delivered:
        why = tested.error or f"it answered {tested.status}, which is not 2xx"
        raise CommandFailed(f"{tested.url} did not accept the test delivery: {why}")


@webhook_command.command("list")
@hub_options
def list_webhooks(**flags: Any) -> None:
    """List every webhook."""

    def show(found: list[WebhookView]) -> None:
        rows = [[each.id, each.url, each.events, each.tenant or "every tenant", each.name] for each in found]
        print_table(["webhook", "url", "events", "of", "name"], rows, empty="There are no webhooks.")

    report(
        flags,
        lambda client: collect_all(client.webhooks, lambda page: page.webhooks),
        show,
    )


@webhook_command.command("remove")
@click.argument("webhook_id")
@hub_options
def remove(webhook_id: str, **flags: Any) -> None:
    """Remove a webhook. It gets nothing new."""
    report(
        flags,
        lambda client: client.delete_webhook(webhook_id),
        lambda _: echo(f"{webhook_id} removed"),
        json=lambda _: {"removed": webhook_id},
    )


@webhook_command.command("secret")
@click.option(
    "--overlap",
    type=click.FloatRange(0),
    default=86400.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the old secret signs too.",
)
@_every_tenant
@hub_options
def secret(overlap: float, every_tenant: bool, **flags: Any) -> None:
    """Make a new secret that signs deliveries and print it, once."""
    report(
        flags,
        lambda client: client.rotate_webhook_secret(overlap, every_tenant=every_tenant),
        lambda made: echo(made.secret),
    )


@webhook_command.command("deliveries")
@click.argument("job_id", required=False)
@click.option("--status", type=click.Choice(["pending", "delivered", "given_up"]))
@limit_option(100, 1000)
@hub_options
def deliveries(job_id: str | None, status: str | None, limit: int, **flags: Any) -> None:
    """List deliveries, of JOB_ID or of all jobs: delivered, pending or given up."""

    async def find(client: FleetClient) -> list[DeliveryView]:
        found: list[DeliveryView] = []
        whole = None if job_id is None else await whole_id(client, job_id)
        page = await client.deliveries(whole, status=status, limit=limit)
        while True:
            found += [each for each in page.deliveries if status in (None, each.status)]
            if page.cursor is None or len(found) >= limit:
                return found[:limit]
            page = await client.deliveries(status=status, cursor=page.cursor, limit=limit)

    report(flags, find, _print_deliveries)


def _print_deliveries(found: list[DeliveryView]) -> None:
    now = time.time()
    rows = [
        [
            each.id,
            each.event,
            each.status.value,
            each.attempts,
            None if each.last_at is None else f"{ago(each.last_at, now)} ago",
            each.url,
            each.last_error or "",
        ]
        for each in found
    ]
    headings = ["delivery", "event", "status", "attempts", "last", "url", "error"]
    print_table(headings, rows, empty="There are no deliveries.")


@webhook_command.command("resend")
@click.argument("delivery_ids", nargs=-1, required=True, metavar="DELIVERY...")
@hub_options
def resend(delivery_ids: tuple[str, ...], **flags: Any) -> None:
    """Send deliveries again at once, whatever their status."""

    async def send(client: FleetClient) -> list[DeliveryView]:
        return [await client.resend_delivery(delivery_id) for delivery_id in delivery_ids]

    report(flags, send, lambda found: echo("\n".join(f"{each.id} is sent again" for each in found)))
