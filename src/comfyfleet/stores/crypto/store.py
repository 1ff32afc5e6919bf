"""Wraps any store and encrypts payloads, results and failures before they reach it.

Direct workers cannot decrypt, so this store does not admit them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from comfyfleet.model.calls import DirectWorkerBacklog
from comfyfleet.model.dispatch import Attempt, Dispatch, Write, WriteResult
from comfyfleet.model.fact import Fact, FactDraft
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.model.recent import RecentDict
from comfyfleet.ports import DirectWorkerInbox, RecordQuery, Records, Store
from comfyfleet.stores.crypto.keyring import Keyring
from comfyfleet.stores.crypto.payload_cipher import PayloadCipher
from comfyfleet.stores.failure_texts import with_texts

_MOST_TENANTS = 10_000
_REFUSAL = (
    "the jobs of this fleet are encrypted, and a direct worker cannot decrypt them: "
    "connect it to a hub, or run `comfyfleet worker --store` with the keys of [encryption]"
)


def encrypted_store(inner: Store, keyring: Keyring) -> Store:
    """The inner store keeps the keyring's documents."""
    return cast("Store", EncryptedStore(inner, keyring))


class EncryptedStore:
    def __init__(self, inner: Store, keyring: Keyring) -> None:
        self._inner = inner
        self._keyring = keyring
        self._cipher = PayloadCipher(keyring)
        self.records = EncryptedRecords(inner.records, self._cipher)
        self._tenants = self.records.tenants
        self.direct_workers = (
            None
            if inner.direct_workers is None
            else EncryptedDirectWorkerInbox(inner.direct_workers, keyring)
        )

    def __getattr__(self, name: str) -> Any:
        # All but payloads is the inner store's, including methods its port does not name.
        return getattr(self._inner, name)

    async def open(self) -> None:
        await self._inner.open()
        await self._keyring.open()
        if self.direct_workers is not None and self._keyring.encrypts:
            # Direct workers from before encryption register again, and learn why they are refused.
            for worker_id in (await self.direct_workers.backlog(1)).seen:
                await self._inner.remove_worker(worker_id)

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        self._tenants[job.job_id] = job.tenant
        if self._keyring.encrypts:
            dispatch = without_digest(dispatch)
        return await self._inner.enqueue(dispatch, await self._cipher.job(job), facts)

    async def write(self, write: Write) -> WriteResult | None:
        encrypted = await self._encrypted(write)
        return None if encrypted is None else with_texts(await self._inner.write(encrypted), write)

    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
        facts = await self._inner.facts(job_id, after)
        tenant = await self._tenant_of(job_id) if facts else None
        return facts if tenant is None else [await self._cipher.opened_fact(tenant, fact) for fact in facts]

    async def attempts(self, job_id: JobId) -> list[Attempt]:
        attempts = await self._inner.attempts(job_id)
        tenant = await self._tenant_of(job_id) if attempts else None
        if tenant is None:
            return attempts
        return [await self._cipher.opened_attempt(tenant, job_id, attempt) for attempt in attempts]

    async def _encrypted(self, write: Write) -> Write | None:
        """None: there is no such job, so no guard holds."""
        if self._keyring.encrypts and write.change.payload_sha256 is not UNSET:
            change = msgspec.structs.replace(write.change, payload_sha256=None)
            write = msgspec.structs.replace(write, change=change)
        says_nothing = write.attempt_end is None or write.attempt_end.failure is None
        if not write.job and says_nothing and not write.facts:
            return write
        tenant = await self._tenant_of(write.job_id)
        if tenant is None:
            return None
        cipher, job_id = self._cipher, write.job_id
        end = write.attempt_end
        return msgspec.structs.replace(
            write,
            job=write.job and await cipher.changes(tenant, job_id, write.job),
            attempt_end=end and await cipher.attempt_end(tenant, job_id, end),
            facts=await cipher.drafts(tenant, job_id, write.facts),
        )

    async def _tenant_of(self, job_id: JobId) -> TenantId | None:
        tenant = self._tenants.get(job_id)
        if tenant is None and (dispatch := await self._inner.load(job_id)) is not None:
            tenant = dispatch.tenant
            self._tenants[job_id] = tenant
        return tenant


def without_digest(dispatch: Dispatch) -> Dispatch:
    """A digest of the plain payload would confirm a guess. The encryption binds the value to its job already."""
    return msgspec.structs.replace(dispatch, payload_sha256=None)


class EncryptedRecords:
    def __init__(self, inner: Records, cipher: PayloadCipher) -> None:
        self._inner = inner
        self._cipher = cipher
        self.tenants: RecentDict[JobId, TenantId] = RecentDict(_MOST_TENANTS)
        """Of recent jobs. A job's tenant never changes."""

    async def get(self, job_id: JobId) -> Job | None:
        return await self._opened(await self._inner.get(job_id))

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        return await self._opened(await self._inner.by_reference(tenant, reference))

    async def listing(self, query: RecordQuery) -> list[Job]:
        return [await self._cipher.opened(job) for job in await self._inner.listing(query)]

    async def _opened(self, job: Job | None) -> Job | None:
        if job is None:
            return None
        self.tenants[job.job_id] = job.tenant
        return await self._cipher.opened(job)


class EncryptedDirectWorkerInbox:
    """Admits no direct worker; those already admitted may leave."""

    def __init__(self, inner: DirectWorkerInbox, keyring: Keyring) -> None:
        self._inner = inner
        self._keyring = keyring
        self.listen = inner.listen
        self.admitted = inner.admitted
        self.refuse = inner.refuse
        self.handled = inner.handled
        self.take_finished = inner.take_finished

    async def backlog(self, limit: int) -> DirectWorkerBacklog:
        found = await self._inner.backlog(limit)
        if not self._keyring.encrypts:
            return found
        shut = [
            msgspec.structs.replace(each, call=None, problem=_REFUSAL) if each.call is not None else each
            for each in found.registrations
        ]
        return msgspec.structs.replace(found, registrations=tuple(shut))
