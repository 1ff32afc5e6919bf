"""`comfyfleet credits`, `usage` and `reconcile`: the ledgers of tenants, what their jobs used, and repairs."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from comfyfleet.cli.command import group, hub_options, limit_option, report
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.options import DATE, HUB_SETTINGS, DurationOrDateParam, settings
from comfyfleet.cli.output import echo, plain, print_pairs, print_table

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.credits import BalanceView, GrantList, GrantView, StatementView, UsageList
    from comfyfleet.wire.tenants import FindingList

F = TypeVar("F", bound=Callable[..., Any])


def _not_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """An empty id comes from an unset variable of a script. Without an id, each call grants again."""
    if value == "":
        raise click.BadParameter("it is empty. Write your own id, or omit --id.", context, parameter)
    return value


def _after_option(what: str) -> Callable[[F], F]:
    return click.option(
        "--after", type=click.IntRange(0), default=0, metavar="NUMBER", help=f"Only {what} after this number."
    )


@group("credits")
def credits_command() -> None:
    """Grant credits to tenants, adjust and read their ledgers."""


@credits_command.command("balance")
@click.argument("tenant_id")
@hub_options
def balance(tenant_id: str, **flags: Any) -> None:
    """Show a tenant's credits: all, held and pending."""
    report(flags, lambda client: client.balance(tenant_id), lambda found: print_pairs(plain(found)))


@credits_command.command("grant")
@click.argument("tenant_id")
@click.argument("amount", type=click.IntRange(1))
@click.option(
    "--id",
    "grant_id",
    metavar="TEXT",
    callback=_not_empty,
    help="Your own id, such as a payment's. The same id again is the same grant; without an id each call grants again.",
)
@click.option("--note", default="", metavar="TEXT", help="What for. The ledger keeps it.")
@click.option("--pending", is_flag=True, help="The tenant cannot spend it until you confirm it.")
@hub_options
def grant(tenant_id: str, amount: int, grant_id: str | None, note: str, pending: bool, **flags: Any) -> None:
    """Grant AMOUNT credits."""

    async def give(client: FleetClient) -> tuple[GrantView, BalanceView]:
        made = await client.grant_credits(tenant_id, amount, grant_id=grant_id, note=note, pending=pending)
        return made, await client.balance(tenant_id)

    def show(found: tuple[GrantView, BalanceView]) -> None:
        made, after = found
        # An id that was used before is the grant of that time, and nothing was added now.
        echo(
            f"{made.id}: {made.amount} {made.state.value} at {when(made.at)}. "
            f"{after.tenant} has {after.balance}, of which {after.available} are available"
        )

    report(flags, give, show, json=lambda found: found[0])


def _print_grant(grant: GrantView) -> None:
    echo(f"{grant.id}: {grant.amount} {grant.state.value}")


def _add_decision(name: str, text: str, method: str) -> None:
    @credits_command.command(name, help=text)
    @click.argument("tenant_id")
    @click.argument("grant_id")
    @hub_options
    def decide(tenant_id: str, grant_id: str, **flags: Any) -> None:
        report(flags, lambda client: getattr(client, method)(tenant_id, grant_id), _print_grant)


_add_decision("confirm", "Let the tenant spend a pending grant.", "confirm_grant")
_add_decision("void", "Discard a pending grant.", "void_grant")


@credits_command.command("adjust", context_settings={"ignore_unknown_options": True})
@click.argument("tenant_id")
@click.argument("amount", type=int)
@click.option("--note", required=True, metavar="TEXT", help="Why.")
@click.option(
    "--id",
    "adjustment_id",
    metavar="TEXT",
    callback=_not_empty,
    help="Your own id. The same id again is the same adjustment; without an id each call adjusts again.",
)
@hub_options
def adjust(tenant_id: str, amount: int, note: str, adjustment_id: str | None, **flags: Any) -> None:
    """Correct a ledger by AMOUNT, up or (as -5) down."""
    report(
        flags,
        lambda client: client.adjust_credits(tenant_id, amount, note, adjustment_id=adjustment_id),
        lambda after: echo(f"{after.tenant} has {after.balance}, of which {after.available} are available"),
    )


@credits_command.command("grants")
@click.argument("tenant_id")
@limit_option(100, 1000)
@hub_options
def grants(tenant_id: str, limit: int, **flags: Any) -> None:
    """List grants in order of time, also pending and void ones."""

    def show(found: GrantList) -> None:
        rows = [[each.id, each.amount, each.state.value, when(each.at), each.note] for each in found.grants]
        print_table(["grant", "amount", "state", "at", "note"], rows, empty="Nothing was granted.")

    report(
        flags,
        lambda client: client.grants(tenant_id, limit=limit),
        show,
        json=lambda found: found.grants,
    )


@credits_command.command("statement")
@click.argument("tenant_id")
@_after_option("entries")
@limit_option(100, 1000)
@hub_options
def statement(tenant_id: str, after: int, limit: int, **flags: Any) -> None:
    """List the entries of a tenant's ledger in order, each with the balance after it."""

    def show(found: StatementView) -> None:
        rows = [
            [
                each.number,
                when(each.at),
                each.kind.value,
                f"{each.balance:+d}",
                f"{each.held:+d}",
                each.balance_after,
                each.held_after,
                each.reference,
                each.note,
            ]
            for each in found.entries
        ]
        headings = ["number", "at", "kind", "change", "of held", "balance", "held", "for", "note"]
        print_table(headings, rows, empty="There are no entries.")

    report(
        flags,
        lambda client: client.statement(tenant_id, after, limit),
        show,
        json=lambda found: found.entries,
    )


@credits_command.command("export")
@click.argument("tenant_id")
@click.option(
    "--of",
    type=click.Choice(["postings", "runs"]),
    default="postings",
    show_default=True,
    help="The entries of the ledger (postings), or what each ended round of a job used (runs).",
)
@click.option("--format", "form", type=click.Choice(["csv", "jsonl"]), default="csv", show_default=True)
@_after_option("lines")
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write to this new file. Default: standard output.",
)
@settings(*HUB_SETTINGS)
def export(tenant_id: str, of: Any, form: Any, after: int, out: Path | None, **flags: Any) -> None:
    """Export a tenant's ledger for accounting. To continue an export, give its last number with --after."""
    from comfyfleet.cli.hub_connection import ask

    async def write(client: FleetClient) -> int | None:
        pieces = client.export_credits(tenant_id, of=of, format=form, after=after)
        return await (
            _write_export(pieces, sys.stdout.buffer, form) if out is None else _save(out, pieces, form)
        )

    last = ask(flags, write)
    if last is None:
        echo(f"There is nothing after number {after}.", err=True)
    else:
        echo(f"Exported up to number {last}. To continue later, add: --after {last}", err=True)


async def _save(out: Path, pieces: AsyncGenerator[bytes, None], form: str) -> int | None:
    """Writes the whole file, or none if it fails or there is nothing to export."""
    from comfyfleet import private_files

    try:
        file = private_files.create(out)
    except FileExistsError as error:
        raise CommandFailed(f"{out} already exists. Choose another name.", ExitCode.USAGE) from error
    try:
        with file:
            last = await _write_export(pieces, file, form)
    except BaseException:
        _remove(out)
        raise
    if last is None:
        # Only a heading: the next export can have the name.
        _remove(out)
    return last


def _remove(out: Path) -> None:
    out.unlink(missing_ok=True)


async def _write_export(pieces: AsyncGenerator[bytes, None], file: BinaryIO, form: str) -> int | None:
    """Returns the number of the last line."""
    last, ended = b"", b""
    async with aclosing(pieces):
        async for piece in pieces:
            file.write(piece)
            *whole, last = (last + piece).split(b"\n")
            ended = next((line for line in reversed(whole) if line.strip()), ended)
    file.flush()
    return _line_number(ended, form)


def _line_number(line: bytes, form: str) -> int | None:
    """None for the heading, or for no line."""
    import msgspec

    if form == "jsonl":
        return int(msgspec.json.decode(line)["number"]) if line else None
    row = next(csv.reader([line.decode()]), [])
    return int(row[0]) if row and row[0].isdigit() else None


def when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


_DEFAULT_DAYS = 30


@click.command("usage")
@click.option("--tenant", metavar="ID", help="Only this tenant. Default: all.")
@click.option(
    "--by",
    type=click.Choice(["tenant", "workflow", "worker", "day"]),
    multiple=True,
    help="One line for each of these. Default: tenant. Repeatable.",
)
@click.option(
    "--since",
    type=DurationOrDateParam(),
    metavar="TIME|DATE",
    help="The last 12h, 7d …, or from this date on (UTC). A number is hours. Default: 30d.",
)
@click.option("--days", type=click.FloatRange(0, min_open=True), hidden=True, help="Use --since 7d.")
@click.option("--until", type=DATE, help="Up to this time (UTC). --since then counts from here.")
@hub_options
def usage_command(
    tenant: str | None, by: tuple[str, ...], days: float | None, since: Any, until: Any, **flags: Any
) -> None:
    """Sum up what ended runs used: GPU-seconds, credits, and the cost by the rates of the workers."""
    end = None if until is None else until.replace(tzinfo=UTC).timestamp()
    if since is None:
        since = 86400 * (_DEFAULT_DAYS if days is None else days)
    is_date = isinstance(since, datetime)
    start = since.replace(tzinfo=UTC).timestamp() if is_date else (end or time.time()) - since
    chosen = tuple(dict.fromkeys(by)) or ("tenant",)

    def show(found: UsageList) -> None:
        fields = {"tenant": "tenant", "workflow": "workflow_hash", "worker": "worker_id", "day": "day"}
        rows = [
            [
                *(getattr(each, fields[name]) or None for name in chosen),
                each.rounds,
                each.completed,
                each.outputs,
                f"{each.gpu_s:.1f}",
                each.credits,
                None if each.cost is None else f"{each.cost:.4f}",
            ]
            for each in found.usage
        ]
        headings = [*chosen, "rounds", "completed", "outputs", "GPU s", "credits", "cost"]
        print_table(headings, rows, empty="No created tenant used anything in that time.")

    report(
        flags,
        lambda client: client.usage(tenant=tenant, since=start, until=end, by=by or ("tenant",)),
        show,
    )


@click.command("reconcile")
@click.option("--dry-run", "is_dry", is_flag=True, help="Show what would be repaired, and change nothing.")
@hub_options
def reconcile_command(is_dry: bool, **flags: Any) -> None:
    """Compare the store with tenants' databases, and repair what a crash left inconsistent.

    Hubs do this when they start and every minute. The command also adds up the ledgers. It never changes a wrong
    ledger, or anything else that a person must look at: it only reports it. Exit code 1 means that there is such a
    finding.
    """

    def show(found: FindingList) -> None:
        done = "repaired" if found.is_mended else "would be repaired"
        print_table(
            ["finding", "tenant", "", "what"],
            [
                [each.kind, each.tenant, done if each.mends_itself else "needs you", each.message]
                for each in found.findings
            ],
            empty="The store and tenants' databases agree, and every ledger adds up.",
        )

    found = report(flags, lambda client: client.differences() if is_dry else client.reconcile(), show)
    if not all(each.mends_itself for each in found.findings):
        raise SystemExit(ExitCode.FAILED)
