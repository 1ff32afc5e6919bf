"""How the commands reach a hub: the one that was named, else the one of this machine, with the key that goes with it.

The key in the data folder is the owner's and goes to that hub alone, wherever else a command asks.

What a program keeps in its data folder for others of the same user: where the hub is, and keys.

A file that others can read is refused: whoever can read it may have read the key.

What keeps a worker from work, in a line: for `workers` and `top`.

An export on its way to a file or to standard output, and the number of its last line.
"""

from __future__ import annotations

import csv
import logging
import os
import ssl
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from comfyfleet import private_files
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, run
from comfyfleet.cli.output import echo
from comfyfleet.cli.output import print_table as print_table
from comfyfleet.cli.settings import ResolvedSettings, read_settings
from comfyfleet.client import discovery
from comfyfleet.client.client import FleetClient
from comfyfleet.client.connection import HubAway
from comfyfleet.client.discovery import DEFAULT_URL, exactly
from comfyfleet.client.discovery import HUB_FILE as HUB_FILE
from comfyfleet.client.discovery import LocalHub as LocalHub
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.wire.answers import WorkerBody

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
    from comfyfleet.stores.sqlite.maintenance import tighten_databases

    if not folder.is_dir():
        return
    tighten_databases(folder)
    for name in ("files", "journal"):
        private_files.tighten(folder / name)
    keys = folder / WORKER_FILE
    if private_files.is_open_to_others(keys):
        private_files.tighten(keys)
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
        return discovery.read_hub(folder)


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
        return discovery.read_private(path)


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


_PATIENCE_S = 3.0
"""Whoever sits at a terminal wants to know soon that nobody answers."""


_ENOUGH = 5
"""Completed jobs from which a rate is told: one job of two seconds is not 1,800 an hour."""


class HubTarget(msgspec.Struct, frozen=True):
    urls: tuple[str, ...]
    """Of one hub, or of several on one store."""
    key: str | None
    trust: ssl.SSLContext | None
    key_file: Path | None = None
    """Where the key was found, if nobody named one."""

    @property
    def url(self) -> str:
        return self.urls[0]


def find_hub(resolved: ResolvedSettings) -> HubTarget:
    chosen = resolved.values
    local = read_hub(resolved.data)
    urls = tuple(url.rstrip("/") for url in chosen.hub)
    urls = urls or ((DEFAULT_URL if local is None else local.url).rstrip("/"),)
    is_local = local is not None and local.url in urls
    key, trust, key_file = chosen.key, None, None
    if key is None and is_local and local is not None:
        key, key_file = local.key, resolved.data / HUB_FILE
    if chosen.trust is not None:
        try:
            trust = ssl.create_default_context()
            trust.load_verify_locations(chosen.trust)
        except (OSError, ssl.SSLError) as error:
            raise resolved.wrong("trust", f"there are no certificates to read: {error}") from error
    elif is_local and local is not None and local.certificate is not None:
        trust = exactly(local.certificate)
    return HubTarget(urls, key, trust, key_file)


def ask(
    flags: dict[str, Any],
    work: Callable[[FleetClient], Coroutine[Any, Any, T]],
    *,
    patience_s: float = _PATIENCE_S,
) -> T:
    """Does the work with a client of the hub that the flags, or their places, mean."""
    config = flags.pop("config", None)
    resolved = read_settings(flags, config=config)
    reach = find_hub(resolved)

    async def asking(key: str | None) -> T:
        try:
            client = FleetClient(reach.urls, key, patience_s=patience_s, trust=reach.trust)
        except Refusal as error:
            local = read_hub(resolved.data)
            known = "" if local is None else f". The hub of this machine is at {local.url}"
            raise resolved.wrong("hub", error.message + known) from error
        async with client:
            return await work(client)

    try:
        try:
            return run(asking(reach.key))
        except Refusal as error:
            if error.code is not RefusalCode.UNAUTHENTICATED or reach.key_file is None:
                raise
        # Another hub may answer there by now; an open one, as the demo's, asks this machine for no key.
        return run(asking(None))
    except Refusal as error:
        if error.code is RefusalCode.UNAUTHENTICATED and reach.key_file is not None:
            told = (
                f"the key in {reach.key_file} is not good at {reach.url}: it was revoked, or another hub is there. "
                "A start of the hub with that data folder makes a new one; --key, or COMFYFLEET_KEY, names another"
            )
            raise Refusal(error.code, told, **error.details) from error
        if error.code is RefusalCode.UNAUTHENTICATED and reach.key is None:
            # The hub speaks of headers; here it is a setting.
            told = f"{reach.url} wants a key: set COMFYFLEET_KEY, or give --key"
            raise Refusal(error.code, told, **error.details) from error
        raise
    except HubAway as error:
        if resolved.values.hub:
            raise
        # Nobody named a hub: it is the one of this machine.
        known = "one here" if read_hub(resolved.data) is None else "it"
        raise Fault(f"{error} `comfyfleet up` starts {known}, --hub names another") from error


def print_json(value: Any) -> None:
    """One object or list, indented; what is unset is null."""
    echo(msgspec.json.format(msgspec.json.encode(plain(value))).decode())


def plain(value: Any) -> Any:
    """As builtins, with every field that the wire would leave out."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__
        kind = {} if tag.tag_field is None else {tag.tag_field: tag.tag}
        return kind | {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return msgspec.to_builtins(value)


def print_pairs(pairs: list[tuple[str, object]]) -> None:
    """Names and values, a pair a line, whatever the longest name is."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        echo(f"{name:<{width}}  {shown}")


def rate(worker: WorkerBody) -> str:
    """Jobs an hour, where enough were completed to say so."""
    if worker.completed < _ENOUGH:
        return "–"
    return f"{worker.per_hour:.0f}" if worker.per_hour >= 10 else f"{worker.per_hour:.2g}"


def state_of(worker: WorkerBody) -> str:
    """Its status, and whether it only pretends."""
    return f"{worker.status.value} (fake)" if worker.is_fake else worker.status.value


def ago(at: float | None, now: float) -> str:
    """So long before now, in one unit."""
    if at is None:
        return "–"
    seconds = max(0.0, now - at)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def note_on(worker: WorkerBody, now: float) -> str:
    """Empty: nothing does."""
    if worker.offline_reason:
        return f"offline: {worker.offline_reason}"
    notes = []
    if worker.quarantined_until is not None and now < worker.quarantined_until:
        left_s = worker.quarantined_until - now
        notes.append(f"quarantined for another {left_s:.0f} s: too many different workflows failed on it")
    if worker.blocked_workflows:
        count = worker.blocked_workflows
        what = "1 workflow" if count == 1 else f"{count} workflows"
        until = "until lifted"
        if worker.blocked_until is not None:
            first = "" if count == 1 else "the first one "
            until = f"{first}for another {max(0.0, worker.blocked_until - now):.0f} s"
        notes.append(f"blocked for {what}, {until} (comfyfleet blocks)")
    return "; ".join(notes)


def notes_on(workers: list[WorkerBody], now: float) -> list[str]:
    """One line for each worker that something keeps from work."""
    return [f"{worker.id}: {note}" for worker in workers if (note := note_on(worker, now))]


_Pieces = AsyncGenerator[bytes, None]


async def show(pieces: _Pieces, form: str) -> int | None:
    return await _write_export(pieces, sys.stdout.buffer, form)


async def save(out: Path, pieces: _Pieces, form: str) -> int | None:
    """Whole or not at all."""
    try:
        file = private_files.create(out)
    except FileExistsError as error:
        raise CommandFailed(f"{out} is there already: choose another name", ExitCode.USAGE) from error
    try:
        with file:
            return await _write_export(pieces, file, form)
    except BaseException:
        _drop(out)
        raise


def _drop(out: Path) -> None:
    out.unlink(missing_ok=True)


async def _write_export(pieces: _Pieces, file: BinaryIO, form: str) -> int | None:
    last, ended = b"", b""
    async with aclosing(pieces):
        async for piece in pieces:
            file.write(piece)
            *whole, last = (last + piece).split(b"\n")
            ended = next((line for line in reversed(whole) if line.strip()), ended)
    file.flush()
    return _number(ended, form)


def _number(line: bytes, form: str) -> int | None:
    """Of the last line; None of the heading, and of nothing."""
    if form == "jsonl":
        return int(msgspec.json.decode(line)["number"]) if line else None
    row = next(csv.reader([line.decode()]), [])
    return int(row[0]) if row and row[0].isdigit() else None
