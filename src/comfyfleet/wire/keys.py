"""Keys, enrolments and the audit log as an administrator asks for and sees them. A secret is shown once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.access import ApiKey, AuditEntry, Role
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


class AuditQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`operations`: what was done to keys, queue and workers. `jobs`: what callers did to jobs."""

    kind: Literal["operations", "jobs"] = "operations"
    since: Time | None = None
    cursor: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class AuditView(AuditEntry, frozen=True):
    id: str = ""


class AuditList(msgspec.Struct, frozen=True):
    entries: tuple[AuditView, ...]
    cursor: str | None = None


def entry_view(entry_id: str, entry: AuditEntry) -> AuditView:
    return AuditView(**msgspec.structs.asdict(entry), id=entry_id)


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
