"""Finds the hub of this machine and its key, for callers who give neither.

A hub writes both into its data folder, for its user only. The environment and `comfyfleet.toml` come first.
"""

from __future__ import annotations

import os
import ssl
import stat
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode

DEFAULT_URL = "http://127.0.0.1:3001"
HUB_FILE = "hub.json"
FILE_NAME = "comfyfleet.toml"
_PREFIX = "COMFYFLEET_"


class LocalHub(msgspec.Struct, frozen=True, omit_defaults=True):
    """The hub of this data folder, and its owner's key."""

    url: str
    key: str | None = None
    certificate: str | None = None
    host: str | None = None
    """Where the hub listens, if other machines may reach it there."""


class FoundHub(msgspec.Struct, frozen=True):
    urls: tuple[str, ...]
    key: str | None = None
    trust: ssl.SSLContext | None = None


def find_hub(environment: Mapping[str, str] | None = None) -> FoundHub:
    """Finds the hub in the same way as the commands."""
    environment = os.environ if environment is None else environment
    given = _given(environment)
    data = given.get("data")
    local = read_hub(Path(data) if data else default_data_folder(environment))
    named = given.get("hub") or ()
    urls = tuple(named.replace(",", " ").split() if isinstance(named, str) else named)
    urls = urls or (DEFAULT_URL if local is None else local.url,)
    is_local = local is not None and local.url in [url.rstrip("/") for url in urls]
    key, trust = given.get("key"), None
    if given.get("trust"):
        trust = ssl.create_default_context()
        try:
            trust.load_verify_locations(given["trust"])
        except (OSError, ssl.SSLError) as error:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"cannot read certificates from {given['trust']}: {error}"
            ) from error
    if is_local and local is not None:
        key = key or local.key
        if trust is None and local.certificate is not None:
            trust = exactly(local.certificate)
    return FoundHub(urls, key, trust)


def _given(environment: Mapping[str, str]) -> dict[str, Any]:
    path = Path(environment.get(f"{_PREFIX}CONFIG") or FILE_NAME)
    given: dict[str, Any] = {}
    if path.is_file():
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"cannot read {path}: {error}") from error
    for name in ("data", "hub", "key", "trust"):
        if value := environment.get(f"{_PREFIX}{name.upper()}"):
            given[name] = value
    return given


def default_data_folder(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HOME") or Path.home())
    if sys.platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home) / "comfyfleet"
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "comfyfleet"
    return Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share") / "comfyfleet"


def read_hub(folder: Path) -> LocalHub | None:
    path = folder / HUB_FILE
    content = read_private(path)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=LocalHub)
    except msgspec.MsgspecError as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{path} is damaged ({error}): remove it, and the hub writes it again at its next start",
        ) from error


def read_private(path: Path) -> bytes | None:
    """Refuses a file that others can read: they may have read the key."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
                raise Refusal(
                    RefusalCode.NOT_ALLOWED,
                    f"{path} contains a key and other users can read it: run `chmod 600 {path}`, and revoke the key "
                    "if they may have read it",
                )
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"cannot read {path}: {error.strerror}") from error


def exactly(certificate: str) -> ssl.SSLContext | None:
    """Trusts only the hub's own certificate, for any host name: the hub is on this machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except (OSError, ssl.SSLError):
        return None
    return context
