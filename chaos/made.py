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
    text = json.dumps(workflow, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_made_from(workflow: Mapping[str, Any]) -> bytes:
    """What lies in a file that a run left."""
    return f"made from {made_from(workflow)}\n".encode() * 64
