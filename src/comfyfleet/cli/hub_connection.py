"""How commands reach a hub: the address, the key, and the files in the data folder that hold both.

A command uses the hub that was named, otherwise the one of this machine. The owner's key in the data folder is sent to
that hub only. A key file that others can read is refused: they may have read the key.
"""

from __future__ import annotations

import logging
import os
import ssl
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from comfyfleet import private_files
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, run
from comfyfleet.cli.settings import DEFAULT, ResolvedSettings, read_settings
from comfyfleet.client import discovery
from comfyfleet.client.client import FleetClient
from comfyfleet.client.connection import HubAway
from comfyfleet.client.discovery import DEFAULT_URL, exactly
from comfyfleet.client.discovery import HUB_FILE as HUB_FILE
from comfyfleet.client.discovery import LocalHub as LocalHub
from comfyfleet.model.errors import Fault, Refusal, RefusalCode

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

WORKER_FILE = "workers.json"


class WorkerKeys(msgspec.Struct, frozen=True):
    """The keys that workers of this machine got by enrolment, by hub and worker."""

    keys: dict[str, dict[str, str]] = {}


def keep_private() -> None:
    """Files that this process creates from now on are readable by their owner only."""
    os.umask(0o077)


def tighten_data_folder(folder: Path) -> None:
    """Makes our files in the folder private, also those of older versions. The folder may hold other files of the user,
    so it and they are not changed. `hub.json` is not changed either: if others could read it, it is refused, because
    its key opens everything."""
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
            "%s holds keys of workers, and other users could read it until now. Revoke the keys if someone may have.",
            keys,
        )


def make_data_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(
            f"the setting 'data' is not valid: cannot create {folder}: {error.strerror}", ExitCode.USAGE
        ) from error


def read_hub(folder: Path) -> LocalHub | None:
    with _command_errors():
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
            f"{path} is damaged ({error}). Remove it: the hub or the worker writes it again when it starts."
        ) from error


def _read(path: Path) -> bytes | None:
    with _command_errors():
        return discovery.read_private(path)


@contextmanager
def _command_errors() -> Iterator[None]:
    try:
        yield
    except Refusal as error:
        is_open = error.code is RefusalCode.NOT_ALLOWED
        raise CommandFailed(error.message, ExitCode.REFUSED if is_open else ExitCode.FAILED) from error


def _write(path: Path, value: msgspec.Struct) -> Path:
    """Writes the whole file or none. Others cannot read it at any moment."""
    make_data_folder(path.parent)
    try:
        # `mkstemp` creates files that only their owner can read.
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
            f"cannot write {path}: {error.strerror}. Check the free space and the permissions of the folder."
        ) from error
    return path


_PATIENCE_S = 3.0
"""A user at a terminal wants to know soon that the hub does not answer."""


class HubTarget(msgspec.Struct, frozen=True):
    urls: tuple[str, ...]
    """The addresses of one hub, or of several on one store."""
    key: str | None
    trust: ssl.SSLContext | None
    key_file: Path | None = None
    """The file that the key comes from, if no setting gave one."""

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
            raise resolved.wrong("trust", f"cannot read certificates: {error}") from error
    elif is_local and local is not None and local.certificate is not None:
        trust = exactly(local.certificate)
    return HubTarget(urls, key, trust, key_file)


_LISTS = {
    "there is no job ": "`comfyfleet jobs` lists the jobs.",
    "there is no key ": "`comfyfleet key list` lists the keys.",
    "there is no webhook ": "`comfyfleet webhook list` lists the webhooks.",
    "there is no worker ": "`comfyfleet workers` lists the workers.",
}
"""By how a message of the hub begins: the command that shows what there is."""


def _hint(error: Refusal, resolved: ResolvedSettings) -> str:
    """What only this side knows: where the key comes from, and which command helps."""
    place = resolved.origin("key").place
    if error.code is RefusalCode.UNAUTHENTICATED:
        return f". It comes from: {place}"
    if error.code is RefusalCode.NOT_ALLOWED and error.message.startswith("a key of role "):
        is_ours = resolved.values.key is not None and read_hub(resolved.data) is not None
        other = f" Without it, commands use the admin key in {resolved.data / HUB_FILE}." if is_ours else ""
        return f". The key comes from: {place}.{other}"
    return next((f". {hint}" for begin, hint in _LISTS.items() if error.message.startswith(begin)), "")


def ask(
    flags: dict[str, Any],
    work: Callable[[FleetClient], Coroutine[Any, Any, T]],
    *,
    patience_s: float = _PATIENCE_S,
) -> T:
    """Runs `work` with a client of the hub that the settings name."""
    config = flags.pop("config", None)
    resolved = read_settings(flags, config=config)
    target = find_hub(resolved)

    async def call(key: str | None) -> T:
        try:
            client = FleetClient(target.urls, key, patience_s=patience_s, trust=target.trust)
        except Refusal as error:
            local = read_hub(resolved.data)
            known = "" if local is None else f". The hub of this machine is at {local.url}."
            raise resolved.wrong("hub", error.message + known) from error
        async with client:
            return await work(client)

    try:
        try:
            return run(call(target.key))
        except Refusal as error:
            if error.code is not RefusalCode.UNAUTHENTICATED or target.key_file is None:
                raise
        # Another hub may run there now. An open hub, such as the demo's, needs no key from this machine.
        return run(call(None))
    except Refusal as error:
        if error.code is RefusalCode.UNAUTHENTICATED and target.key_file is not None:
            message = (
                f"the key in {target.key_file} is not valid at {target.url}: it was revoked, or another hub runs "
                "there. If that hub has another data folder, name it with --data or COMFYFLEET_DATA; or set --key or "
                "COMFYFLEET_KEY. A restart of the hub writes a new key into its data folder."
            )
            raise Refusal(error.code, message, **error.details) from error
        if error.code is RefusalCode.UNAUTHENTICATED and target.key is None:
            # The hub's message names a header; here the key is a setting.
            message = (
                f"{target.url} needs a key. Set COMFYFLEET_KEY, or use --key. `comfyfleet key create` on the hub's "
                "machine makes one."
            )
            raise Refusal(error.code, message, **error.details) from error
        raise Refusal(error.code, error.message + _hint(error, resolved), **error.details) from error
    except HubAway as error:
        if resolved.values.hub:
            raise
        # No setting names a hub, so this is the one of this machine.
        known, missing = "it", ""
        if read_hub(resolved.data) is None:
            known = "one here"
            if resolved.origin("data") is not DEFAULT:
                missing = f" No hub was started with the data folder {resolved.data.absolute()}."
        raise Fault(f"{error}{missing} `comfyfleet up` starts {known}; --hub names another.") from error
