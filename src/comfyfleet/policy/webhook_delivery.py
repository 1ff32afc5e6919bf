"""The next state of a webhook delivery after an attempt, and the limit of pending deliveries. Pure."""

from __future__ import annotations

import math

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.webhook import Delivery, DeliveryStatus
from comfyfleet.policy.rules import Rules

_GONE = 410
_GROWTH = 3


class DeliveryAttempt(msgspec.Struct, frozen=True):
    """The result of one attempt: the HTTP status, or the reason why there was no response."""

    status: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    """The receiver's `Retry-After`."""


def check_pending(pending: int, most: int) -> None:
    """Refuse a job with a webhook if too many deliveries are pending."""
    if pending >= most:
        raise Refusal(
            RefusalCode.QUEUE_FULL,
            f"{pending} deliveries of this tenant are pending, which is the limit: check the receivers "
            "(GET /api/deliveries?status=pending), or submit without a webhook",
            pending=pending,
        )


def after_attempt(
    delivery: Delivery, attempted: DeliveryAttempt, *, now: float, fraction: float, rules: Rules
) -> Delivery:
    status, tries = attempted.status, delivery.tries + 1
    is_done = status is not None and 200 <= status < 300
    is_over = is_done or status == _GONE or tries >= rules.delivery_tries
    ended = DeliveryStatus.DELIVERED if is_done else DeliveryStatus.GIVEN_UP
    return msgspec.structs.replace(
        delivery,
        status=ended if is_over else DeliveryStatus.PENDING,
        attempts=delivery.attempts + 1,
        tries=tries,
        next_at=now + wait_s(tries, fraction, rules, attempted.retry_after_s),
        claimed_until=None,
        last_at=now,
        last_status=status,
        last_error=None if is_done else attempted.error or _said(status),
        ended_at=now if is_over else None,
    )


def wait_s(tries: int, fraction: float, rules: Rules, retry_after_s: float | None = None) -> float:
    """Exponential backoff with a cap. Half of the wait is random, so that deliveries that failed together spread. A
    receiver may ask for more time, within the cap."""
    longest = min(rules.delivery_cap_s, rules.delivery_base_s * math.pow(_GROWTH, min(tries - 1, 30)))
    asked = retry_after_s if retry_after_s is not None and math.isfinite(retry_after_s) else 0.0
    return max(longest * (1 + fraction) / 2, min(asked, rules.delivery_cap_s))


def abandoned(delivery: Delivery, why: str, now: float) -> Delivery:
    return msgspec.structs.replace(
        delivery,
        status=DeliveryStatus.GIVEN_UP,
        claimed_until=None,
        last_at=now,
        last_status=None,
        last_error=why,
        ended_at=now,
    )


def retried_manually(delivery: Delivery, now: float) -> Delivery:
    """A manual retry: at once, with all tries."""
    return msgspec.structs.replace(
        delivery, status=DeliveryStatus.PENDING, tries=0, next_at=now, claimed_until=None, ended_at=None
    )


def _said(status: int | None) -> str:
    if status is not None and 300 <= status < 400:
        return f"the receiver answered {status}: redirects are not followed, name the right URL"
    if status == _GONE:
        return "the receiver answered 410: it accepts no more deliveries"
    return f"the receiver answered {status}; 2xx was expected"
