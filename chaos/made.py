"""What a worker of a run makes of a job: a digest of the graph it was given.

Its caller computes the same from the graph it submitted, so a result made from another job's payload shows itself.

It stands on nothing of the product: what is tested does not say what is right.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any


def new_nonce() -> str:
    """Chosen by the caller, part of the graph: no two jobs are made from the same."""
    return secrets.token_hex(8)


def made_from(workflow: Mapping[str, Any]) -> str:
    text = json.dumps(_plain(workflow), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Some languages have one kind of number: what went through them is the same graph still."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def graph_in(png: bytes) -> dict[str, Any]:
    """The graph that a picture was made from, as ComfyUI writes it into its files; empty if there is none."""
    place = 8
    while place + 8 <= len(png):
        length, kind = int.from_bytes(png[place : place + 4], "big"), png[place + 4 : place + 8]
        name, _, text = png[place + 8 : place + 8 + length].partition(b"\0")
        if kind == b"tEXt" and name == b"prompt":
            graph: dict[str, Any] = json.loads(text.decode("latin-1"))
            return graph
        place += 12 + length
    return {}


def file_made_from(workflow: Mapping[str, Any]) -> bytes:
    """What lies in a file that a run left."""
    return f"made from {made_from(workflow)}\n".encode() * 64
