"""`comfyfleet encryption`, and the encryption of jobs at rest from the settings: master keys and the keyring.

The commands work on the store itself: beside running hubs on Redis and PostgreSQL, on a SQLite file only while no hub
has it open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from comfyfleet.cli.command import group
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, run
from comfyfleet.cli.options import as_json, settings
from comfyfleet.cli.output import echo, print_json, print_table

if TYPE_CHECKING:
    from comfyfleet.cli.settings import ResolvedSettings
    from comfyfleet.ports import Clock, DocumentStore, Store
    from comfyfleet.stores.crypto.keyring import KeyCounts, Keyring, MasterKeys
    from comfyfleet.tenancy.database.sql_database import TenantDatabase

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_REFRESH_S = 30.0


def master_keys(resolved: ResolvedSettings) -> Callable[[], MasterKeys] | None:
    """A function that reads the master keys, now and again later. None: no encryption."""
    chosen = resolved.encryption()
    if not chosen.keys and not chosen.key_file:
        if chosen.current:
            raise resolved.wrong("encryption.current", "it needs 'keys' or 'key_file' too")
        return None
    from comfyfleet.model.errors import to_install

    try:
        from comfyfleet.stores.crypto.keyring import read_master_keys
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"encryption needs {error.name}, which is not installed: {to_install('encryption')}"
        ) from error
    setting = "encryption.key_file" if chosen.key_file else "encryption.keys"

    def read() -> MasterKeys:
        lines = list(chosen.keys)
        if chosen.key_file:
            lines += Path(chosen.key_file).read_text(encoding="utf-8").splitlines()
        return read_master_keys(lines, chosen.current)

    try:
        read()
    except OSError as error:
        raise resolved.wrong(setting, f"cannot read it: {error.strerror}") from error
    except ValueError as error:
        raise resolved.wrong(setting, str(error)) from error
    return read


def key_mistakes(resolved: ResolvedSettings) -> list[CommandFailed]:
    """The mistakes in the settings of master keys."""
    try:
        master_keys(resolved)
    except CommandFailed as mistake:
        return [mistake]
    return []


def keyring_of(resolved: ResolvedSettings, documents: DocumentStore, clock: Clock) -> Keyring | None:
    masters = master_keys(resolved)
    if masters is None:
        return None
    from comfyfleet.stores.crypto.keyring import Keyring

    _warn_if_others_can_read(resolved.encryption().key_file)
    return Keyring(documents, clock, masters, renew_s=resolved.encryption().data_key_days * 86400)


def _warn_if_others_can_read(key_file: str) -> None:
    # A warning, not an error: files mounted into containers often cannot have other permissions.
    if key_file and os.name == "posix" and Path(key_file).stat().st_mode & 0o077:
        _LOG.warning(
            "Other users of this machine can read the master keys in %s. Run chmod 600 on it.", key_file
        )


def encrypted_by(keyring: Keyring | None, store: Store) -> Store:
    if keyring is None:
        return store
    from comfyfleet.stores.crypto.store import encrypted_store

    return encrypted_store(store, keyring)


def database_encryption(keyring: Keyring | None) -> Callable[[TenantDatabase], TenantDatabase] | None:
    """Wraps a tenants' database with encryption."""
    if keyring is None:
        return None
    from comfyfleet.tenancy.database.encrypted import encrypted_database

    return lambda database: encrypted_database(database, keyring)


def worker_encryption(resolved: ResolvedSettings) -> Callable[[Store, Clock], Store] | None:
    """For a worker that opens the store itself."""
    if master_keys(resolved) is None:
        return None
    return lambda store, clock: encrypted_by(keyring_of(resolved, store.documents, clock), store)


@asynccontextmanager
async def keep_keys_fresh(
    keyring: Keyring | None, store: Store, every_s: float = _REFRESH_S
) -> AsyncIterator[None]:
    """Inside it, new master keys are read and data keys wrapped with them. Without keys, refuses an encrypted store."""
    import asyncio

    from comfyfleet.stores.factory import refuse_if_encrypted

    if keyring is None:
        await refuse_if_encrypted(store.documents)
        yield
        return
    task = asyncio.get_running_loop().create_task(_refresh(keyring, every_s), name="master keys")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _refresh(keyring: Keyring, every_s: float) -> None:
    import asyncio

    from comfyfleet.model.errors import ComfyFleetError

    while True:
        try:
            moved = await keyring.refresh()
            if moved:
                _LOG.warning("%d data keys are now wrapped with the current master key.", moved)
        except ComfyFleetError as error:
            _LOG.error("Cannot wrap data keys with the current master key; will retry: %s", error)
        except Exception:
            _LOG.exception("Cannot refresh the master keys; will retry.")
        await asyncio.sleep(every_s)


def _keyring_options(command: Any) -> Any:
    return as_json(settings("store", "data", "config")(command))


@group("encryption")
def encryption_command() -> None:
    """Manage the keys that encrypt jobs at rest."""


@encryption_command.command("new-key")
@click.argument("key_id", metavar="ID")
def new_key(key_id: str) -> None:
    """Print a new master key as a line for the key file.

    Someone who has it can read every job; without it nobody can. Keep a copy, but not with the store's backups.
    """
    import base64
    import secrets

    from comfyfleet.stores.crypto.keyring import read_master_keys

    line = f"{key_id}={base64.b64encode(secrets.token_bytes(32)).decode()}"
    try:
        read_master_keys([line])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ID") from error
    echo(line)


@encryption_command.command("status")
@_keyring_options
def status(as_json: bool, **flags: Any) -> None:
    """Count the data keys, by the master key that wraps them."""
    _show_keys(_with_keyring(flags, lambda keyring: keyring.count_keys()), as_json)


@encryption_command.command("rotate")
@click.option("--data-keys", is_flag=True, help="Also give every tenant a new data key for new jobs.")
@_keyring_options
def rotate(data_keys: bool, as_json: bool, **flags: Any) -> None:
    """Wrap every data key with the current master key.

    Hubs do this by themselves. Afterwards the older master keys are no longer needed.
    """

    async def work(keyring: Keyring) -> KeyCounts:
        await keyring.rewrap()
        for tenant in await keyring.tenants() if data_keys else ():
            await keyring.renew(tenant)
        return await keyring.count_keys()

    _show_keys(_with_keyring(flags, work), as_json)


@encryption_command.command("shred")
@click.argument("tenant")
@click.option("--yes", is_flag=True, help="Do not ask.")
@settings("store", "data", "config")
def shred(tenant: str, yes: bool, **flags: Any) -> None:
    """Destroy the data keys of TENANT. Nobody can read its encrypted jobs afterwards.

    This cannot be undone. Running hubs forget a key within half a minute.
    """
    from comfyfleet.model.ids import TenantId

    if not yes:
        click.confirm(
            f"Nobody will be able to read the encrypted jobs of tenant {tenant!r} again. Continue?",
            abort=True,
        )
    destroyed = _with_keyring(flags, lambda keyring: keyring.crypto_shred(TenantId(tenant)))
    if not destroyed:
        raise CommandFailed(
            f"tenant {tenant!r} has no data key here, so none of its jobs is encrypted", ExitCode.REFUSED
        )
    echo(f"{destroyed} data key{'s' if destroyed > 1 else ''} of tenant {tenant!r} destroyed")


def _with_keyring(flags: dict[str, Any], work: Callable[[Keyring], Awaitable[T]]) -> T:
    from comfyfleet.cli.bootstrap import embedded_store
    from comfyfleet.cli.settings import read_settings
    from comfyfleet.engine.system import SystemClock
    from comfyfleet.stores.factory import open_store

    resolved = read_settings(flags, config=flags.pop("config", None))

    async def opened() -> T:
        clock = SystemClock()
        store = open_store(resolved.values.store or embedded_store(resolved.data), clock)
        keyring = keyring_of(resolved, store.documents, clock)
        if keyring is None:
            raise CommandFailed(
                "the settings have no master key. Set `keys` or `key_file` in [encryption].", ExitCode.USAGE
            )
        try:
            await store.open()
            await keyring.open()
            return await work(keyring)
        finally:
            await store.close()

    return run(opened())


def _show_keys(tally: KeyCounts, as_json: bool) -> None:
    if as_json:
        print_json(tally)
        return
    print_table(
        ["master key", "data keys"],
        [[master, number] for master, number in sorted(tally.masters.items())],
        empty="Nothing in this store is encrypted yet.",
    )
    if tally.destroyed:
        echo(f"{tally.destroyed} more were destroyed.")
