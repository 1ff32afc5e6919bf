"""What a receiver may believe: signed by the hub, this very body, and not long ago."""

from __future__ import annotations

import base64
import hmac
import time

import pytest

from comfyfleet import Refusal, verify_webhook
from comfyfleet.wire.webhooks import is_signed, new_secret, signatures

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = new_secret(b"x" * 32)
BODY = b'{"type":"job.completed","timestamp":"2026-01-01T00:00:00.000Z","data":{"id":"a"}}'
NOW = 1_700_000_000


def signed(body: bytes = BODY, at: int = NOW, *secrets: str) -> dict[str, str]:
    return {
        "Webhook-Id": "a_3_job",
        "webhook-timestamp": str(at),
        "WEBHOOK-SIGNATURE": signatures(secrets or (SECRET,), "a_3_job", at, body),
    }


def test_the_form_is_that_of_standard_webhooks() -> None:
    """The example that its libraries are tested with."""
    known = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    message = ("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}')
    assert signatures([SECRET], message[0], int(message[1]), message[2]) == known
    assert is_signed(SECRET, *message, f"v1a,xx v1,nonsense {known}")
    assert not is_signed(SECRET, *message, known.removeprefix("v1,"))


def test_a_delivery_is_believed_as_bytes_and_as_text() -> None:
    for body in (BODY, BODY.decode()):
        event = verify_webhook(body, signed(), SECRET, now=NOW)
        assert (event.id, event.type, event.data) == ("a_3_job", "job.completed", {"id": "a"})
    assert verify_webhook(BODY, signed(BODY, int(time.time())), SECRET).id == "a_3_job"


def test_either_of_two_secrets_will_do() -> None:
    verify_webhook(BODY, signed(BODY, NOW, OTHER, SECRET), SECRET, now=NOW)
    verify_webhook(BODY, signed(), [OTHER, SECRET], now=NOW)


@pytest.mark.parametrize(
    ("headers", "body", "secret", "now", "why"),
    [
        (signed(), BODY + b" ", SECRET, NOW, "signature"),
        (signed(), BODY, OTHER, NOW, "signature"),
        (signed(), BODY, [], NOW, "signature"),
        (signed(), BODY, SECRET, NOW + 301, "replay"),
        (signed(), BODY, SECRET, NOW - 301, "replay"),
        (signed() | {"Webhook-Id": "another"}, BODY, SECRET, NOW, "signature"),
        (signed() | {"Webhook-Id": "a\udcff"}, BODY, SECRET, NOW, "signature"),
        (signed(), BODY.decode() + "\udcff", SECRET, NOW, "signature"),
        (signed() | {"webhook-timestamp": str(NOW + 1)}, BODY, SECRET, NOW, "signature"),
        (signed() | {"webhook-timestamp": "soon"}, BODY, SECRET, NOW, "not a time"),
        (signed() | {"webhook-timestamp": "9" * 400}, BODY, SECRET, NOW, "not a time"),
        (signed() | {"WEBHOOK-SIGNATURE": ""}, BODY, SECRET, NOW, "signature"),
        (signed() | {"WEBHOOK-SIGNATURE": "v1,ä \ud800"}, BODY, SECRET, NOW, "signature"),
        ({}, BODY, SECRET, NOW, "webhook-id is missing"),
        (signed(b"[]"), b"[]", SECRET, NOW, "not an event"),
        (signed(b"\xff"), b"\xff", SECRET, NOW, "not an event"),
    ],
)
def test_everything_else_is_refused(
    headers: dict[str, str], body: bytes | str, secret: str | list[str], now: float, why: str
) -> None:
    with pytest.raises(Refusal, match=why) as refused:
        verify_webhook(body, headers, secret, now=now)
    assert refused.value.code == "unauthenticated"


def test_what_is_no_secret_is_told_to_whoever_set_it() -> None:
    with pytest.raises(ValueError, match="whsec_"):
        verify_webhook(BODY, signed(), "not base64!", now=NOW)


@pytest.mark.parametrize("secret", ["", "whsec_", ["whsec_", SECRET]])
def test_a_secret_that_was_forgotten_verifies_nothing(secret: str | list[str]) -> None:
    """With no key at all anybody can sign."""
    nothing = base64.b64encode(hmac.digest(b"", f"a_3_job.{NOW}.".encode() + BODY, "sha256")).decode()
    with pytest.raises(ValueError, match="empty"):
        verify_webhook(BODY, signed() | {"WEBHOOK-SIGNATURE": f"v1,{nothing}"}, secret, now=NOW)
