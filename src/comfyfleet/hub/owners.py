"""Whose a job or a file becomes: that of the key's tenant, or of the one that an operator names."""

from __future__ import annotations

from comfyfleet.model.access import Caller, Role
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.wire.bodies import SubmitBody, named_tenant


def owner_of(body: SubmitBody, caller: Caller) -> TenantId:
    field, named = named_tenant(body) or ("tenant", None)
    return owner_for(caller, named, field)


def owner_for(caller: Caller, named: str | None, field: str = "tenant") -> TenantId:
    """`field`: what the body calls it."""
    if named is None:
        return caller.owner
    if caller.role not in (Role.ADMIN, Role.OPERATOR) and named != caller.owner:
        raise Refusal(
            RefusalCode.NOT_ALLOWED,
            f"this key is for tenant {caller.owner!r} alone: leave out {field!r}, or use an operator's key",
            field=field,
        )
    return TenantId(named)
