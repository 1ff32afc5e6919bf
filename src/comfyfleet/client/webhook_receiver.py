"""For receivers of webhooks: checks that a delivery comes from the hub, and reads it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.wire.webhooks import ID_HEADER, SIGNATURE_HEADER, TIME_HEADER, is_signed


class WebhookEvent(msgspec.Struct, frozen=True):
    """The content of a delivery. `id` stays the same when it is sent again, so receivers can drop repeats."""

    type: str
    """`job.completed`, `job.failed`, `job.cancelled`, …"""
    timestamp: str
    data: dict[str, Any]
    id: str = ""


def verify_webhook(
    body: bytes | str,
    headers: Mapping[str, str],
    secret: str | Iterable[str],
    *,
    tolerance_s: float = 300.0,
    now: float | None = None,
) -> WebhookEvent:
    """Returns the event if one of the secrets signed exactly this body at most `tolerance_s` ago.

    `body` is the request's body as it was received, before parsing. Raises `Refusal` for any other request:
    answer it with 400 or 401. Raises `ValueError` if the receiver's secret is not a valid one.
    """
    content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    given = {name.lower(): value for name, value in headers.items()}
    try:
        delivery_id, timestamp, signature = (
            given[each] for each in (ID_HEADER, TIME_HEADER, SIGNATURE_HEADER)
        )
    except KeyError as error:
        raise _refused(f"the header {error.args[0]} is missing") from error
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) < 16):
        raise _refused(f"{TIME_HEADER} is not a time in seconds")
    if abs((time.time() if now is None else now) - int(timestamp)) > tolerance_s:
        raise _refused("it was signed too long ago, or this clock is wrong: it may be a replay")
    secrets = [secret] if isinstance(secret, str) else list(secret)
    if not any(is_signed(each, delivery_id, timestamp, content, signature) for each in secrets):
        raise _refused("the signature is not the hub's: the secret is another one, or the body was changed")
    try:
        event = msgspec.json.decode(content, type=WebhookEvent)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refused(f"the body is not an event: {error}") from error
    return msgspec.structs.replace(event, id=delivery_id)


def _refused(why: str) -> Refusal:
    return Refusal(RefusalCode.UNAUTHENTICATED, f"the webhook cannot be trusted: {why}")
