"""`comfyfleet tenant`: whose jobs a hub runs, where their data lie, and on what terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from comfyfleet.cli.helping import group
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo
from comfyfleet.cli.terms import CLEARED, given, term_options

if TYPE_CHECKING:
    from comfyfleet.client.fleet import FleetClient
    from comfyfleet.wire.tenants import TenantView

_LOOK_S = 0.3


@group("tenant")
def command() -> None:
    """Set up tenants, each in a database pool, with a price and bounds of its own."""


@command.command("create")
@click.argument("tenant_id")
@click.option("--pool", "into", metavar="NAME", help="Where its data shall lie; default unless given.")
@term_options
@as_json
@settings(*TO_REACH)
def create(tenant_id: str, into: str | None, as_json: bool, **flags: Any) -> None:
    """Set up a tenant whose jobs, files and credits lie in a pool."""
    from comfyfleet.cli.reach import ask, print_json

    terms = given(flags) | ({} if into is None else {"pool": into})
    made = ask(flags, lambda client: client.create_tenant(tenant_id, **terms))
    if as_json:
        print_json(made)
        return
    echo(f"{made.id} is set up in the pool {made.pool}")
    echo(f"Next: comfyfleet key create tenant --tenant {made.id}", err=True)


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
    from comfyfleet.cli.credits import when
    from comfyfleet.cli.prices import price_text
    from comfyfleet.cli.reach import ask, plain, print_json, print_pairs
    from comfyfleet.wire.credits import BalanceView

    async def look(client: FleetClient) -> tuple[TenantView, BalanceView]:
        return await client.tenant(tenant_id), await client.balance(tenant_id)

    tenant, balance = ask(flags, look)
    if as_json:
        print_json({**plain(tenant), "credits": plain(balance)})
        return
    told = _said({**plain(tenant), "price": None, "created_at": when(tenant.created_at)})
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
@term_options
@click.option(
    "--clear",
    "cleared",
    multiple=True,
    type=click.Choice(list(CLEARED)),
    metavar="OPTION",
    help="Take away what was said with this option, whichever it is, such as price or max-running. Repeatable.",
)
@as_json
@settings(*TO_REACH)
def set_(tenant_id: str, cleared: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Change a tenant's terms. What is not given stays; a list is given whole."""
    from comfyfleet.cli.reach import ask, plain, print_json

    terms = given(flags)
    if not terms and not cleared:
        raise click.UsageError("say what to change, such as --price flat:5")
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
        # A hub takes bounds and places whole: a part that is not sent is gone, such as the region of its jobs.
        before = plain(await client.tenant(tenant_id)) if parts else {}
        wholes = {whole: before[whole] | said for whole, said in parts.items()}
        return await client.change_tenant(tenant_id, **terms, **wholes)

    changed = ask(flags, change)
    if as_json:
        print_json(changed)
    else:
        names = [*terms, *(name for said in parts.values() for name in said)]
        echo(f"{changed.id}: {', '.join(names)} changed")


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
            echo(f"{tenant.id} is {tenant.state.value}")


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
        tenant, told = await client.move_tenant(tenant_id, pool), None
        while tenant.state == "moving" and not no_wait:
            await asyncio.sleep(_LOOK_S)
            tenant = await client.tenant(tenant_id)
            told = _tell_wait(tenant, told)
        return tenant

    tenant = ask(flags, moving)
    if as_json:
        print_json(tenant)
    elif tenant.state == "moving":
        echo(f"{tenant.id} is on its way to the pool {tenant.moving_to}")
    else:
        echo(f"{tenant.id} lies in the pool {tenant.pool}")


def _tell_wait(tenant: TenantView, told: str | None) -> str | None:
    """Says what it waits for, unless that was told last. Answers what was."""
    if tenant.waits_for is None or tenant.waits_for == told:
        return told
    echo(f"it waits for {tenant.waits_for}", err=True)
    return tenant.waits_for


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
        told = None
        while not no_wait:
            try:
                told = _tell_wait(await client.tenant(tenant_id), told)
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
        echo(f"{tenant_id} is {'gone' if is_gone else 'being deleted'}")
