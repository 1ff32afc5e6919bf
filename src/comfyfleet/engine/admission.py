"""The port for tenant terms. Each new or manually retried job passes it.

The engine applies terms (`policy/terms.py`). The installer of an `AdmissionControl` stores tenants and counts
their jobs; by default no tenant has terms."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant


class AdmissionControl(Protocol):
    async def terms(self, tenant_id: TenantId, /) -> Tenant | None:
        """None: the tenant has no terms."""

    def admit(self, tenant: Tenant, /) -> AbstractAsyncContextManager[None]:
        """Wraps the write of a job. Refuses when the tenant has too many open jobs or submits too fast."""


class OpenAdmission:
    async def terms(self, _: TenantId, /) -> Tenant | None:
        return None

    def admit(self, _: Tenant, /) -> AbstractAsyncContextManager[None]:
        return nullcontext()
