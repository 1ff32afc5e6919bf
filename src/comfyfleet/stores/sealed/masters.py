"""Master keys by id, as an operator writes them: `ID=KEY`, one a line in a file or one after the other in a setting."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable

import msgspec

from comfyfleet.stores.sealed.values import KEY_BYTES

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class MasterKeys(msgspec.Struct, frozen=True):
    keys: dict[str, bytes] = {}
    current: str | None = None
    """The one that data keys are wrapped with. None: what is sealed is opened, and nothing more is sealed."""

    def __repr__(self) -> str:
        # Whatever prints it: its keys are nobody's business.
        return f"MasterKeys({', '.join(self.keys)}; current {self.current})"


def read_master_keys(lines: Iterable[str], current: str = "") -> MasterKeys:
    """`current` is the id of one of them, `none`, or empty for the first. Raises ValueError, which quotes no key."""
    keys: dict[str, bytes] = {}
    for line in lines:
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key_id, _, text = line.partition("=")
        key_id = key_id.strip()
        if not _ID.fullmatch(key_id) or not text:
            raise ValueError("a key is written as ID=KEY; an id has letters, digits, '.', '_' and '-'")
        if key_id in keys:
            raise ValueError(f"there are two keys with the id {key_id!r}")
        keys[key_id] = _secret(key_id, text.strip())
    if not keys:
        raise ValueError("there is no key: `comfyfleet encryption new-key` makes one")
    if current == "none":
        return MasterKeys(keys)
    if current and current not in keys:
        raise ValueError(f"the current key is to be {current!r}, but the keys are {', '.join(sorted(keys))}")
    return MasterKeys(keys, current or next(iter(keys)))


def _secret(key_id: str, text: str) -> bytes:
    try:
        secret = bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ValueError(f"the key {key_id!r} is not {KEY_BYTES} bytes in base64 or hexadecimal digits")
    return secret
