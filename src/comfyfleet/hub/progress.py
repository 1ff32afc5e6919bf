"""Where a job stands: its progress as one record, from the dispatch, the record and the newest that was heard of it."""

from __future__ import annotations

from typing import Any

from comfyfleet.engine.engine import Engine
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.fact import News, NewsKind
from comfyfleet.model.job import Job
from comfyfleet.wire.progress import ProgressBody, remaining_s, told
from comfyfleet.wire.spelling import spell

_ALL = {"percentage": 100.0}


class Standing:
    """Changes with each piece of news; a fact makes a new one."""

    __slots__ = (
        "_expected_s",
        "_job_id",
        "_lease",
        "_phase",
        "_remaining_s",
        "_started_at",
        "_told",
        "_told_at",
        "_updated_at",
        "_worker_id",
    )

    def __init__(self, dispatch: Dispatch, record: Job, expected_s: float | None) -> None:
        lease = dispatch.lease
        self._job_id = dispatch.job_id
        self._phase = dispatch.phase
        self._expected_s = expected_s
        self._worker_id = record.worker_id if lease is None else lease.worker_id
        self._lease = dispatch.lease_number or None if lease is None else lease.number
        self._started_at = record.started_at
        self._updated_at = record.submitted_at
        if lease is not None:
            is_of_this_lease = record.started_at is not None and record.started_at >= lease.leased_at
            self._started_at = record.started_at if is_of_this_lease else lease.leased_at
            self._updated_at = self._started_at or lease.leased_at
        elif dispatch.phase is Phase.QUEUED:
            self._started_at = None
        if record.completed_at is not None:
            self._updated_at = record.completed_at
        self._told_at = 0.0
        self._remaining_s: float | None = None
        """As its worker said with the last progress."""
        self._told: dict[str, Any] = _ALL if dispatch.phase is Phase.COMPLETED else {}

    def hear(self, news: News) -> None:
        if self._phase is Phase.QUEUED and news.lease_number > (self._lease or 0):
            # Faster than the fact it follows; of an older lease it is only late.
            self._phase = Phase.LEASED
        if self._phase is not Phase.LEASED or (news.lease_number and news.lease_number < (self._lease or 0)):
            return
        if news.lease_number and news.lease_number != self._lease:
            self._told, self._started_at, self._lease = {}, news.at, news.lease_number
            self._remaining_s = None
        self._worker_id = news.worker_id or self._worker_id
        self._updated_at = news.at
        if news.kind is NewsKind.STARTED:
            self._started_at = news.at
        elif news.kind is NewsKind.PROGRESS:
            self._told = told(news.data)
            self._remaining_s, self._told_at = remaining_s(news.data), news.at

    def body(self, now: float) -> ProgressBody:
        estimate = None
        if self._phase is Phase.LEASED and self._remaining_s is not None:
            estimate = self._told_at + self._remaining_s
        elif self._phase is Phase.LEASED and self._started_at is not None and self._expected_s is not None:
            estimate = self._started_at + self._expected_s
        return ProgressBody(
            self._job_id,
            spell(self._phase),
            **self._told,
            worker_id=self._worker_id,
            lease=self._lease,
            started_at=self._started_at,
            updated_at=self._updated_at,
            # One that has passed was wrong, and nothing better is known.
            estimated_completion=None if estimate is None or estimate < now else estimate,
        )


async def standing_of(engine: Engine, dispatch: Dispatch, record: Job) -> Standing:
    expected_s = None
    if dispatch.lease is not None:
        expected_s = await engine.expected_s(dispatch.workflow_hash, dispatch.lease.worker_id)
    standing = Standing(dispatch, record, expected_s)
    if dispatch.lease is not None and (news := await engine.newest(dispatch)) is not None:
        standing.hear(news)
    return standing
