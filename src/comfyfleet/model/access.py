"""Who asks, and what that entitles to: the five roles, the key that proves one, and whoever stands at the door.

How a key is made and kept is `tenancy/keys.py`'s; which role may call what is the table in `wire/routes.py`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId


class Role(StrEnum):
    ADMIN = "admin"
    """Everything, keys included."""
    OPERATOR = "operator"
    """Every tenant's jobs and the whole fleet."""
    TENANT = "tenant"
    """The jobs of one tenant."""
    VIEWER = "viewer"
    """Looks and changes nothing; at one tenant's jobs where the key names one."""
    WORKER = "worker"
    """The workers' door and nothing else."""


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key as it is kept: what it entitles to, and a digest instead of its secret."""

    key_id: str
    role: Role
    digest: str
    created_at: float
    name: str = ""
    tenant: TenantId | None = None
    worker_id: WorkerId | None = None
    """A worker's key may be good for one worker alone."""
    expires_at: float | None = None
    revoked_at: float | None = None
    old_digest: str | None = None
    """The secret before the last rotation …"""
    old_until: float | None = None
    """… and until when it still opens."""


class Enrolment(msgspec.Struct, frozen=True, omit_defaults=True):
    """What lets new workers fetch keys of their own: so many, until then, under names that begin like this."""

    token_id: str
    digest: str
    created_at: float
    expires_at: float
    uses_left: int = 1
    worker_prefix: str = ""
    replaces: bool = False
    """Whether it gives a new key to a worker that has one, whose old ones end."""


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who changed what, when, and what came of it."""

    at: float
    key_id: str
    role: Role | None
    """None: no key was asked for."""
    action: str
    """The name of the route, or the type of the message."""
    target: str = ""
    tenant: TenantId | None = None
    request_id: str = ""
    address: str = ""
    outcome: str = ""
    """`done`, or the code of the problem. Empty: it was begun, and whether it was done is not known."""


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whoever stands at the door, as the credential says and never as the body does."""

    role: Role
    key_id: str = ""
    tenant: TenantId | None = None
    worker_id: WorkerId | None = None

    @property
    def scope(self) -> TenantId | None:
        """Whose jobs it sees. None: everybody's."""
        return None if self.role in (Role.ADMIN, Role.OPERATOR) else self.tenant

    @property
    def owner(self) -> TenantId:
        """Whose a job is that this caller submits."""
        return self.tenant or DEFAULT_TENANT

    def sees(self, tenant: TenantId) -> bool:
        return self.scope in (None, tenant)
