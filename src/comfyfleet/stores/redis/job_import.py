"""Imports and discards jobs for a move between stores. Writes their log in the function library's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import Attempt, AttemptEnd, AttemptOutcome, Dispatch
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.stores.redis import codec
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.dispatches import as_bytes, decode_dispatch, encode_dispatch, encode_place

if TYPE_CHECKING:
    from comfyfleet.stores.redis.store import RedisStore

_json = msgspec.json.encode
_workflow_stats = msgspec.json.Decoder(WorkflowStats)

_PAGE = 1000


class RedisJobTransfer:
    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def import_jobs(self, jobs: Sequence[JobSnapshot]) -> list[Dispatch] | None:
        if not jobs:
            return []
        assert all(each.dispatch.lease is None for each in jobs), "a leased job does not move"
        arguments = [part for each in jobs for part in _encode(each)]
        answer = await self._store._do("adopt", *arguments)
        return None if answer is None else [decode_dispatch(text) for text in as_list(answer)]

    async def discard(self, jobs: Sequence[Dispatch]) -> list[bool]:
        if not jobs:
            return []
        names = [part for each in jobs for part in (each.job_id, each.revision)]
        return [state == 1 for state in as_list(await self._store._do("discard", *names))]

    async def workflow_stats(self) -> list[WorkflowStats]:
        store, workflow_stats = self._store, []
        names = as_list(await store.diagnose("ZRANGE", f"{store.prefix}lessons:order", 0, -1))
        for first in range(0, len(names), _PAGE):
            page = [as_bytes(name) for name in names[first : first + _PAGE]]
            found = as_list(await store.diagnose("HMGET", f"{store.prefix}lessons", *page))
            workflow_stats += [_workflow_stats.decode(as_bytes(text)) for text in found if text is not None]
        return workflow_stats


def _encode(snapshot: JobSnapshot) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    job = snapshot.job
    payload = codec.encode_payload(job)
    text = encode_dispatch(snapshot.dispatch, job.phase, codec.encode_record(job), job.reference, payload)
    dispatch = encode_place(len(snapshot.facts)) + text
    log = b"".join(line + b"\n" for line in _log(snapshot))
    result = b"" if job.result is None else _json(job.result)
    failure = b"" if job.failure is None else _json(job.failure)
    return dispatch, payload, log, result, failure


def _log(snapshot: JobSnapshot) -> Iterator[bytes]:
    for fact in snapshot.facts:
        line = {"kind": fact.kind, "at": fact.at, "round": fact.round}
        yield b"f" + _json(line if fact.data is None else {**line, "data": fact.data})
    for attempt in snapshot.attempts:
        yield from _attempt_lines(attempt)


def _attempt_lines(attempt: Attempt) -> Iterator[bytes]:
    began = Attempt(
        attempt.attempt_id, attempt.worker_id, attempt.lease_number, attempt.round, attempt.started_at
    )
    # The library finds an attempt by the text of its id, with slashes escaped as in its JSON.
    name = _json(attempt.attempt_id)
    yield b"a" + _json(began).replace(name, name.replace(b"/", b"\\/"), 1)
    if attempt.outcome is not AttemptOutcome.RUNNING:
        end = AttemptEnd(attempt.outcome, attempt.charged_to, attempt.failure)
        yield b"e" + _json({"lease_number": attempt.lease_number, "ended_at": attempt.ended_at, "end": end})
    if attempt.reported_late:
        yield b"l" + _json({"lease_number": attempt.lease_number})
