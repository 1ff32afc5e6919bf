"""Classifies the errors of servers of the A1111 family.

The table is tested against recorded answers. Forge writes the text of an exception under another key, and its own
refusals are plain; both forms are read. `policy` decides what follows from a kind of failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from comfyfleet.model.failure import Failure, FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.worker.connectors.a1111.names import Route, plain, sampler, script, upscaler
from comfyfleet.worker.connectors.comfyui.failures import OUT_OF_MEMORY_TYPES, OUT_OF_MEMORY_WORDS

MAX_WORDS = 2_000
MAX_COMPLAINTS = 5
PROXY_STATUSES = frozenset({502, 503, 504})
"""A proxy gave up. The run may go on behind it."""

_MISSING_SCRIPT = re.compile(r"Script '(?P<name>.*)' not found")
_MISSING_UPSCALER = re.compile(r"could not find upscaler named (?P<name>.+)")
_MISSING_MODEL = re.compile(r"model '(?P<name>.*)' not found")
_BAD_PICTURES = ("invalid encoded image", "invalid image url", "requests not allowed", "init image not found")


def fail(kind: FailureKind, message: str, missing: tuple[str, ...] = ()) -> ServiceFailed:
    return ServiceFailed(Failure(kind, message, missing=missing))


def busy(message: str, kind: FailureKind = FailureKind.TRANSIENT) -> ServiceBusy:
    """For a run that was not sent."""
    return ServiceBusy(Failure(kind, message))


def refused_run(
    status: int, body: Any, route: Route, sent: Mapping[str, Any], vram_gb: float | None = None
) -> Failure:
    """For an answer other than 200 to the run `sent`."""
    detail = body.get("detail") if isinstance(body, Mapping) else None
    if status == 422 and isinstance(detail, list):
        return Failure(FailureKind.INVALID_WORKFLOW, f"The server refuses the request: {_complaints(detail)}")
    words = _words(body)
    if status == 404 and words == "Not Found":
        return refused_request(status, body, f"a run of {route}")
    if isinstance(detail, str) and detail:
        return _refused_detail(status, detail, route, sent)
    name = str(body.get("error") or "") if isinstance(body, Mapping) else ""
    if status == 500 and name:
        return _exception(name, words, sent, vram_gb)
    return refused_request(status, body, f"a run of {route}")


def refused_request(status: int, body: Any, what: str) -> Failure:
    """For an answer without an explanation of its own: from a proxy, or from another program at that address."""
    words = _words(body)
    answer = f"The server answered {status} to {what}" + (f": {words}" if words else "")
    if status in (401, 403, 407):
        return Failure(
            FailureKind.DEAD_WORKER,
            f"{answer}. It denies access: give its `--api-auth` as `user` and `password` of the connector.",
        )
    if status == 413:
        return Failure(FailureKind.INVALID_WORKFLOW, f"{answer}. It is too large for this server: send less.")
    if status in (408, 425, 429) or status >= 500:
        return Failure(FailureKind.TRANSIENT, answer)
    if status == 404:
        return Failure(
            FailureKind.DEAD_WORKER, f"{answer}. Start the web UI with --api, or check the address."
        )
    if status in (400, 422):
        return Failure(FailureKind.INVALID_WORKFLOW, answer)
    return Failure(FailureKind.DEAD_WORKER, f"{answer}. It is not the web UI: check the address.")


def not_web_ui(status: int, *, has_web_ui: bool = False) -> str:
    """Why a server cannot be used, without its address."""
    if status in (401, 403):
        return (
            f"it refuses our user and password (status {status}). Give those of its --api-auth, as `user` and "
            "`password` of the connector or in the address"
        )
    if status == 404 and has_web_ui:
        return "the web UI runs there without its API. Start it with --api"
    if 300 <= status < 400:
        return f"it sends us to another address (status {status}). Give that one; is it https:// there?"
    if status >= 500:
        return f"it answers with an error (status {status}). Is the web UI running behind it?"
    return f"what answers there is not the web UI (status {status}). Is the address right?"


def _refused_detail(status: int, detail: str, route: Route, sent: Mapping[str, Any]) -> Failure:
    words = detail[:MAX_WORDS]
    found = _MISSING_SCRIPT.search(detail)
    if found is not None:
        missing = script(route, found["name"])
        return Failure(FailureKind.MISSING_NODE, words, node_id=route, missing=(missing,))
    if "sampler not found" in detail.lower():
        name = str(sent.get("sampler_name") or sent.get("sampler_index") or "")
        message = f"{words}: {name}" if name else words
        return Failure(FailureKind.MISSING_NODE, message, node_id=route, missing=(sampler(name),))
    if detail.lower().startswith(_BAD_PICTURES):
        return Failure(FailureKind.MISSING_INPUT, f"{words}. Send a picture in base64.", node_id=route)
    return refused_request(status, detail, f"a run of {route}")


def _exception(name: str, words: str, sent: Mapping[str, Any], vram_gb: float | None) -> Failure:
    lower = words.lower()
    if name.endswith(OUT_OF_MEMORY_TYPES) or any(each in lower for each in OUT_OF_MEMORY_WORDS):
        return Failure(FailureKind.OUT_OF_MEMORY, words or name, exception_type=name, vram_gb=vram_gb or None)
    if (found := _MISSING_UPSCALER.search(words)) is not None:
        missing = upscaler(found["name"].strip())
        return Failure(FailureKind.MISSING_MODEL, words, exception_type=name, missing=(missing,))
    if (found := _MISSING_MODEL.search(words)) is not None:
        return Failure(FailureKind.MISSING_MODEL, words, exception_type=name, missing=(plain(found["name"]),))
    option = words.strip("'\"")
    if name == "KeyError" and option in (sent.get("override_settings") or {}):
        message = f"The server has no option {option!r}, which `override_settings` names."
        return Failure(FailureKind.MISSING_NODE, message, exception_type=name, missing=(f"option/{option}",))
    return Failure(FailureKind.NODE_ERROR, words or f"The run failed with {name}.", exception_type=name)


def _words(body: Any) -> str:
    if not isinstance(body, Mapping):
        return "" if body is None else str(body)[:MAX_WORDS]
    for name in ("errors", "message", "detail", "error"):
        if isinstance(body.get(name), str) and body[name]:
            return str(body[name])[:MAX_WORDS]
    return ""


def _complaints(detail: list[Any]) -> str:
    found = []
    for each in detail[:MAX_COMPLAINTS]:
        place = each.get("loc") if isinstance(each, Mapping) else None
        where = ".".join(map(str, place)) if isinstance(place, list) else "body"
        found.append(f"{where}: {each.get('msg') if isinstance(each, Mapping) else each}")
    more = f" (and {len(detail) - MAX_COMPLAINTS} more)" if len(detail) > MAX_COMPLAINTS else ""
    return ("; ".join(found))[:MAX_WORDS] + more
