"""`comfyfleet tenant`: whose jobs a hub runs, where their data lie, and on what terms.

The terms of a tenant as options of `comfyfleet tenant`: what each is called there, and what was said with them.

What is said of a tenant on the command line: its price in short or as JSON, and the other terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from comfyfleet.cli.command_help import group
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.tenants import TenantView


_SHORT = (
    'flat:5, output:EACH:MOST, gpu_second:EACH:MOST, none, or JSON such as \'{"by": "flat", "credits": 5}\''
)


NO_PRICE = "none"


class PriceParam(click.ParamType[Any]):
    """`NO_PRICE` stands for none, None for one that was not given."""

    name = "price"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        import msgspec

        from comfyfleet.model.ledger import Price

        try:
            return NO_PRICE if value == NO_PRICE else msgspec.convert(_spoken(value), Price)
        except (msgspec.MsgspecError, ValueError) as error:
            self.fail(f"{value!r} is no price ({error}): write {_SHORT}", parameter, context)


def _spoken(text: str) -> Any:
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
    raise ValueError("there is no such kind, or it takes other numbers")


def price_text(price: Any) -> str:
    """As it may be given again."""
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
    "max_waiting": "Jobs that are open at a time, running ones too.",
    "max_running": "Jobs that run at a time.",
    "submits_per_minute": "Jobs that it may submit in a minute.",
    "max_priority": "The most that priority and tier come to.",
    "max_nodes": "Nodes of a workflow.",
    "max_steps": "Steps of a sampler.",
    "max_pixels": "Width × height of a picture.",
    "max_batch": "Pictures at once.",
}
_LISTS = ("node_classes", "denied_node_classes", "models", "denied_models")
# What `--clear` makes of each option: the term, the part of it if it has parts, and the value for "nothing was said".
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
    """The options that say on what terms; each that is not given is None or empty."""
    options: list[Callable[[Any], Any]] = [
        click.option("--name", "label", default=None, metavar="TEXT", help="What it is called."),
        click.option(
            "--price",
            type=PriceParam(),
            metavar="PRICE",
            help="flat:5, output:EACH:MOST, gpu_second:EACH:MOST, none, or JSON.",
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
            "--unrunnable-after",
            type=click.FloatRange(0, min_open=True),
            metavar="SECONDS",
            help="Fail its waiting jobs that no known worker can run for so long; as the hub says unless given.",
        ),
        click.option(
            "--node-class",
            "node_classes",
            multiple=True,
            metavar="PATTERN",
            help="The only ones it may use. Repeatable.",
        ),
        click.option(
            "--deny-node-class",
            "denied_node_classes",
            multiple=True,
            metavar="PATTERN",
            help="What it may not use, though it is allowed. Repeatable.",
        ),
        click.option(
            "--model",
            "models",
            multiple=True,
            metavar="PATTERN",
            help="The only ones it may use. Repeatable.",
        ),
        click.option(
            "--deny-model",
            "denied_models",
            multiple=True,
            metavar="PATTERN",
            help="What it may not use, though it is allowed. Repeatable.",
        ),
        *(
            click.option(
                f"--{cap.replace('_', '-')}",
                cap,
                type=int if cap == "max_priority" else click.IntRange(0),
                metavar="N",
                help=f"Bound: {text}",
            )
            for cap, text in _CAPS.items()
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """What was said of it, taken out of the flags."""
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
    """Set up tenants, each in a database pool, with a price and bounds of its own."""


@tenant_command.command("create")
@click.argument("tenant_id")
@click.option("--pool", "into", metavar="NAME", help="Where its data shall lie; default unless given.")
@term_options
@as_json
@settings(*TO_REACH)
def create(tenant_id: str, into: str | None, as_json: bool, **flags: Any) -> None:
    """Set up a tenant whose jobs, files and credits lie in a pool."""
    from comfyfleet.cli.hub_connection import ask, print_json

    terms = given(flags) | ({} if into is None else {"pool": into})
    made = ask(flags, lambda client: client.create_tenant(tenant_id, **terms))
    if as_json:
        print_json(made)
        return
    echo(f"{made.id} is set up in the pool {made.pool}")
    echo(f"Next: comfyfleet key create tenant --tenant {made.id}", err=True)


@tenant_command.command("list")
@as_json
@settings(*TO_REACH)
def list_(as_json: bool, **flags: Any) -> None:
    """Every tenant that was set up."""
    from comfyfleet.cli.hub_connection import ask, print_json, print_table

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


@tenant_command.command("show")
@click.argument("tenant_id")
@as_json
@settings(*TO_REACH)
def show(tenant_id: str, as_json: bool, **flags: Any) -> None:
    """A tenant's terms, and what it has."""
    from comfyfleet.cli.credits import when
    from comfyfleet.cli.hub_connection import ask, plain, print_json, print_pairs
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


@tenant_command.command("set")
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
    from comfyfleet.cli.hub_connection import ask, plain, print_json

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
    @tenant_command.command(name, help=text)
    @click.argument("tenant_id")
    @as_json
    @settings(*TO_REACH)
    def change(tenant_id: str, as_json: bool, **flags: Any) -> None:
        from comfyfleet.cli.hub_connection import ask, print_json

        tenant = ask(flags, lambda client: getattr(client, method)(tenant_id))
        if as_json:
            print_json(tenant)
        else:
            echo(f"{tenant.id} is {tenant.state.value}")


_stating("suspend", "Take nothing new of it and lease nothing; what runs may end.", "suspend_tenant")
_stating("resume", "Let a suspended tenant work again.", "resume_tenant")


_no_wait = click.option("--no-wait", is_flag=True, help="Do not wait until it is done.")


@tenant_command.command("move")
@click.argument("tenant_id")
@click.argument("pool")
@_no_wait
@as_json
@settings(*TO_REACH)
def move(tenant_id: str, pool: str, no_wait: bool, as_json: bool, **flags: Any) -> None:
    """Move everything of a tenant to another POOL; naming its own calls it back."""
    import asyncio

    from comfyfleet.cli.hub_connection import ask, print_json

    async def moving(client: FleetClient) -> TenantView:
        tenant, told = await client.move_tenant(tenant_id, pool), None
        while tenant.state == "moving" and not no_wait:
            await asyncio.sleep(_POLL_S)
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


@tenant_command.command("delete")
@click.argument("tenant_id")
@click.option("--confirm", metavar="TENANT_ID", help="Its id once more, instead of being asked for it.")
@_no_wait
@as_json
@settings(*TO_REACH)
def delete(tenant_id: str, confirm: str | None, no_wait: bool, as_json: bool, **flags: Any) -> None:
    """Delete a tenant with its keys, jobs, files, webhooks and credits, for good."""
    import asyncio

    from comfyfleet.cli.hub_connection import ask, print_json
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
            await asyncio.sleep(_POLL_S)
        return False

    is_gone = ask(flags, leaving)
    if as_json:
        print_json({"tenant": tenant_id, "is_gone": is_gone})
    else:
        echo(f"{tenant_id} is {'gone' if is_gone else 'being deleted'}")
