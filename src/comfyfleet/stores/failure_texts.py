"""Failure texts of jobs whose tenant has a tenant database. The text is kept there; the central store keeps
the kind of failure and a reference to the text.

A worker without access to that database leaves the text in a collection of the central store. The next hub
moves it (`tenancy/settlement.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from comfyfleet.model.dispatch import AtRevision, Attempt, Dispatch, Write, WriteResult
from comfyfleet.model.fact import Fact, FactDraft, FactKind
from comfyfleet.model.failure import Failure, FailureKind, FailureText
from comfyfleet.model.ids import TenantId
from comfyfleet.model.job import Job
from comfyfleet.model.ledger import HoldId
from comfyfleet.ports import Store
from comfyfleet.stores.documents import pack

COLLECTION = "failure_texts"
"""Collection in the central store, by attempt id: texts that a hub has yet to move."""

_IN_TENANT_DATABASE = "what was said of it lies in its tenant's database: "
_WAITING = "what was said of it waits for a hub to take it to its tenant's database: "
_FAILURE_FACTS = (FactKind.FAILED, FactKind.RETRYING)
_PUBLIC = ("kind", "worker_id", "lease", "not_before")
"""Public fields of a fact's data."""

_OWN = (FailureKind.LEASE_EXPIRED, FailureKind.TOTAL_TIMEOUT)
"""The engine finds these itself. It writes their texts, which hold nothing that a worker sent."""

Texts = Mapping[str, FailureText]
"""By attempt id."""


def text_of(write: Write) -> FailureText | None:
    """The private text in the write. The product's own words about an expired lease are not private."""
    end = write.attempt_end
    if end is None or end.failure is None or end.failure.kind in _OWN:
        return None
    data = next((fact.data for fact in write.facts if fact.kind in _FAILURE_FACTS), None)
    return FailureText(end.failure, data or {})


def without_text(write: Write, attempt_id: str, *, is_pending: bool = False) -> Write:
    """`is_pending`: the text is not in the tenant's database yet."""
    job, end = write.job, write.attempt_end
    place = (_WAITING if is_pending else _IN_TENANT_DATABASE) + attempt_id
    if job is not None and isinstance(failure := job.get("failure"), Failure):
        job = {**job, "failure": _withheld(failure, place)}
    if end is not None and end.failure is not None:
        end = msgspec.structs.replace(end, failure=_withheld(end.failure, place))
    facts = tuple(
        FactDraft(each.kind, _withheld_data(each.data, place)) if each.kind in _FAILURE_FACTS else each
        for each in write.facts
    )
    return msgspec.structs.replace(write, job=job, attempt_end=end, facts=facts)


def with_texts(written: WriteResult | None, write: Write) -> WriteResult | None:
    """Puts the original data back into the answer, so that listeners need not look up or decrypt it."""
    if written is None:
        return None
    facts = tuple(
        msgspec.structs.replace(fact, data=draft.data)
        for fact, draft in zip(written.facts, write.facts, strict=True)
    )
    return WriteResult(written.dispatch, facts)


def _withheld(failure: Failure, place: str) -> Failure:
    return Failure(failure.kind, place, vram_gb=failure.vram_gb, server_died=failure.server_died)


def _withheld_data(data: dict[str, Any] | None, place: str) -> dict[str, Any]:
    public = {name: value for name, value in (data or {}).items() if name in _PUBLIC}
    return {**public, "message": place}


# reading


def attempt_of_text(value: Job | Attempt | Fact) -> str | None:
    """The id of the attempt under which the tenant's database keeps the text, if it does."""
    message = _message_of(value)
    for marker in (_IN_TENANT_DATABASE, _WAITING):
        if message.startswith(marker):
            return message.removeprefix(marker)
    return None


def is_text_pending(value: Job | Attempt | Fact) -> bool:
    """Whether a worker left the text for a hub, so it may not be in the tenant's database yet."""
    return _message_of(value).startswith(_WAITING)


def _message_of(value: Job | Attempt | Fact) -> str:
    if isinstance(value, Fact):
        message = (value.data or {}).get("message") if value.kind in _FAILURE_FACTS else None
    else:
        message = None if value.failure is None else value.failure.message
    return message if isinstance(message, str) else ""


def job_with(job: Job, texts: Texts) -> Job:
    found = texts.get(attempt_of_text(job) or "")
    return job if found is None else msgspec.structs.replace(job, failure=found.failure)


def attempt_with(attempt: Attempt, texts: Texts) -> Attempt:
    found = texts.get(attempt_of_text(attempt) or "")
    return attempt if found is None else msgspec.structs.replace(attempt, failure=found.failure)


def fact_with(fact: Fact, texts: Texts) -> Fact:
    found = texts.get(attempt_of_text(fact) or "")
    return fact if found is None else msgspec.structs.replace(fact, data=found.data)


# workers without access to tenant databases


class PendingFailureText(msgspec.Struct, frozen=True):
    tenant: TenantId
    hold_id: HoldId
    text: FailureText
    at: float


_left = msgspec.msgpack.Decoder(PendingFailureText)
_MAX_BODY = 60_000
_MAX_TEXT = 2_000


def body_of(left: PendingFailureText) -> bytes:
    """Shortens a text that is longer than a document may be."""
    failure, data = left.text.failure, left.text.data
    brief = msgspec.structs.replace(failure, node_errors=None)
    briefest = msgspec.structs.replace(brief, traceback=(), message=failure.message[:_MAX_TEXT], missing=())
    cut = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in data.items()}
    for text in (left.text, FailureText(brief, data), FailureText(briefest, cut)):
        body = zlib.compress(pack(msgspec.structs.replace(left, text=text)))
        if len(body) <= _MAX_BODY:
            break
    return body


def left_in(body: bytes) -> PendingFailureText | None:
    """None: the document is unreadable, for example written by a newer version."""
    try:
        return _left.decode(zlib.decompress(body))
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def without_a_hub(store: Store) -> Store:
    """For a process without tenant databases. A store that is not shared has no tenant databases."""
    return cast("Store", _WithoutHub(store)) if store.is_shared else store


class _WithoutHub:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def write(self, write: Write) -> WriteResult | None:
        text = text_of(write)
        dispatch = None if text is None else await self._store.load(write.job_id)
        if text is None or dispatch is None or not dispatch.has_tenant_database or dispatch.lease is None:
            return await self._store.write(write)
        if isinstance(write.guard, AtRevision) and write.guard.revision != dispatch.revision:
            # The write is out of date: another worker may hold the lease by now.
            return None
        attempt_id = await self._store_text(dispatch, text)
        written = await self._store.write(without_text(write, attempt_id, is_pending=True))
        return with_texts(written, write)

    async def _store_text(self, dispatch: Dispatch, text: FailureText) -> str:
        """Stores the text before the failure is written."""
        attempt_id = dispatch.lease_ref().attempt_id
        hold_id = HoldId(dispatch.job_id, dispatch.round)
        left = PendingFailureText(dispatch.tenant, hold_id, text, await self._store.now())
        await self._store.documents.put(COLLECTION, attempt_id, body_of(left), version=None)
        return attempt_id
