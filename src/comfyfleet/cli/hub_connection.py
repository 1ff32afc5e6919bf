"""How the commands reach a hub: the one that was named, else the one of this machine, with the key that goes with it.

The key in the data folder is the owner's and goes to that hub alone, wherever else a command asks.

What a program keeps in its data folder for others of the same user: where the hub is, and keys.

A file that others can read is refused: whoever can read it may have read the key.

What a shell completes behind a command: the ids of jobs and workers, asked of the hub while somebody presses a key.

Nothing is ever told here: a hub that is away, or a key that may not look, completes nothing.

Ids of jobs as people write them: whole, or the beginning or the end of one, as far as that means one job.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
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

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from comfyfleet.client.client import FleetClient


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


_MOST = 50
_ANSWER_S = 1.0
"""Whoever waits for a completion has typed on by then."""


def job_ids(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    async def found(client: FleetClient) -> Sequence[tuple[str, str]]:
        return [(job.id, job.status) for job in (await client.jobs(limit=_MOST)).jobs]

    return _completed(context, begun, found)


def worker_ids(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    async def found(client: FleetClient) -> Sequence[tuple[str, str]]:
        return [(worker.id, worker.status.value) for worker in await client.workers()]

    return _completed(context, begun, found)


def _completed(
    context: click.Context,
    begun: str,
    found: Callable[[FleetClient], Coroutine[Any, Any, Sequence[tuple[str, str]]]],
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from comfyfleet.cli.options import TO_REACH

    flags = {name: context.params.get(name) for name in TO_REACH}
    try:
        listed = ask(flags, found, patience_s=_ANSWER_S)
    except Exception:
        # A traceback between the words that somebody types helps nobody.
        return []
    return [CompletionItem(name, help=state) for name, state in listed if name.startswith(begun)]


_WHOLE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PART = re.compile(r"[0-9a-f-]{4,35}")
_SHOWN = 8
"""Characters at the end of an id that a table shows: ids begin with the time, so jobs of one moment begin alike."""
_PAGE, _PAGES = 1_000, 10
_NAMED = 5


def short_ids(job_ids: Iterable[str]) -> dict[str, str]:
    """The end of each, as long as it takes to tell them apart."""
    every = set(job_ids)
    for length in range(_SHOWN, 36):
        if len({job_id[-length:] for job_id in every}) == len(every):
            return {job_id: job_id[-length:] for job_id in every}
    return {job_id: job_id for job_id in every}


async def whole_id(client: FleetClient, given: str) -> str:
    """The id of the one job that is meant. What is no part of an id, or of no job, is left to the hub to refuse."""
    part = given.lower().removeprefix("…")
    if _WHOLE.fullmatch(part) or not _PART.fullmatch(part):
        return given
    found: dict[str, str] = {}
    cursor: str | None = None
    for _ in range(_PAGES):
        page = await client.jobs(cursor=cursor, limit=_PAGE)
        found |= {job.id: job.status for job in page.jobs if job.id.startswith(part) or job.id.endswith(part)}
        cursor = page.cursor
        if cursor is None:
            break
    if not found:
        if cursor is not None:
            raise CommandFailed(
                f"none of the newest {_PAGE * _PAGES:,} jobs has an id that begins or ends with {given!r}: give the "
                "whole id",
                ExitCode.REFUSED,
            )
        return given
    if len(found) > 1:
        named = ", ".join(f"{job_id} ({status})" for job_id, status in list(found.items())[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise CommandFailed(
            f"{given!r} may mean {len(found)} jobs: {named}{more}. Give more of the id", ExitCode.USAGE
        )
    return next(iter(found))


def ask_about(flags: dict[str, Any], job_id: str, work: Callable[[FleetClient, str], Awaitable[T]]) -> T:
    """`ask` about one job, by its id or a part of it."""

    async def asking(client: FleetClient) -> T:
        return await work(client, await whole_id(client, job_id))

    return ask(flags, asking)
