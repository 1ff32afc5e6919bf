"""Wraps a tenant database and encrypts payloads, results and failure texts.

The ledger is not encrypted: the database compares balances itself. The central store has the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from comfyfleet.model.fact import Fact, FactDraft, FactKind
from comfyfleet.model.failure import FailureText
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.ledger import HoldId
from comfyfleet.stores.crypto.keyring import Keyring
from comfyfleet.stores.crypto.payload_cipher import PayloadCipher
from comfyfleet.stores.crypto.store import EncryptedRecords, without_digest
from comfyfleet.stores.crypto.value_cipher import DecryptionFailed
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import (
    OpenRound,
    PostingResult,
    RoundEnd,
    RoundEnded,
    RoundStart,
    RoundStarted,
)


def encrypted_database(inner: TenantDatabase, keyring: Keyring) -> TenantDatabase:
    return cast("TenantDatabase", EncryptedTenantDatabase(inner, keyring))


class EncryptedTenantDatabase(EncryptedRecords):
    def __init__(self, inner: TenantDatabase, keyring: Keyring) -> None:
        super().__init__(inner, PayloadCipher(keyring))
        self._database = inner
        self._keyring = keyring

    def __getattr__(self, name: str) -> Any:
        # The ledger, the outbox and all else without job content need no encryption.
        return getattr(self._database, name)

    async def open_round(self, opening: RoundStart) -> RoundStarted:
        job = opening.job
        self.tenants[job.job_id] = job.tenant
        dispatch = without_digest(opening.dispatch) if self._keyring.encrypts else opening.dispatch
        encrypted = msgspec.structs.replace(opening, job=await self._cipher.job(job), dispatch=dispatch)
        opened = await self._database.open_round(encrypted)
        kept = job if opened.outcome is PostingResult.DONE else await self._opened(opened.job)
        return msgspec.structs.replace(opened, job=kept)

    async def leasable(self, hold_id: HoldId) -> Job | None:
        return await self._opened(await self._database.leasable(hold_id))

    async def put_payload(self, hold_id: HoldId, payload: Submission) -> bool:
        tenant = await self._tenant_of(hold_id)
        if tenant is None:
            return False
        changes = await self._cipher.changes(tenant, hold_id.job_id, {"payload": payload})
        return await self._database.put_payload(hold_id, changes["payload"])

    async def stage(self, hold_id: HoldId, attempt_id: str, result: JobResult, at: float) -> bool:
        tenant = await self._tenant_of(hold_id)
        if tenant is None:
            return False
        changes = await self._cipher.changes(tenant, hold_id.job_id, {"result": result})
        return await self._database.stage(hold_id, attempt_id, changes["result"], at)

    async def save_failure(self, hold_id: HoldId, attempt_id: str, text: FailureText, at: float) -> bool:
        tenant = await self._tenant_of(hold_id)
        if tenant is None:
            return False
        cipher, job_id = self._cipher, hold_id.job_id
        changes = await cipher.changes(tenant, job_id, {"failure": text.failure})
        (draft,) = await cipher.drafts(tenant, job_id, (FactDraft(FactKind.FAILED, text.data),))
        encrypted = FailureText(changes["failure"], draft.data or {})
        return await self._database.save_failure(hold_id, attempt_id, encrypted, at)

    async def failures_of(self, job_ids: Sequence[JobId]) -> Mapping[str, FailureText]:
        found = await self._database.failures_of(job_ids)
        return {
            attempt_id: await self._decrypted_text(attempt_id, text) for attempt_id, text in found.items()
        }

    async def _decrypted_text(self, attempt_id: str, text: FailureText) -> FailureText:
        job_id = JobId(attempt_id.partition("/")[0])
        tenant = await self._tenant_of(HoldId(job_id, 1))
        if tenant is None:
            return text
        failure = await self._cipher.opened_failure(tenant, job_id, text.failure)
        fact = await self._cipher.opened_fact(tenant, Fact(job_id, 0, FactKind.FAILED, 0.0, data=text.data))
        return FailureText(failure, fact.data or {})

    async def open_round_of(self, hold_id: HoldId, attempt_id: str | None) -> OpenRound | None:
        found = await self._database.open_round_of(hold_id, attempt_id)
        if found is None:
            return None
        job, result = await self._cipher.opened(found.job), found.result
        if result is not None:
            try:
                result = await self._cipher.opened_result(job.tenant, job.job_id, result)
            except DecryptionFailed:
                # Settle the round all the same, without its result.
                result = None
        return msgspec.structs.replace(found, job=job, result=result)

    async def end_round(self, ending: RoundEnd) -> RoundEnded:
        tenant, job_id = ending.posting.tenant, ending.settlement.hold_id.job_id
        changes = await self._cipher.changes(tenant, job_id, ending.changes)
        return await self._database.end_round(msgspec.structs.replace(ending, changes=changes))

    async def get_many(self, job_ids: Sequence[JobId]) -> Mapping[JobId, Job]:
        found = await self._database.get_many(job_ids)
        return {job_id: await self._cipher.opened(job) for job_id, job in found.items()}

    async def _tenant_of(self, hold_id: HoldId) -> TenantId | None:
        tenant = self.tenants.get(hold_id.job_id)
        if tenant is None and (hold := await self._database.hold(hold_id)) is not None:
            tenant = hold.tenant
            self.tenants[hold_id.job_id] = tenant
        return tenant
