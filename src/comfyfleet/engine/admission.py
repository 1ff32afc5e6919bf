"""What every job passes on its way in, new or retried by hand: the terms of its tenant.

An engine knows what terms mean (`policy/terms.py`) and not where tenants are kept, nor how their jobs are counted: that
is for whoever opens a gate on it. Without one, nobody has terms.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant


class AdmissionControl(Protocol):
    async def terms(self, tenant_id: TenantId, /) -> Tenant | None:
        """None: the tenant has none, and may ask for whatever anybody may."""

    def admit(self, tenant: Tenant, /) -> AbstractAsyncContextManager[None]:
        """Around the write of a job that was found to keep to the terms: refuses where too many jobs are open, or came
        in too short a time."""


class OpenAdmission:
    async def terms(self, _: TenantId, /) -> Tenant | None:
        return None

    def admit(self, _: Tenant, /) -> AbstractAsyncContextManager[None]:
        return nullcontext()
