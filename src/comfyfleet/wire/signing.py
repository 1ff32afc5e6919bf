"""How a delivery is signed: HMAC-SHA256 over id, timestamp and body, in the form of Standard Webhooks.

Who has which secret, and for how long an old one still signs, is kept elsewhere; here is what both sides compute.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

SECRET_PREFIX = "whsec_"

ID_HEADER = "webhook-id"
TIME_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
_VERSION = "v1,"


def new_secret(chance: bytes) -> str:
    return SECRET_PREFIX + base64.b64encode(chance).decode()


def signatures(secrets: Iterable[str], delivery_id: str, timestamp: int, body: bytes) -> str:
    """One for each secret: while an old one is still good, receivers that have either can verify."""
    return " ".join(_VERSION + _sign(secret, delivery_id, str(timestamp), body) for secret in secrets)


def is_signed(secret: str, delivery_id: str, timestamp: str, body: bytes, given: str) -> bool:
    """Whether one of the signatures that were given is this secret's. Raises `ValueError` for what is no secret."""
    good = (_VERSION + _sign(secret, delivery_id, timestamp, body)).encode()
    found = False
    for each in given.split(" "):
        found |= hmac.compare_digest(good, each.encode("utf-8", "replace"))
    return found


def _sign(secret: str, delivery_id: str, timestamp: str, body: bytes) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a secret begins with {SECRET_PREFIX} and goes on in base64") from error
    if not key:
        # Anybody can sign with nothing. It is what a receiver has whose setting was forgotten.
        raise ValueError(f"the secret is empty: it begins with {SECRET_PREFIX} and goes on in base64")
    # Whatever was sent as an id is compared: some servers tell bytes that are no text by surrogates.
    signed = f"{delivery_id}.{timestamp}.".encode("utf-8", "surrogatepass") + body
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
