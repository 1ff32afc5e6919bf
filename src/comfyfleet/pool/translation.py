"""From the engine's facts and news to the pool's events. One fact may be two events: a failure and its retry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from comfyfleet.model.fact import Fact, FactKind, FleetEvent, News, NewsKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.pool.events import PoolEvent


class Label(msgspec.Struct, frozen=True, gc=False):
    """What every event of a job carries."""

    public_id: str
    workflow_hash: str
    metadata: dict[str, Any]


_NEWS = {
    NewsKind.ACCEPTED: "job:accepted",
    NewsKind.STARTED: "job:started",
    NewsKind.PROGRESS: "job:progress",
    NewsKind.PREVIEW: "job:preview",
    NewsKind.OUTPUT: "job:output",
}


def of_news(news: News, label: Label) -> PoolEvent:
    data = news.data
    return PoolEvent(
        _NEWS[news.kind],
        news.at,
        label.public_id,
        label.workflow_hash,
        label.metadata,
        client_id=news.worker_id,
        prompt_id=data.get("prompt_id"),
        node=data.get("node"),
        value=data.get("value"),
        max=data.get("max"),
        percentage=data.get("percentage"),
        remaining_s=data.get("remaining_s"),
        message=data.get("message") or "",
        image=news.image,
        image_type=data.get("format"),
        output=data.get("output"),
        files=msgspec.convert(data.get("files") or (), tuple[OutputFile, ...]),
    )


def of_fact(
    fact: Fact, label: Label, result: JobResult | None = None, failure: Failure | None = None
) -> Iterator[PoolEvent]:
    """`result` and `failure` are what the store keeps of the end; without a failure the fact's own words are told."""
    data = fact.data or {}
    base = PoolEvent("", fact.at, label.public_id, label.workflow_hash, label.metadata)

    def event(name: str, **fields: Any) -> PoolEvent:
        return msgspec.structs.replace(base, name=name, **fields)

    match fact.kind:
        case FactKind.QUEUED:
            yield event("job:queued")
        case FactKind.COMPLETED:
            yield event("job:completed", client_id=data.get("worker_id"), result=result)
        case FactKind.RETRYING | FactKind.FAILED:
            will_retry = fact.kind is FactKind.RETRYING
            yield event(
                "job:failed",
                client_id=data.get("worker_id"),
                failure=failure or _failure(data),
                message=str(data.get("why", "")),
                will_retry=will_retry,
                attempt=data.get("attempt"),
            )
            if will_retry:
                retry_at = data.get("not_before") or fact.at
                message = str(data["message"])
                yield event("job:retrying", retry_at=retry_at, message=message, attempt=data.get("attempt"))
        case FactKind.RELEASED:
            message = str(data.get("reason", ""))
            yield event("job:retrying", retry_at=fact.at, message=message, attempt=data.get("attempt"))
        case FactKind.CANCELLED:
            yield event("job:cancelled", reason=data.get("reason"))
        case _:
            # Leases, pauses and priorities are seen in the job's record.
            return


def _failure(data: dict[str, Any]) -> Failure:
    return Failure(FailureKind(data["kind"]), str(data["message"]), node_id=data.get("node_id"))


def of_fleet(fleet: FleetEvent) -> PoolEvent | None:
    data = fleet.data
    if fleet.kind == "ready":
        return PoolEvent("pool:ready", fleet.at, message=data["message"])
    if fleet.kind == "waiting":
        return PoolEvent("job:waiting", fleet.at, **data)
    if fleet.kind == "state":
        return PoolEvent(
            "client:state",
            fleet.at,
            client_id=fleet.worker_id,
            state=data["state"],
            message=data["message"],
        )
    if fleet.kind not in ("blocked", "unblocked") or "workflow_hash" not in data:
        return None
    return PoolEvent(
        f"client:{fleet.kind}_workflow",
        fleet.at,
        workflow_hash=str(data["workflow_hash"]),
        client_id=fleet.worker_id,
        blocked_until=data.get("blocked_until"),
        failures=data.get("failures"),
        reason=str(data.get("why", data["reason"])),
        message=str(data.get("message") or ""),
    )
