"""Encrypts jobs and their parts on the way into a store or tenant database, and decrypts them on the way out.

Encrypted: the payload with metadata and attachments, the result, and a server's failure text. Plain:
reference, times, phase, hash and classes, which stores and engines use. Values written before a key was
configured stay readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from comfyfleet.model import encrypted
from comfyfleet.model.dispatch import Attempt, AttemptEnd
from comfyfleet.model.fact import Fact, FactDraft, FactKind
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.stores.crypto.keyring import Keyring
from comfyfleet.stores.crypto.value_cipher import (
    DecryptionFailed,
    Kind,
    ValueContext,
    encrypt,
    key_id_of,
    open_value,
)
from comfyfleet.stores.documents import pack

_payloads = msgspec.msgpack.Decoder(Submission)
_results = msgspec.msgpack.Decoder(JobResult)
_failures = msgspec.msgpack.Decoder(Failure)
_data = msgspec.msgpack.Decoder(dict[str, Any])

_FAILURE_FACTS = (FactKind.FAILED, FactKind.RETRYING)
"""Facts that quote a server's text."""


class PayloadCipher:
    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    # encrypting

    async def job(self, job: Job) -> Job:
        return msgspec.structs.replace(job, **await self.changes(job.tenant, job.job_id, _parts(job)))

    async def changes(self, tenant: TenantId, job_id: JobId, changes: dict[str, Any]) -> dict[str, Any]:
        """New values of a job's record."""
        changed = dict(changes)
        if (payload := changes.get("payload")) is not None:
            bytes_ = await self._encrypt(tenant, job_id, "payload", payload)
            changed["payload"] = payload if bytes_ is None else encrypted.encrypted_payload(bytes_)
        if (result := changes.get("result")) is not None:
            bytes_ = await self._encrypt(tenant, job_id, "result", result)
            changed["result"] = result if bytes_ is None else encrypted.encrypted_result(bytes_)
        if (failure := changes.get("failure")) is not None:
            changed["failure"] = await self._failure(tenant, job_id, failure)
        return changed

    async def attempt_end(self, tenant: TenantId, job_id: JobId, end: AttemptEnd) -> AttemptEnd:
        if end.failure is None:
            return end
        return msgspec.structs.replace(end, failure=await self._failure(tenant, job_id, end.failure))

    async def drafts(
        self, tenant: TenantId, job_id: JobId, drafts: Sequence[FactDraft]
    ) -> tuple[FactDraft, ...]:
        made = []
        for draft in drafts:
            if draft.kind in _FAILURE_FACTS and draft.data is not None:
                bytes_ = await self._encrypt(tenant, job_id, "fact", draft.data)
                draft = draft if bytes_ is None else FactDraft(draft.kind, encrypted.encrypted_data(bytes_))
            made.append(draft)
        return tuple(made)

    async def _failure(self, tenant: TenantId, job_id: JobId, failure: Failure) -> Failure:
        bytes_ = await self._encrypt(tenant, job_id, "failure", failure)
        return failure if bytes_ is None else encrypted.encrypted_failure(failure, bytes_)

    async def _encrypt(self, tenant: TenantId, job_id: JobId, kind: Kind, value: object) -> bytes | None:
        key = await self._keyring.to_encrypt(tenant)
        return None if key is None else encrypt(key, ValueContext(tenant, job_id, kind), pack(value))

    # decrypting

    async def opened(self, job: Job) -> Job:
        """If a part cannot be decrypted, the job says why."""
        tenant, job_id, changed = job.tenant, job.job_id, dict[str, Any]()
        try:
            if (bytes_ := encrypted.in_payload(job.payload)) is not None:
                changed["payload"] = _payloads.decode(await self._open(tenant, job_id, "payload", bytes_))
            if job.result is not None:
                changed["result"] = await self.opened_result(tenant, job_id, job.result)
        except DecryptionFailed as error:
            job = encrypted.unreadable(job, str(error))
        if job.failure is not None:
            changed["failure"] = await self.opened_failure(tenant, job_id, job.failure)
        return msgspec.structs.replace(job, **changed) if changed else job

    async def opened_result(self, tenant: TenantId, job_id: JobId, result: JobResult) -> JobResult:
        """Raises `DecryptionFailed`."""
        if (bytes_ := encrypted.in_result(result)) is None:
            return result
        return _results.decode(await self._open(tenant, job_id, "result", bytes_))

    async def opened_failure(self, tenant: TenantId, job_id: JobId, failure: Failure) -> Failure:
        if (bytes_ := encrypted.in_failure(failure)) is None:
            return failure
        try:
            return _failures.decode(await self._open(tenant, job_id, "failure", bytes_))
        except DecryptionFailed as error:
            return Failure(failure.kind, f"its text cannot be decrypted: {error}")

    async def opened_attempt(self, tenant: TenantId, job_id: JobId, attempt: Attempt) -> Attempt:
        if attempt.failure is None:
            return attempt
        opened = await self.opened_failure(tenant, job_id, attempt.failure)
        return msgspec.structs.replace(attempt, failure=opened)

    async def opened_fact(self, tenant: TenantId, fact: Fact) -> Fact:
        if (bytes_ := encrypted.found_in(fact.data)) is None:
            return fact
        try:
            data = _data.decode(await self._open(tenant, fact.job_id, "fact", bytes_))
        except DecryptionFailed as error:
            data = {"message": f"its text cannot be decrypted: {error}"}
        return msgspec.structs.replace(fact, data=data)

    async def _open(self, tenant: TenantId, job_id: JobId, kind: Kind, value: bytes) -> bytes:
        key = await self._keyring.to_decrypt(tenant, key_id_of(value))
        return open_value(key, ValueContext(tenant, job_id, kind), value)


def _parts(job: Job) -> dict[str, Any]:
    return {"payload": job.payload, "result": job.result, "failure": job.failure}
