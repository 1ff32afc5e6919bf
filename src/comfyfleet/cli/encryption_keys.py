"""Jobs sealed at rest, from the settings: master keys, the keyring over a store's cabinet, and its upkeep meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.settings import ResolvedSettings
from comfyfleet.model.errors import ComfyFleetError, to_install
from comfyfleet.ports import Clock, DocumentStore, Store
from comfyfleet.stores.factory import refuse_if_encrypted
from comfyfleet.tenancy.database.port import TenantDatabase

if TYPE_CHECKING:
    from comfyfleet.stores.crypto.keyring import Keyring, MasterKeys

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 30.0


def master_keys(resolved: ResolvedSettings) -> Callable[[], MasterKeys] | None:
    """What reads them, now and again later. None: nothing is to be sealed, and nothing can be opened."""
    chosen = resolved.encryption()
    if not chosen.keys and not chosen.key_file:
        if chosen.current:
            raise resolved.wrong("encryption.current", "there is neither 'keys' nor 'key_file' beside it")
        return None
    try:
        from comfyfleet.stores.crypto.keyring import read_master_keys
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"to seal jobs needs {error.name}, which is not installed: {to_install('encryption')}"
        ) from error
    said = "encryption.key_file" if chosen.key_file else "encryption.keys"

    def read() -> MasterKeys:
        lines = list(chosen.keys)
        if chosen.key_file:
            lines += Path(chosen.key_file).read_text(encoding="utf-8").splitlines()
        return read_master_keys(lines, chosen.current)

    try:
        read()
    except OSError as error:
        raise resolved.wrong(said, f"it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise resolved.wrong(said, str(error)) from error
    return read


def key_mistakes(resolved: ResolvedSettings) -> list[CommandFailed]:
    """What a hub would find wrong about its keys."""
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
    # Not refused, as a hub's own key is: what containers are given as a file often cannot be had otherwise.
    if key_file and os.name == "posix" and Path(key_file).stat().st_mode & 0o077:
        _LOG.warning("other users of this machine can read the master keys in %s: chmod 600", key_file)


def encrypted_by(keyring: Keyring | None, store: Store) -> Store:
    if keyring is None:
        return store
    from comfyfleet.stores.crypto.store import encrypted_store

    return encrypted_store(store, keyring)


def database_encryption(keyring: Keyring | None) -> Callable[[TenantDatabase], TenantDatabase] | None:
    """What is put round a tenants' database."""
    if keyring is None:
        return None
    from comfyfleet.tenancy.database.encrypted import encrypted_database

    return lambda database: encrypted_database(database, keyring)


def worker_encryption(resolved: ResolvedSettings) -> Callable[[Store, Clock], Store] | None:
    """For a worker that opens its store by itself."""
    if master_keys(resolved) is None:
        return None
    return lambda store, clock: encrypted_by(keyring_of(resolved, store.documents, clock), store)


@asynccontextmanager
async def attended(
    keyring: Keyring | None, store: Store, every_s: float = _LOOK_EVERY_S
) -> AsyncIterator[None]:
    """Meanwhile new master keys are heard of and data keys wrapped anew. Without keys, a sealed store is refused."""
    if keyring is None:
        await refuse_if_encrypted(store.documents)
        yield
        return
    looking = asyncio.get_running_loop().create_task(_attend(keyring, every_s), name="master keys")
    try:
        yield
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _attend(keyring: Keyring, every_s: float) -> None:
    while True:
        try:
            moved = await keyring.refresh()
            if moved:
                _LOG.warning("%d data keys are wrapped by the current master key now", moved)
        except ComfyFleetError as error:
            _LOG.error("data keys could not be wrapped anew; it is tried again: %s", error)
        except Exception:
            _LOG.exception("the master keys could not be looked after; it is tried again")
        await asyncio.sleep(every_s)
