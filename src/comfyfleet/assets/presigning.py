"""Requests to S3-compatible storage, signed in their address (AWS Signature Version 4): one object, one method, for a
while.

Headers that are given become part of the signature, so whoever uses the address sends exactly those. Pure: time and
credentials are arguments. What is asked for, and what answers mean, is `storage.py`'s.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

import msgspec

_ALGORITHM = "AWS4-HMAC-SHA256"
MAX_EXPIRY_S = 7 * 86400
"""More than this no storage grants."""


class Credentials(msgspec.Struct, frozen=True):
    access_key: str
    secret_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        # Whatever prints or logs us prints no secret.
        return f"Credentials({self.access_key[:4]}…)"


class Bucket(msgspec.Struct, frozen=True):
    """Where objects lie: `endpoint` is the storage's address, without the bucket."""

    endpoint: str
    region: str
    name: str
    path_style: bool = True
    """The bucket stands in the path; else before the host's name."""

    @property
    def host(self) -> str:
        host = urlsplit(self.endpoint).netloc
        return host if self.path_style else f"{self.name}.{host}"

    def path(self, key: str) -> str:
        """Of an object; of the bucket itself for an empty key. Quoted once: S3 alone of all services wants that."""
        base = urlsplit(self.endpoint).path.rstrip("/")
        return base + quote(f"/{self.name}/{key}" if self.path_style else f"/{key}", safe="/-._~")


def presigned(
    bucket: Bucket,
    credentials: Credentials,
    method: str,
    key: str,
    *,
    now: float,
    expires_s: int,
    headers: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None,
) -> str:
    """The address. `headers` must be sent with the request, exactly as they are here."""
    assert 0 < expires_s <= MAX_EXPIRY_S
    instant = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{instant[:8]}/{bucket.region}/s3/aws4_request"
    signed = {name.lower(): " ".join(value.split()) for name, value in (headers or {}).items()}
    signed["host"] = bucket.host
    names = ";".join(sorted(signed))
    asked = {
        **(query or {}),
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{credentials.access_key}/{scope}",
        "X-Amz-Date": instant,
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": names,
    }
    if credentials.session_token is not None:
        asked["X-Amz-Security-Token"] = credentials.session_token
    path = bucket.path(key)
    line = "&".join(f"{name}={value}" for name, value in sorted(_quoted(*each) for each in asked.items()))
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(signed.items()))
    request = f"{method}\n{path}\n{line}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
    text = f"{_ALGORITHM}\n{instant}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = hmac.new(_signing_key(credentials, scope), text.encode(), hashlib.sha256).hexdigest()
    return f"{urlsplit(bucket.endpoint).scheme}://{bucket.host}{path}?{line}&X-Amz-Signature={signature}"


def _quoted(name: str, value: str) -> tuple[str, str]:
    return quote(name, safe="-._~"), quote(value, safe="-._~")


def _signing_key(credentials: Credentials, scope: str) -> bytes:
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
