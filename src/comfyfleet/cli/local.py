"""What a program keeps in its data folder for others of the same user: where the hub is, and keys.

A file that others can read is refused: whoever can read it may have read the key.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from comfyfleet import private
from comfyfleet.cli.endings import CommandFailed, ExitCode
from comfyfleet.client import finding
from comfyfleet.client.finding import HUB_FILE as HUB_FILE
from comfyfleet.client.finding import LocalHub as LocalHub
from comfyfleet.model.errors import Refusal, RefusalCode

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

WORKER_FILE = "workers.json"


class WorkerKeys(msgspec.Struct, frozen=True):
    """The keys that workers of this machine got when they enrolled, by hub and worker."""

    keys: dict[str, dict[str, str]] = {}


def keep_private() -> None:
    """For programs that only write what is their owner's: whatever they make, others cannot read."""
    os.umask(0o077)


def tighten_data_folder(folder: Path) -> None:
    """All that is ours in it, of this version or an older one. The folder may be the user's own, and hold more than
    that: neither it nor the rest is changed. `hub.json` is not: one that others could read is refused, as its key opens
    everything."""
    from comfyfleet.stores.sqlite.upkeep import tighten_databases

    if not folder.is_dir():
        return
    tighten_databases(folder)
    for name in ("files", "journal"):
        private.tighten(folder / name)
    keys = folder / WORKER_FILE
    if private.is_open_to_others(keys):
        private.tighten(keys)
        _LOG.warning(
            "%s holds keys of workers and could be read by others until now: revoke them if they may be known",
            keys,
        )


def make_data_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(
            f"the setting 'data' will not do: cannot make {folder}: {error.strerror}", ExitCode.USAGE
        ) from error


def read_hub(folder: Path) -> LocalHub | None:
    with _told():
        return finding.read_hub(folder)


def write_hub(folder: Path, hub: LocalHub) -> Path:
    return _write(folder / HUB_FILE, hub)


def read_worker_key(folder: Path, hub: str, worker: str) -> str | None:
    return _worker_keys(folder).keys.get(hub, {}).get(worker)


def write_worker_key(folder: Path, hub: str, worker: str, key: str) -> None:
    known = _worker_keys(folder).keys
    _write(folder / WORKER_FILE, WorkerKeys({**known, hub: {**known.get(hub, {}), worker: key}}))


def _worker_keys(folder: Path) -> WorkerKeys:
    content = _read(folder / WORKER_FILE)
    return WorkerKeys() if content is None else _decode(folder / WORKER_FILE, content, WorkerKeys)


def _decode(path: Path, content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise CommandFailed(
            f"{path} is not what was written there ({error}): remove it, and a start of the hub makes it anew"
        ) from error


def _read(path: Path) -> bytes | None:
    with _told():
        return finding.read_private(path)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except Refusal as error:
        is_open = error.code is RefusalCode.NOT_ALLOWED
        raise CommandFailed(error.message, ExitCode.REFUSED if is_open else ExitCode.FAILED) from error


def _write(path: Path, value: msgspec.Struct) -> Path:
    """Whole or not at all, and readable by nobody else at any moment."""
    make_data_folder(path.parent)
    try:
        # `mkstemp` makes files that only their owner can read.
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(value))
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CommandFailed(
            f"{path} cannot be written: {error.strerror}. Make room on its disk, or see to its rights"
        ) from error
    return path
