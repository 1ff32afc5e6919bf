"""`comfyfleet tenant`: whose jobs a hub runs, where their data lie, and on what terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.prices import NO_PRICE, PriceType

if TYPE_CHECKING:
    from comfyfleet.client.fleet import FleetClient
    from comfyfleet.wire.tenants import TenantView

F = TypeVar("F", bound=Callable[..., Any])

_CAPS = (
    "max_waiting",
    "max_running",
    "submits_per_minute",
    "max_priority",
    "max_nodes",
    "max_steps",
    "max_pixels",
    "max_batch",
)
_LOOK_S = 0.3
_LISTS = ("node_classes", "denied_node_classes", "models", "denied_models")


def _terms(command: F) -> F:
    """The options that say on what terms; each that is not given is None or empty."""
    options: list[Callable[[Any], Any]] = [
        click.option("--name", "label", default=None, metavar="TEXT", help="What it is called."),
        click.option(
            "--price",
            type=PriceType(),
            metavar="PRICE",
            help="flat:5, output:2:8, none, or JSON.",
        ),
        click.option(
            "--weight",
            type=click.FloatRange(0, 1_000_000, min_open=True),
            help="Its share beside others'; 1 unless given.",
        ),
        click.option(
            "--tier", type=click.IntRange(-1000, 1000), help="Added to the priority of each of its jobs."
        ),
        click.option(
            "--isolation",
            type=click.Choice(["strict", "loose", "none"]),
            help="The least that its jobs ask for.",
        ),
        click.option("--region", metavar="NAME", help="Where its jobs must run."),
        click.option(
            "--compliance", multiple=True, metavar="NAME", help="What its workers must keep to. Repeatable."
        ),
        click.option(
            "--allow-direct/--no-allow-direct",
            "allows_direct",
            default=None,
            help="Whether workers directly on the store may read its payloads.",
        ),
        click.option(
            "--node-class", "node_classes", multiple=True, help="The only ones it may use. Repeatable."
        ),
        click.option("--deny-node-class", "denied_node_classes", multiple=True, help="Repeatable."),
        click.option("--model", "models", multiple=True, help="The only ones it may use. Repeatable."),
        click.option("--deny-model", "denied_models", multiple=True, help="Repeatable."),
        *(
            click.option(f"--{cap.replace('_', '-')}", cap, type=int, metavar="N", help="A bound of its own.")
            for cap in _CAPS
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """What was said of it, taken out of the flags."""
    label, price, region = flags.pop("label"), flags.pop("price"), flags.pop("region")
    compliance = flags.pop("compliance")
    terms: dict[str, Any] = {"name": label}
    terms |= {name: flags.pop(name) for name in ("weight", "tier", "isolation", "allows_direct")}
    terms |= {name: flags.pop(name) or None for name in _LISTS}
    caps = {name: value for name in _CAPS if (value := flags.pop(name)) is not None}
    found = {name: value for name, value in terms.items() if value is not None}
    if price is not None:
        found["price"] = None if price == NO_PRICE else price
    if region is not None or compliance:
        found["location"] = {"region": region, "compliance": compliance}
    if caps:
        found["caps"] = caps
    return found


@click.group("tenant")
def command() -> None:
    """Set up tenants, each in a database pool, with a price and bounds of its own."""


@command.command("create")
@click.argument("tenant_id")
@click.option("--pool", "into", metavar="NAME", help="Where its data shall lie; default unless given.")
@_terms
@as_json
@settings(*TO_REACH)
def create(tenant_id: str, into: str | None, as_json: bool, **flags: Any) -> None:
    """Set up a tenant whose jobs, files and credits lie in a pool."""
    from comfyfleet.cli.reach import ask, print_json

    terms = _given(flags) | ({} if into is None else {"pool": into})
    made = ask(flags, lambda client: client.create_tenant(tenant_id, **terms))
    if as_json:
        print_json(made)
        return
    click.echo(f"{made.id} is set up in the pool {made.pool}")
    click.echo(f"Next: comfyfleet key create tenant --tenant {made.id}", err=True)


@command.command("list")
@as_json
@settings(*TO_REACH)
def list_(as_json: bool, **flags: Any) -> None:
    """Every tenant that was set up."""
    from comfyfleet.cli.prices import price_text
    from comfyfleet.cli.reach import ask, print_json, print_table

    found = ask(flags, every_tenant)
    if as_json:
        print_json(found)
        return
    rows = [
        [each.id, each.state.value, each.pool, price_text(each.price), f"{each.weight:g}", each.name]
        for each in found
    ]
    heads = ["tenant", "state", "pool", "price", "weight", "name"]
    print_table(heads, rows, empty="no tenant was set up: jobs of any tenant lie in the store itself")


async def every_tenant(client: FleetClient) -> list[TenantView]:
    page = await client.tenants()
    found = list(page.tenants)
    while page.cursor is not None:
        page = await client.tenants(page.cursor)
        found += page.tenants
    return found


@command.command("show")
@click.argument("tenant_id")
@as_json
@settings(*TO_REACH)
def show(tenant_id: str, as_json: bool, **flags: Any) -> None:
    """A tenant's terms, and what it has."""
    from comfyfleet.cli.prices import price_text
    from comfyfleet.cli.reach import ask, plain, print_json, print_pairs
    from comfyfleet.wire.credits import BalanceView

    async def look(client: FleetClient) -> tuple[TenantView, BalanceView]:
        return await client.tenant(tenant_id), await client.balance(tenant_id)

    tenant, balance = ask(flags, look)
    if as_json:
        print_json({**plain(tenant), "credits": plain(balance)})
        return
    told = _said({**plain(tenant), "price": None})
    told |= {
        "price": price_text(tenant.price),
        "credits": f"{balance.available} available, {balance.held} held",
    }
    print_pairs(list(told.items()))


def _said(fields: dict[str, Any]) -> dict[str, Any]:
    """What there is to say; of what has parts, each that is said."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= _said(value)
        elif value not in (None, "", []):
            found[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return found


@command.command("set")
@click.argument("tenant_id")
@_terms
@as_json
@settings(*TO_REACH)
def set_(tenant_id: str, as_json: bool, **flags: Any) -> None:
    """Change a tenant's terms. What is not given stays; lists and bounds are given whole."""
    from comfyfleet.cli.reach import ask, print_json

    terms = _given(flags)
    if not terms:
        raise click.UsageError("say what to change, such as --price flat:5")
    changed = ask(flags, lambda client: client.change_tenant(tenant_id, **terms))
    if as_json:
        print_json(changed)
    else:
        click.echo(f"{changed.id}: {', '.join(terms)} changed")


def _stating(name: str, text: str, method: str) -> None:
    @command.command(name, help=text)
    @click.argument("tenant_id")
    @as_json
    @settings(*TO_REACH)
    def change(tenant_id: str, as_json: bool, **flags: Any) -> None:
        from comfyfleet.cli.reach import ask, print_json

        tenant = ask(flags, lambda client: getattr(client, method)(tenant_id))
        if as_json:
            print_json(tenant)
        else:
            click.echo(f"{tenant.id} is {tenant.state.value}")


_stating("suspend", "Take nothing new of it and lease nothing; what runs may end.", "suspend_tenant")
_stating("resume", "Let a suspended tenant work again.", "resume_tenant")


_no_wait = click.option("--no-wait", is_flag=True, help="Do not wait until it is done.")


@command.command("move")
@click.argument("tenant_id")
@click.argument("pool")
@_no_wait
@as_json
@settings(*TO_REACH)
def move(tenant_id: str, pool: str, no_wait: bool, as_json: bool, **flags: Any) -> None:
    """Move everything of a tenant to another POOL; naming its own calls it back."""
    import asyncio

    from comfyfleet.cli.reach import ask, print_json

    async def moving(client: FleetClient) -> TenantView:
        tenant = await client.move_tenant(tenant_id, pool)
        while tenant.state == "moving" and not no_wait:
            await asyncio.sleep(_LOOK_S)
            tenant = await client.tenant(tenant_id)
        return tenant

    tenant = ask(flags, moving)
    if as_json:
        print_json(tenant)
    elif tenant.state == "moving":
        click.echo(f"{tenant.id} is on its way to the pool {tenant.moving_to}")
    else:
        click.echo(f"{tenant.id} lies in the pool {tenant.pool}")


@command.command("delete")
@click.argument("tenant_id")
@click.option("--confirm", metavar="TENANT_ID", help="Its id once more, instead of being asked for it.")
@_no_wait
@as_json
@settings(*TO_REACH)
def delete(tenant_id: str, confirm: str | None, no_wait: bool, as_json: bool, **flags: Any) -> None:
    """Delete a tenant with its keys, jobs, files, webhooks and credits, for good."""
    import asyncio

    from comfyfleet.cli.reach import ask, print_json
    from comfyfleet.model.errors import Refusal, RefusalCode

    if confirm is None:
        confirm = click.prompt(
            f"Its jobs, files, keys and credits go with {tenant_id}; type its id to go on", err=True
        )

    async def leaving(client: FleetClient) -> bool:
        """Whether it is gone."""
        await client.delete_tenant(tenant_id, confirm=confirm or "")
        while not no_wait:
            try:
                await client.tenant(tenant_id)
            except Refusal as refusal:
                if refusal.code is RefusalCode.NOT_FOUND:
                    return True
                raise
            await asyncio.sleep(_LOOK_S)
        return False

    is_gone = ask(flags, leaving)
    if as_json:
        print_json({"tenant": tenant_id, "is_gone": is_gone})
    else:
        click.echo(f"{tenant_id} is {'gone' if is_gone else 'being deleted'}")
