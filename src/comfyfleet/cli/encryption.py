"""`comfyfleet encryption`: master keys and data keys of a store whose jobs are sealed at rest.

Works on the store itself: beside running hubs on Redis and PostgreSQL, and on a SQLite file while no hub has it open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from comfyfleet.cli.endings import CommandFailed, ExitCode, run
from comfyfleet.cli.helping import group
from comfyfleet.cli.options import as_json, settings
from comfyfleet.cli.printing import echo

if TYPE_CHECKING:
    from comfyfleet.stores.sealed.keyring import Keyring, Tally

T = TypeVar("T")


@group("encryption")
def command() -> None:
    """Keys with which jobs are sealed at rest."""


@command.command("new-key")
@click.argument("key_id", metavar="ID")
def new_key(key_id: str) -> None:
    """Print a new master key as a line for the key file.

    Whoever has it opens every job; without it, none opens. Keep a copy apart from the store's backups.
    """
    import base64
    import secrets

    from comfyfleet.stores.sealed.masters import read_master_keys

    line = f"{key_id}={base64.b64encode(secrets.token_bytes(32)).decode()}"
    try:
        read_master_keys([line])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ID") from error
    echo(line)


@command.command("status")
@as_json
@settings("store", "data", "config")
def status(as_json: bool, **flags: Any) -> None:
    """How many data keys there are, and which master keys have wrapped them."""
    _show(_with_keyring(flags, lambda keyring: keyring.tally()), as_json)


@command.command("rotate")
@click.option(
    "--data-keys", is_flag=True, help="Also give every tenant a new data key, for what comes from now on."
)
@as_json
@settings("store", "data", "config")
def rotate(data_keys: bool, as_json: bool, **flags: Any) -> None:
    """Wrap every data key with the current master key.

    Hubs do this by themselves. Once it is done the master keys before are not needed any more.
    """

    async def work(keyring: Keyring) -> Tally:
        await keyring.rewrap()
        for tenant in await keyring.tenants() if data_keys else ():
            await keyring.renew(tenant)
        return await keyring.tally()

    _show(_with_keyring(flags, work), as_json)


@command.command("shred")
@click.argument("tenant")
@click.option("--yes", is_flag=True, help="Do not ask.")
@settings("store", "data", "config")
def shred(tenant: str, yes: bool, **flags: Any) -> None:
    """Destroy the data keys of TENANT: nobody can read its sealed jobs any more.

    Nothing brings them back. Hubs that run forget a key within half a minute.
    """
    from comfyfleet.model.ids import TenantId

    if not yes:
        click.confirm(f"No sealed job of tenant {tenant!r} can be read ever after. Go on?", abort=True)
    destroyed = _with_keyring(flags, lambda keyring: keyring.shred(TenantId(tenant)))
    if not destroyed:
        raise CommandFailed(
            f"tenant {tenant!r} has no data key here: nothing was sealed for it", ExitCode.REFUSED
        )
    echo(f"{destroyed} data key{'s' if destroyed > 1 else ''} of tenant {tenant!r} destroyed")


def _with_keyring(flags: dict[str, Any], work: Callable[[Keyring], Awaitable[T]]) -> T:
    from comfyfleet.cli.encrypting import keyring_of
    from comfyfleet.cli.house import embedded_store
    from comfyfleet.cli.settings import read_settings
    from comfyfleet.engine.shell import SystemClock
    from comfyfleet.stores.opening import open_store

    resolved = read_settings(flags, config=flags.pop("config", None))

    async def opened() -> T:
        clock = SystemClock()
        store = open_store(resolved.values.store or embedded_store(resolved.data), clock)
        keyring = keyring_of(resolved, store.cabinet, clock)
        if keyring is None:
            raise CommandFailed(
                "there is no master key in the settings: name it in [encryption]", ExitCode.USAGE
            )
        try:
            await store.open()
            await keyring.open()
            return await work(keyring)
        finally:
            await store.close()

    return run(opened())


def _show(tally: Tally, as_json: bool) -> None:
    from comfyfleet.cli.reach import print_json, print_table

    if as_json:
        print_json(tally)
        return
    print_table(
        ["master key", "data keys"],
        [[master, str(number)] for master, number in sorted(tally.masters.items())],
        empty="nothing is sealed in this store yet",
    )
    if tally.destroyed:
        echo(f"{tally.destroyed} more were destroyed")
