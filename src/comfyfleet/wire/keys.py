"""Keys, enrolments and the audit log as an administrator asks for and sees them. A secret is shown once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.access import ApiKey, AuditEntry, Enrolment, Role
from comfyfleet.wire.bodies import Name, Seconds, Time


class KeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Role
    name: Annotated[str, Meta(max_length=256)] = ""
    tenant: Name | None = None
    worker_id: Name | None = None
    expires_in_s: Seconds | None = None


class RotateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    overlap_s: Seconds = 0.0
    """So long the old secret still opens."""


class EnrolmentBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    uses: Annotated[int, Meta(ge=1, le=100_000)] = 1
    expires_in_s: Annotated[float, Meta(gt=0, le=1e8)] = 3600.0
    worker_prefix: Annotated[str, Meta(max_length=256)] = ""
    replace: bool = False
    """A worker that has a key gets a new one, and its old ones end. Otherwise it is refused."""


class KeyView(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    role: Role
    created_at: float
    name: str = ""
    tenant: str | None = None
    worker_id: str | None = None
    expires_at: float | None = None
    revoked_at: float | None = None


class KeyMade(KeyView, frozen=True):
    key: str = ""
    """The whole key. It is not kept, and cannot be shown again."""


class KeyList(msgspec.Struct, frozen=True):
    keys: tuple[KeyView, ...]
    cursor: str | None = None


class EnrolmentMade(msgspec.Struct, frozen=True):
    token: str
    expires_at: float
    uses: int
    id: str = ""
    created_at: float = 0.0
    uses_left: int = 0


class EnrolmentView(msgspec.Struct, frozen=True):
    id: str
    created_at: float
    expires_at: float
    uses_left: int
    is_good: bool
    """Neither used up nor expired."""
    worker_prefix: str = ""
    replace: bool = False


class EnrolmentList(msgspec.Struct, frozen=True):
    enrolments: tuple[EnrolmentView, ...]
    cursor: str | None = None


class AuditQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`operations`: what was done to keys, queue and workers. `jobs`: what callers did to jobs."""

    kind: Literal["operations", "jobs"] = "operations"
    since: Time | None = None
    cursor: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class AuditView(AuditEntry, frozen=True):
    id: str = ""
    number: int = 0
    """Of the entry in its chain, from 1 on without a gap."""
    previous: str = ""
    """The hash of the entry before it."""
    hash: str = ""
    """SHA-256 of `previous`, a line feed, and the entry as JSON with its names in order, without these four."""


class AuditList(msgspec.Struct, frozen=True):
    entries: tuple[AuditView, ...]
    cursor: str | None = None


class AuditPage(msgspec.Struct, frozen=True):
    """The same at a client, with whatever fields a newer hub has: all of them are part of the hash."""

    entries: tuple[dict[str, Any], ...]
    cursor: str | None = None


def entry_view(entry: AuditEntry, entry_id: str, number: int, previous: str, hash_: str) -> AuditView:
    return AuditView(
        **msgspec.structs.asdict(entry), id=entry_id, number=number, previous=previous, hash=hash_
    )


def enrolment_view(token: Enrolment, now: float) -> EnrolmentView:
    return EnrolmentView(
        token.token_id,
        token.created_at,
        token.expires_at,
        token.uses_left,
        token.uses_left > 0 and now < token.expires_at,
        token.worker_prefix,
        token.replaces,
    )


def view(key: ApiKey) -> KeyView:
    return KeyView(**_fields(key))


def made(key: ApiKey, secret: str) -> KeyMade:
    return KeyMade(**_fields(key), key=secret)


def _fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "role": key.role,
        "created_at": key.created_at,
        "name": key.name,
        "tenant": key.tenant,
        "worker_id": key.worker_id,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }
