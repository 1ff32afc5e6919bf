"""What follows from an attempt to deliver, as a table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.webhook import Delivery, DeliveryStatus
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.webhook_delivery import (
    DeliveryAttempt,
    abandoned,
    after_attempt,
    retried_manually,
    wait_s,
)

RULES = Rules()
NEW = Delivery(
    JobId("a"), 3, "job", TenantId("acme"), "https://example.com/", FactKind.COMPLETED, 1, 0.0, 0.0
)


@pytest.mark.parametrize(
    ("attempted", "status", "error"),
    [
        (DeliveryAttempt(200), "delivered", None),
        (DeliveryAttempt(204), "delivered", None),
        (DeliveryAttempt(299), "delivered", None),
        (DeliveryAttempt(199), "pending", "answered 199"),
        (DeliveryAttempt(302), "pending", "redirects are not followed"),
        (DeliveryAttempt(400), "pending", "answered 400"),
        (DeliveryAttempt(404), "pending", "answered 404"),
        (DeliveryAttempt(410), "given_up", "accepts no more deliveries"),
        (DeliveryAttempt(503), "pending", "answered 503"),
        (DeliveryAttempt(error="cannot be reached"), "pending", "cannot be reached"),
    ],
)
def test_an_answer_decides(attempted: DeliveryAttempt, status: str, error: str | None) -> None:
    after = after_attempt(NEW, attempted, now=10.0, fraction=0.5, rules=RULES)
    assert (after.status, after.attempts, after.last_at) == (status, 1, 10.0)
    assert after.last_status == attempted.status
    assert after.last_error is None if error is None else error in str(after.last_error)
    assert (after.ended_at is None) == (status == "pending")
    assert after.delivery_id == NEW.delivery_id


def test_tries_end_and_begin_anew_when_asked_for() -> None:
    delivery, now = NEW, 0.0
    while delivery.status is DeliveryStatus.PENDING:
        delivery = after_attempt(delivery, DeliveryAttempt(500), now=now, fraction=1.0, rules=RULES)
        now = delivery.next_at
    assert delivery.attempts == RULES.delivery_tries
    assert delivery.ended_at is not None and 12 * 3600 < delivery.ended_at < RULES.keep_completed_s
    again = retried_manually(delivery, now)
    assert (again.status, again.tries, again.next_at) == (DeliveryStatus.PENDING, 0, now)
    assert again.attempts == RULES.delivery_tries
    assert abandoned(again, "gone", now).last_error == "gone"


@given(
    tries=st.integers(1, 10_000),
    fraction=st.floats(0, 1),
    retry_after_s=st.none() | st.just(math.nan) | st.floats(0),
)
def test_a_wait_grows_and_has_its_bounds(tries: int, fraction: float, retry_after_s: float | None) -> None:
    wait = wait_s(tries, fraction, RULES, retry_after_s)
    assert RULES.delivery_base_s / 2 <= wait <= RULES.delivery_cap_s
    assert wait <= wait_s(tries + 1, fraction, RULES, retry_after_s)
    if retry_after_s is not None and retry_after_s <= RULES.delivery_cap_s:
        assert wait >= retry_after_s
