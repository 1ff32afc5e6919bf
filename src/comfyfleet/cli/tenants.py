"""`comfyfleet tenant`: the tenants of a hub, the database of each, and its terms (price, share, limits)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from comfyfleet.cli.command import collect_all, group, hub_options, report
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, as_called
from comfyfleet.cli.output import echo, plain, print_pairs, print_table

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.credits import BalanceView
    from comfyfleet.wire.tenants import TenantView


_SHORT = (
    'flat:5, output:EACH:MOST, gpu_second:EACH:MOST, none, or JSON such as \'{"by": "flat", "credits": 5}\''
)


NO_PRICE = "none"


class PriceParam(click.ParamType[Any]):
    """`NO_PRICE` means that jobs are free; None means that no price was given."""

    name = "price"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        import msgspec

        from comfyfleet.model.ledger import Price

        try:
            return NO_PRICE if value == NO_PRICE else msgspec.convert(_parse_price(value), Price)
        except (msgspec.MsgspecError, ValueError) as error:
            self.fail(f"{value!r} is not a price ({error}). Write {_SHORT}.", parameter, context)


def _parse_price(text: str) -> Any:
    import msgspec

    if text.lstrip().startswith("{"):
        return msgspec.json.decode(text)
    kind, *numbers = text.split(":")
    if not all(each.isdecimal() for each in numbers):
        raise ValueError("credits are whole numbers, 0 or more")
    amounts = [int(each) for each in numbers]
    match kind, amounts:
        case "flat", [amount]:
            return {"by": kind, "credits": amount}
        case "output", [each, most]:
            return {"by": kind, "credits_each": each, "most_outputs": most}
        case "gpu_second", [each, most]:
            return {"by": kind, "credits_per_second": each, "most_seconds": most}
    raise ValueError("unknown kind, or the wrong count of numbers")


def price_text(price: Any) -> str:
    """The price as `--price` accepts it."""
    import msgspec

    from comfyfleet.model.ledger import FlatPrice, GpuPrice, OutputPrice

    match price:
        case None:
            return NO_PRICE
        case FlatPrice(credits=amount):
            return f"flat:{amount}"
        case OutputPrice(credits_each=each, most_outputs=most, base=0):
            return f"output:{each}:{most}"
        case GpuPrice(credits_per_second=each, most_seconds=most, base=0):
            return f"gpu_second:{each}:{most}"
    return msgspec.json.encode(price).decode()


F = TypeVar("F", bound=Callable[..., Any])

_CAPS = {
    "max_waiting": "open jobs at a time, running ones included.",
    "max_running": "running jobs at a time.",
    "submits_per_minute": "jobs submitted in a minute.",
    "max_priority": "sum of priority and tier.",
    "max_nodes": "nodes in a workflow.",
    "max_steps": "steps of a sampler.",
    "max_pixels": "width × height of a picture.",
    "max_batch": "pictures in a batch.",
}
_MANY = {"multiple": True, "metavar": "PATTERN"}
_LISTS = ("node_classes", "denied_node_classes", "models", "denied_models")
# For each option that `--clear` takes: the term, its part if it has parts, and the value that means "not set".
CLEARED: dict[str, tuple[str, str | None, Any]] = {
    "name": ("name", None, ""),
    "price": ("price", None, None),
    "weight": ("weight", None, 1.0),
    "tier": ("tier", None, 0),
    "isolation": ("isolation", None, "none"),
    "allow-direct": ("allows_direct", None, False),
    "unrunnable-after": ("unrunnable_after", None, None),
    "node-class": ("node_classes", None, None),
    "deny-node-class": ("denied_node_classes", None, []),
    "model": ("models", None, None),
    "deny-model": ("denied_models", None, []),
    "region": ("location", "region", None),
    "compliance": ("location", "compliance", []),
} | {cap.replace("_", "-"): ("caps", cap, None) for cap in _CAPS}


def term_options(command: F) -> F:
    """The options for the terms of a tenant. One that was not given is None or empty."""
    number = click.IntRange(0)
    options: list[tuple[str, str, dict[str, Any]]] = [
        ("--name label", "A name for people.", {"metavar": "TEXT"}),
        (
            "--price",
            "flat:5, output:EACH:MOST, gpu_second:EACH:MOST, none, or JSON.",
            {"type": PriceParam(), "metavar": "PRICE"},
        ),
        (
            "--weight",
            "Its share of the fleet beside other tenants. Default: 1.",
            {"type": click.FloatRange(0, 1_000_000, min_open=True)},
        ),
        ("--tier", "Added to the priority of each of its jobs.", {"type": click.IntRange(-1000, 1000)}),
        (
            "--isolation",
            "The least isolation that its jobs require.",
            {"type": click.Choice(["strict", "loose", "none"])},
        ),
        ("--region", "The region in which its jobs must run.", {"metavar": "NAME"}),
        ("--compliance", "What its workers must comply with. Repeatable.", _MANY | {"metavar": "NAME"}),
        (
            "--allow-direct/--no-allow-direct allows_direct",
            "Whether workers that use the store directly may read its payloads.",
            {"default": None},
        ),
        (
            "--unrunnable-after",
            "Fail its waiting jobs that no known worker can run for this long. Default: the hub's setting.",
            {"type": click.FloatRange(0, min_open=True), "metavar": "SECONDS"},
        ),
        ("--node-class node_classes", "It may use only these node classes. Repeatable.", _MANY),
        (
            "--deny-node-class denied_node_classes",
            "It may not use these, even if allowed. Repeatable.",
            _MANY,
        ),
        ("--model models", "It may use only these models. Repeatable.", _MANY),
        ("--deny-model denied_models", "It may not use these, even if allowed. Repeatable.", _MANY),
    ]
    for cap, text in _CAPS.items():
        kind = int if cap == "max_priority" else number
        options.append((f"--{cap.replace('_', '-')}", f"Limit: {text}", {"type": kind, "metavar": "N"}))
    for names, help_, more in reversed(options):
        command = click.option(*names.split(), help=help_, **more)(command)
    return command


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes the terms that were given out of the flags."""
    label, price, region = flags.pop("label"), flags.pop("price"), flags.pop("region")
    compliance = flags.pop("compliance")
    terms: dict[str, Any] = {"name": label}
    terms |= {
        name: flags.pop(name) for name in ("weight", "tier", "isolation", "allows_direct", "unrunnable_after")
    }
    terms |= {name: flags.pop(name) or None for name in _LISTS}
    caps = {name: value for name in _CAPS if (value := flags.pop(name)) is not None}
    found = {name: value for name, value in terms.items() if value is not None}
    if price is not None:
        found["price"] = None if price == NO_PRICE else price
    if region is not None or compliance:
        found["location"] = {"region": region} if region is not None else {}
        found["location"] |= {"compliance": compliance} if compliance else {}
    if caps:
        found["caps"] = caps
    return found


_POLL_S = 0.3


@group("tenant")
def tenant_command() -> None:
    """Manage tenants: each has a database, a price and its own limits."""


@tenant_command.command("create")
@click.argument("tenant_id")
@click.option("--database", metavar="NAME", help="The database for its data. Default: default.")
@term_options
@hub_options
def create(tenant_id: str, database: str | None, **flags: Any) -> None:
    """Create a tenant. Its jobs, files and credits are kept in one database."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}", tenant_id) is None:
        raise click.BadParameter(
            f"{tenant_id!r} is not an id. Use up to 128 letters, digits and . _ @ - (a letter or digit first).",
            param_hint="TENANT_ID",
        )
    terms = given(flags) | ({} if database is None else {"database": database})

    def show(made: TenantView) -> None:
        echo(f"{made.id} was created in the database {made.database}")
        echo(f"Next: {as_called()} key create tenant --tenant {made.id}", err=True)

    report(flags, lambda client: client.create_tenant(tenant_id, **terms), show)


@tenant_command.command("list")
@hub_options
def list_(**flags: Any) -> None:
    """List every tenant."""

    def show(found: list[TenantView]) -> None:
        rows = [
            [each.id, each.state.value, each.database, price_text(each.price), f"{each.weight:g}", each.name]
            for each in found
        ]
        headings = ["tenant", "state", "database", "price", "weight", "name"]
        print_table(headings, rows, empty="No tenant was created: all jobs are kept in the store itself.")

    report(
        flags,
        lambda client: collect_all(client.tenants, lambda page: page.tenants),
        show,
    )


@tenant_command.command("show")
@click.argument("tenant_id")
@hub_options
def show(tenant_id: str, **flags: Any) -> None:
    """Show the terms of a tenant and its credits."""

    async def look(client: FleetClient) -> tuple[TenantView, BalanceView]:
        return await client.tenant(tenant_id), await client.balance(tenant_id)

    report(
        flags,
        look,
        _print_tenant,
        json=lambda found: {**plain(found[0]), "credits": plain(found[1])},
    )


def _print_tenant(found: tuple[TenantView, BalanceView]) -> None:
    from comfyfleet.cli.credits import when

    tenant, balance = found
    details = _not_empty(
        {**plain(tenant), "pool": None, "price": None, "created_at": when(tenant.created_at)}
    )
    details |= {
        "price": price_text(tenant.price),
        "credits": f"{balance.available} available, {balance.held} held",
    }
    print_pairs(details)


def _not_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that have a value; of a nested object, its fields."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= _not_empty(value)
        elif value not in (None, "", []):
            found[name] = value
    return found


@tenant_command.command("set")
@click.argument("tenant_id")
@term_options
@click.option(
    "--clear",
    "cleared",
    multiple=True,
    type=click.Choice(list(CLEARED)),
    metavar="OPTION",
    help="Reset this option, such as price or max-running. Repeatable.",
)
@hub_options
def set_(tenant_id: str, cleared: tuple[str, ...], **flags: Any) -> None:
    """Change the terms of a tenant. What you do not give stays; a list replaces the list before."""
    terms = given(flags)
    if not terms and not cleared:
        raise click.UsageError("Nothing to change: give an option, such as --price flat:5.")
    parts: dict[str, dict[str, Any]] = {
        whole: terms.pop(whole) for whole in ("caps", "location") if whole in terms
    }
    for option in cleared:
        term, part, nothing = CLEARED[option]
        if part is None:
            terms[term] = nothing
        else:
            parts.setdefault(term, {})[part] = nothing

    async def change(client: FleetClient) -> TenantView:
        # A hub replaces limits and location as a whole, so send the parts that do not change too.
        before = plain(await client.tenant(tenant_id)) if parts else {}
        wholes = {whole: before[whole] | part for whole, part in parts.items()}
        return await client.change_tenant(tenant_id, **terms, **wholes)

    names = [*terms, *(name for part in parts.values() for name in part)]
    report(flags, change, lambda changed: echo(f"{changed.id}: {', '.join(names)} changed"))


def _add_state_change(name: str, text: str, method: str) -> None:
    @tenant_command.command(name, help=text)
    @click.argument("tenant_id")
    @hub_options
    def change(tenant_id: str, **flags: Any) -> None:
        report(
            flags,
            lambda client: getattr(client, method)(tenant_id),
            lambda tenant: echo(f"{tenant.id} is {tenant.state.value}"),
        )


_add_state_change(
    "suspend", "Accept and start no jobs of a tenant. Running jobs may finish.", "suspend_tenant"
)
_add_state_change("resume", "Let a suspended tenant work again.", "resume_tenant")


_no_wait = click.option("--no-wait", is_flag=True, help="Do not wait until it is done.")


@tenant_command.command("move")
@click.argument("tenant_id")
@click.argument("database")
@_no_wait
@hub_options
def move(tenant_id: str, database: str, no_wait: bool, **flags: Any) -> None:
    """Move all data of a tenant to another DATABASE. Its current one stops a move."""
    import asyncio

    async def start(client: FleetClient) -> TenantView:
        tenant, told = await client.move_tenant(tenant_id, database), None
        while tenant.state == "moving" and not no_wait:
            await asyncio.sleep(_POLL_S)
            tenant = await client.tenant(tenant_id)
            told = _tell_wait(tenant, told)
        return tenant

    def show(tenant: TenantView) -> None:
        if tenant.state == "moving":
            echo(f"{tenant.id} is being moved to the database {tenant.moving_to}")
        else:
            echo(f"{tenant.id} is in the database {tenant.database}")

    report(flags, start, show)


def _tell_wait(tenant: TenantView, told: str | None) -> str | None:
    """Says once what the tenant waits for. Returns what was said last."""
    if tenant.waits_for is None or tenant.waits_for == told:
        return told
    echo(f"Waiting for {tenant.waits_for}", err=True)
    return tenant.waits_for


@tenant_command.command("delete")
@click.argument("tenant_id")
@click.option("--confirm", metavar="TENANT_ID", help="The id again, instead of the question.")
@_no_wait
@hub_options
def delete(tenant_id: str, confirm: str | None, no_wait: bool, **flags: Any) -> None:
    """Delete a tenant with its keys, jobs, files, webhooks and credits, for good."""
    import asyncio

    from comfyfleet.model.errors import Refusal, RefusalCode

    if confirm is None:
        try:
            confirm = click.prompt(
                f"This deletes the jobs, files, keys and credits of {tenant_id}. Type its id to continue",
                err=True,
            )
        except click.Abort:
            if sys.stdin.isatty():
                raise
            confirm = ""
    if confirm != tenant_id:
        raise CommandFailed(
            f"nothing was deleted. Type the id, or add --confirm {tenant_id}.", ExitCode.REFUSED
        )

    async def remove(client: FleetClient) -> bool:
        """Whether it is gone."""
        await client.delete_tenant(tenant_id, confirm=tenant_id)
        told = None
        while not no_wait:
            try:
                told = _tell_wait(await client.tenant(tenant_id), told)
            except Refusal as refusal:
                if refusal.code is RefusalCode.NOT_FOUND:
                    return True
                raise
            await asyncio.sleep(_POLL_S)
        return False

    report(
        flags,
        remove,
        lambda is_gone: echo(f"{tenant_id} is {'deleted' if is_gone else 'being deleted'}"),
        json=lambda is_gone: {"tenant": tenant_id, "is_gone": is_gone},
    )
