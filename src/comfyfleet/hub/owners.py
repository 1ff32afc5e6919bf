"""Whose a job or a file becomes: that of the key's tenant, or of the one that an operator names. And whose a job is.

A job of another tenant is not there at all, whether that tenant's database is there or not: it is not asked.
"""

from __future__ import annotations

from comfyfleet.model.access import Caller, Role
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.ports import Store
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


async def check_sees(caller: Caller, store: Store, job_id: JobId) -> None:
    """Raises `not_found` where there is no such job for this caller."""
    if caller.scope is not None:
        dispatch = await store.load(job_id)
        if dispatch is None or not caller.sees(dispatch.tenant):
            raise no_job(job_id)


def no_job(job_id: JobId) -> Refusal:
    """In the words of the engine: nobody learns from them that somebody else has such a job."""
    return Refusal(RefusalCode.NOT_FOUND, f"there is no job {job_id!r} (any more)")
