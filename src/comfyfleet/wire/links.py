"""What is answered to whoever moves a file by a link: by a hub, whose links have no host, or by S3-compatible storage.

Links are secrets for as long as they are good: what is told of one is where it leads, without its signature.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.wire.problems import refusal_in

_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_LATER = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "IncompleteBody"})
"""Codes of a storage that say "not now", whatever their status."""


def resolved(hub: str, link: str) -> str:
    """Where a link leads, for whoever has it of this hub."""
    return link if is_elsewhere(link) else hub + link


def is_elsewhere(link: str) -> bool:
    return link.startswith(("http://", "https://"))


def place(url: str) -> str:
    """Where it leads, fit to be told."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def told(error: Exception) -> str:
    """What a way broke by, without the address that some errors repeat."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, TimeoutError):
        return "it took too long"
    return str(cause) if isinstance(cause, OSError) and cause.errno is not None else type(cause).__name__


def refusal_by_link(link: str, status: int, body: bytes) -> Refusal | Fault:
    return storage_refusal(status, body) if is_elsewhere(link) else refusal_in(status, body)


def storage_refusal(status: int, body: bytes) -> Refusal | Fault:
    found = _CODE.search(body[:4_096])
    code = found[1].decode() if found else ""
    told = f"{status} {code}".rstrip()
    if code in _LATER:
        return Fault(f"the storage asks for another try ({told})")
    match status:
        case 401 | 403:
            return Refusal(
                RefusalCode.UNAUTHENTICATED,
                f"the storage does not take the link (any more), or not for this ({told}): ask for a new one",
            )
        case 404:
            return Refusal(RefusalCode.NOT_FOUND, f"the storage has no such file ({told})")
        case 412:
            return Refusal(RefusalCode.WRONG_PHASE, "this file has been received already: make a new one")
        case 413:
            return Refusal(RefusalCode.TOO_LARGE, f"the storage takes no file of this size ({told})")
        case 400 | 411:
            return Refusal(
                RefusalCode.INVALID_REQUEST, f"the storage found another file than was announced ({told})"
            )
        case _:
            return Fault(f"the storage answered {told}")
