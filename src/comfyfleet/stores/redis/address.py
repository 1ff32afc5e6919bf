"""Parses the URL of a Redis store: server, credentials and key prefix.

    redis://[user[:password]@]host[:port][/database][/prefix][?prefix=…&ca=…]

`rediss://` uses TLS. The prefix becomes the hash tag of every key; the default is `cf`.
"""

from __future__ import annotations

import ssl
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode


class RedisAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    database: int = 0
    username: str | None = None
    password: str | None = None
    is_tls: bool = False
    authority: str | None = None
    """A file with certificates to trust instead of the system's."""
    prefix: str = "{cf}:"

    @property
    def name(self) -> str:
        """For messages, without secrets."""
        return f"{'rediss' if self.is_tls else 'redis'}://{self.host}:{self.port}/{self.database}"

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self.authority) if self.is_tls else None


def document_key(prefix: str) -> str:
    """Outside the prefix: a direct worker's user may access all keys under the prefix."""
    return f"{prefix.removesuffix(':')}!cabinet"


def parse_address(url: str) -> RedisAddress:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        raise Refusal(
            RefusalCode.INVALID_REQUEST, "the URL of a Redis store begins with redis:// or rediss://"
        )
    query = parse_qs(parts.query, keep_blank_values=True)
    if unknown := query.keys() - {"prefix", "ca"}:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the URL of a Redis store takes 'prefix' and 'ca', not {', '.join(sorted(unknown))}",
        )
    segments = [unquote(segment) for segment in parts.path.split("/") if segment]
    database = int(segments.pop(0)) if segments and segments[0].isdigit() else 0
    tag = segments.pop(0) if segments else "cf"
    tag = query.get("prefix", [tag])[-1]
    if segments or not tag or any(mark in tag for mark in "{}: "):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "the path of a Redis URL is /database, /prefix or /database/prefix, "
            "and a prefix has no braces, colons or spaces",
        )
    return RedisAddress(
        host=parts.hostname or "127.0.0.1",
        port=parts.port or 6379,
        database=database,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        is_tls=parts.scheme == "rediss",
        authority=query.get("ca", [None])[-1],
        prefix="{" + tag + "}:",
    )
