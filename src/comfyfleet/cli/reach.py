"""How the commands reach a hub: the one that was named, else the one of this machine, with the key that goes with it.

The key in the data folder is the owner's and goes to that hub alone, wherever else a command asks.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from comfyfleet.cli.endings import run
from comfyfleet.cli.local import HUB_FILE, read_hub
from comfyfleet.cli.printing import echo
from comfyfleet.cli.settings import Resolved, read_settings
from comfyfleet.cli.tables import print_table as print_table
from comfyfleet.client.finding import DEFAULT_URL, exactly
from comfyfleet.client.fleet import FleetClient
from comfyfleet.client.link import HubAway
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.wire.answers import WorkerBody

T = TypeVar("T")

_PATIENCE_S = 3.0
"""Whoever sits at a terminal wants to know soon that nobody answers."""


_ENOUGH = 5
"""Completed jobs from which a rate is told: one job of two seconds is not 1,800 an hour."""


class Reach(msgspec.Struct, frozen=True):
    urls: tuple[str, ...]
    """Of one hub, or of several on one store."""
    key: str | None
    trust: ssl.SSLContext | None
    key_file: Path | None = None
    """Where the key was found, if nobody named one."""

    @property
    def url(self) -> str:
        return self.urls[0]


def find_hub(resolved: Resolved) -> Reach:
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
    return Reach(urls, key, trust, key_file)


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
