"""`comfyfleet credits`: what tenants have, what they are given, and every entry of their books.

`comfyfleet usage`: what tenants' jobs took, added up by tenant, workflow, worker and day.

`comfyfleet reconcile`: where the store and tenants' databases differ.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from comfyfleet.cli.command_help import group
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import echo


def _said(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """An empty id is a script's unset variable: sent again it would give again, where one id is to give once."""
    if value == "":
        raise click.BadParameter("it is empty; write your own id, or leave --id out", context, parameter)
    return value


@group("credits")
def credits_command() -> None:
    """Give credits to tenants, put books right, read them."""


@credits_command.command("balance")
@click.argument("tenant_id")
@as_json
@settings(*TO_REACH)
def balance(tenant_id: str, as_json: bool, **flags: Any) -> None:
    """What a tenant has, what of it is held, what is pending."""
    from comfyfleet.cli.hub_connection import ask, plain, print_json, print_pairs

    found = ask(flags, lambda client: client.balance(tenant_id))
    if as_json:
        print_json(found)
    else:
        print_pairs(list(plain(found).items()))


@credits_command.command("grant")
@click.argument("tenant_id")
@click.argument("amount", type=click.IntRange(1))
@click.option(
    "--id",
    "grant_id",
    metavar="TEXT",
    callback=_said,
    help="Your own, such as a payment's: the same one twice is one grant. Without it each call is another grant.",
)
@click.option("--note", default="", metavar="TEXT", help="What for; it stands in the book.")
@click.option("--pending", is_flag=True, help="Not to be spent until it is confirmed.")
@as_json
@settings(*TO_REACH)
def grant(
    tenant_id: str,
    amount: int,
    grant_id: str | None,
    note: str,
    pending: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Give AMOUNT credits."""
    from comfyfleet.cli.hub_connection import ask, print_json

    made = ask(
        flags,
        lambda client: client.grant_credits(tenant_id, amount, grant_id=grant_id, note=note, pending=pending),
    )
    if as_json:
        print_json(made)
    else:
        echo(f"{made.id}: {made.amount} {made.state.value}")


def _deciding(name: str, text: str, method: str) -> None:
    @credits_command.command(name, help=text)
    @click.argument("tenant_id")
    @click.argument("grant_id")
    @as_json
    @settings(*TO_REACH)
    def decide(tenant_id: str, grant_id: str, as_json: bool, **flags: Any) -> None:
        from comfyfleet.cli.hub_connection import ask, print_json

        decided = ask(flags, lambda client: getattr(client, method)(tenant_id, grant_id))
        if as_json:
            print_json(decided)
        else:
            echo(f"{decided.id}: {decided.amount} {decided.state.value}")


_deciding("confirm", "A pending grant may be spent from now on.", "confirm_grant")
_deciding("void", "A pending grant comes to nothing.", "void_grant")


@credits_command.command("adjust", context_settings={"ignore_unknown_options": True})
@click.argument("tenant_id")
@click.argument("amount", type=int)
@click.option("--note", required=True, metavar="TEXT", help="Why.")
@click.option(
    "--id",
    "adjustment_id",
    metavar="TEXT",
    callback=_said,
    help="Your own: the same one twice is one adjustment. Without it each call is another one.",
)
@as_json
@settings(*TO_REACH)
def adjust(
    tenant_id: str, amount: int, note: str, adjustment_id: str | None, as_json: bool, **flags: Any
) -> None:
    """Put a book right by AMOUNT, up or (as -5) down."""
    from comfyfleet.cli.hub_connection import ask, print_json

    after = ask(
        flags,
        lambda client: client.adjust_credits(tenant_id, amount, note, adjustment_id=adjustment_id),
    )
    if as_json:
        print_json(after)
    else:
        echo(f"{after.tenant} has {after.balance}, of which {after.available} are available")


@credits_command.command("grants")
@click.argument("tenant_id")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many."
)
@as_json
@settings(*TO_REACH)
def grants(tenant_id: str, limit: int, as_json: bool, **flags: Any) -> None:
    """What was granted in the order of time, pending and void ones included."""
    from comfyfleet.cli.hub_connection import ask, print_json, print_table

    found = ask(flags, lambda client: client.grants(tenant_id, limit=limit)).grants
    if as_json:
        print_json(found)
        return
    rows = [[each.id, str(each.amount), each.state.value, when(each.at), each.note] for each in found]
    print_table(["grant", "amount", "state", "at", "note"], rows, empty="nothing was granted")


@credits_command.command("statement")
@click.argument("tenant_id")
@click.option("--after", type=click.IntRange(0), default=0, metavar="NUMBER", help="What follows this entry.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most so many."
)
@as_json
@settings(*TO_REACH)
def statement(tenant_id: str, after: int, limit: int, as_json: bool, **flags: Any) -> None:
    """The entries of a tenant's book in their order, each with the balance after it."""
    from comfyfleet.cli.hub_connection import ask, print_json, print_table

    found = ask(flags, lambda client: client.statement(tenant_id, after, limit)).entries
    if as_json:
        print_json(found)
        return
    rows = [
        [
            str(each.number),
            when(each.at),
            each.kind.value,
            f"{each.balance:+d}",
            f"{each.held:+d}",
            str(each.balance_after),
            str(each.held_after),
            each.reference,
            each.note,
        ]
        for each in found
    ]
    heads = ["number", "at", "kind", "change", "of held", "balance", "held", "for", "note"]
    print_table(heads, rows, empty="there are no entries")


@credits_command.command("export")
@click.argument("tenant_id")
@click.option(
    "--of",
    type=click.Choice(["postings", "runs"]),
    default="postings",
    show_default=True,
    help="The entries of the book, or what each ended round took.",
)
@click.option("--format", "form", type=click.Choice(["csv", "jsonl"]), default="csv", show_default=True)
@click.option(
    "--after", type=click.IntRange(0), default=0, metavar="NUMBER", help="What follows this number."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Into this file, which must not be there yet; standard output unless given.",
)
@settings(*TO_REACH)
def export(tenant_id: str, of: Any, form: Any, after: int, out: Path | None, **flags: Any) -> None:
    """A tenant's book line by line for accounting. Two exports join: the second goes on --after the first's last."""
    from comfyfleet.cli.hub_connection import ask, save, show

    last = ask(
        flags,
        lambda client: (show if out is None else partial(save, out))(
            client.export(tenant_id, of=of, format=form, after=after), form
        ),
    )
    if last is None:
        echo(f"there is nothing behind number {after}", err=True)
    else:
        echo(f"up to number {last}; go on with --after {last}", err=True)


def when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


@click.command("usage")
@click.option("--tenant", metavar="ID", help="Of one tenant; of all unless given.")
@click.option(
    "--by",
    type=click.Choice(["tenant", "workflow", "worker", "day"]),
    multiple=True,
    help="For each of what it is added up; tenant unless given. Repeatable.",
)
@click.option(
    "--days", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="How far back."
)
@click.option(
    "--since",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]),
    help="From then on (UTC), instead of --days.",
)
@click.option("--until", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]), help="Up to then (UTC).")
@as_json
@settings(*TO_REACH)
def usage_command(
    tenant: str | None, by: tuple[str, ...], days: float, since: Any, until: Any, as_json: bool, **flags: Any
) -> None:
    """What ended rounds took: GPU-seconds, credits, and what they cost by the workers' rates."""
    import time
    from datetime import UTC

    from comfyfleet.cli.hub_connection import ask, print_json, print_table

    end = None if until is None else until.replace(tzinfo=UTC).timestamp()
    start = (end or time.time()) - days * 86400 if since is None else since.replace(tzinfo=UTC).timestamp()
    found = ask(
        flags,
        lambda client: client.usage(tenant=tenant, since=start, until=end, by=by or ("tenant",)),
    )
    if as_json:
        print_json(found)
        return
    chosen = dict.fromkeys(by or ("tenant",))
    names = {"tenant": "tenant", "workflow": "workflow_hash", "worker": "worker_id", "day": "day"}
    rows = [
        [
            *(str(getattr(each, names[name]) or "–") for name in chosen),
            str(each.rounds),
            str(each.completed),
            str(each.outputs),
            f"{each.gpu_s:.1f}",
            str(each.credits),
            "–" if each.cost is None else f"{each.cost:.4f}",
        ]
        for each in found.usage
    ]
    heads = [*chosen, "rounds", "completed", "outputs", "GPU s", "credits", "cost"]
    print_table(heads, rows, empty="nothing was used in that time")


@click.command("reconcile")
@click.option("--dry-run", "is_dry", is_flag=True, help="Show what would be mended, and change nothing.")
@as_json
@settings(*TO_REACH)
def reconcile_command(is_dry: bool, as_json: bool, **flags: Any) -> None:
    """Compare the store with tenants' databases, and mend what a crash left between them.

    Hubs do so by themselves when they start and every minute. Books are added up too; one that is wrong, and whatever
    else somebody has to look at, is told and left alone. The exit status is 1 if there is such a thing.
    """
    from comfyfleet.cli.exit_codes import ExitCode
    from comfyfleet.cli.hub_connection import ask, print_json, print_table

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
