"""Identities and permissions: roles, API keys, enrolment tokens, callers and audit entries.

`tenancy/keys.py` creates and stores keys. The table in `wire/routes.py` says which role may call which route.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId


class Role(StrEnum):
    ADMIN = "admin"
    """Everything, keys included."""
    OPERATOR = "operator"
    """The jobs of all tenants, and the whole fleet."""
    TENANT = "tenant"
    """The jobs of one tenant."""
    VIEWER = "viewer"
    """Read only. A key that names a tenant sees only the jobs of this tenant."""
    WORKER = "worker"
    """Only the worker API."""


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stored key. It has a digest in place of the secret."""

    key_id: str
    role: Role
    digest: str
    created_at: float
    name: str = ""
    tenant: TenantId | None = None
    worker_id: WorkerId | None = None
    """The only worker that may use this key. None: any worker."""
    expires_at: float | None = None
    revoked_at: float | None = None
    old_digest: str | None = None
    """The digest of the secret before the last rotation. It is valid until `old_until`."""
    old_until: float | None = None


class Enrolment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with which new workers fetch their own keys."""

    token_id: str
    digest: str
    created_at: float
    expires_at: float
    uses_left: int = 1
    worker_prefix: str = ""
    replaces: bool = False
    """It may give a new key to a known worker. The old keys of this worker end then."""


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the audit log."""

    at: float
    key_id: str
    role: Role | None
    """None: the hub asks for no keys."""
    action: str
    """The route name or the message type."""
    target: str = ""
    tenant: TenantId | None = None
    request_id: str = ""
    address: str = ""
    outcome: str = ""
    """`done` or a problem code. Empty: the action began, and its result is not known."""


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """The caller of a request. All fields come from the credential, never from the body."""

    role: Role
    key_id: str = ""
    tenant: TenantId | None = None
    worker_id: WorkerId | None = None

    @property
    def scope(self) -> TenantId | None:
        """The tenant whose jobs this caller sees. None: all tenants."""
        return None if self.role in (Role.ADMIN, Role.OPERATOR) else self.tenant

    @property
    def owner(self) -> TenantId:
        """The tenant that owns the jobs which this caller submits."""
        return self.tenant or DEFAULT_TENANT

    def sees(self, tenant: TenantId) -> bool:
        return self.scope in (None, tenant)
