"""The view of prompts as jobs: `/api/jobs`.

Turns queue items and history entries into job records, filters and sorts them. It changes nothing; cancelling is done
by the routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from comfyfleet.testing.fake_comfyui.prompt_queue import Item, PromptQueue
from comfyfleet.testing.fake_comfyui.settings import Behaviour

_PREVIEWABLE = ("images", "video", "audio")


class BadQuery(ValueError):
    """A job query that is answered with 400."""


class JobQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to list, and in which order."""

    statuses: tuple[str, ...]
    workflow_id: str | None = None
    sort_by: str = "created_at"
    is_descending: bool = True
    limit: int | None = None
    offset: int = 0


def statuses_of(behaviour: Behaviour) -> tuple[str, ...]:
    """The job statuses that a release knows."""
    known = ("pending", "in_progress", "completed", "failed")
    return (*known, "cancelled") if behaviour.says_cancelled else known


def parse_query(query: Mapping[str, str], behaviour: Behaviour) -> JobQuery:
    """Read the query string; raises BadQuery with the text of the answer."""
    known = statuses_of(behaviour)
    wanted = tuple(part.strip().lower() for part in query.get("status", "").split(",") if part.strip())
    invalid = [status for status in wanted if status not in known]
    if invalid:
        raise BadQuery(f"Invalid status value(s): {', '.join(invalid)}. Valid values: {', '.join(known)}")
    sort_by = query.get("sort_by", "created_at").lower()
    if sort_by not in ("created_at", "execution_duration"):
        raise BadQuery("sort_by must be 'created_at' or 'execution_duration'")
    order = query.get("sort_order", "desc").lower()
    if order not in ("asc", "desc"):
        raise BadQuery("sort_order must be 'asc' or 'desc'")
    limit = _whole(query, "limit")
    if limit is not None and limit <= 0:
        raise BadQuery("limit must be a positive integer")
    return JobQuery(
        statuses=wanted or known,
        workflow_id=query.get("workflow_id") or None,
        sort_by=sort_by,
        is_descending=order == "desc",
        limit=limit,
        offset=max(0, _whole(query, "offset") or 0),
    )


def _whole(query: Mapping[str, str], name: str) -> int | None:
    if name not in query:
        return None
    try:
        return int(query[name])
    except ValueError:
        raise BadQuery(f"{name} must be an integer") from None


def list_jobs(queue: PromptQueue, query: JobQuery, behaviour: Behaviour) -> dict[str, Any]:
    """The body of `GET /api/jobs`."""
    jobs = [_from_item(item, "in_progress") for item in queue.running.values()]
    jobs += [_from_item(item, "pending") for item in queue.pending]
    jobs += [_from_history(prompt_id, entry, behaviour) for prompt_id, entry in queue.history.items()]
    jobs = [job for job in jobs if job["status"] in query.statuses]
    if query.workflow_id is not None:
        jobs = [job for job in jobs if job.get("workflow_id") == query.workflow_id]
    jobs.sort(key=_duration if query.sort_by == "execution_duration" else _age, reverse=query.is_descending)
    total = len(jobs)
    end = None if query.limit is None else query.offset + query.limit
    page = jobs[query.offset : end]
    has_more = query.offset + len(page) < total
    pagination = {"offset": query.offset, "limit": query.limit, "total": total, "has_more": has_more}
    return {"jobs": page, "pagination": pagination}


def find_job(queue: PromptQueue, prompt_id: str, behaviour: Behaviour) -> dict[str, Any] | None:
    """The body of `GET /api/jobs/{id}`, or None."""
    entry = queue.history.get(prompt_id)
    if entry is not None:
        _, _, prompt, extra_data, _ = entry["prompt"]
        return {
            **_from_history(prompt_id, entry, behaviour),
            "outputs": entry["outputs"],
            "execution_status": entry["status"],
            "workflow": {"prompt": prompt, "extra_data": extra_data},
        }
    for items, status in ((queue.running.values(), "in_progress"), (queue.pending, "pending")):
        for item in items:
            if item[1] == prompt_id:
                return _from_item(item, status)
    return None


def _age(job: dict[str, Any]) -> int:
    return int(job.get("create_time", 0))


def _duration(job: dict[str, Any]) -> int:
    start, end = job.get("execution_start_time"), job.get("execution_end_time")
    return int(end - start) if start and end else 0


def _workflow_id(extra_data: dict[str, Any]) -> Any:
    return ((extra_data.get("extra_pnginfo") or {}).get("workflow") or {}).get("id")


def _pruned(job: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if value is not None}


def _from_item(item: Item, status: str) -> dict[str, Any]:
    number, prompt_id, _, extra_data, *_ = item
    return _pruned(
        {
            "id": prompt_id,
            "status": status,
            "priority": number,
            "create_time": extra_data.get("create_time"),
            "outputs_count": 0,
            "workflow_id": _workflow_id(extra_data),
        }
    )


def _from_history(prompt_id: str, entry: dict[str, Any], behaviour: Behaviour) -> dict[str, Any]:
    number, _, _, extra_data, _ = entry["prompt"]
    messages: dict[str, Any] = dict(entry["status"]["messages"])
    ends = ("execution_success", "execution_error", "execution_interrupted")
    end: dict[str, Any] = next((messages[event] for event in ends if event in messages), {})
    status = "completed" if entry["status"]["status_str"] == "success" else "failed"
    if "execution_interrupted" in messages and behaviour.says_cancelled:
        status = "cancelled"
    count, previewable, preview = _summary(entry["outputs"])
    return _pruned(
        {
            "id": prompt_id,
            "status": status,
            "priority": number,
            "create_time": extra_data.get("create_time"),
            "execution_start_time": messages.get("execution_start", {}).get("timestamp"),
            "execution_end_time": end.get("timestamp"),
            "execution_error": messages.get("execution_error"),
            "outputs_count": count,
            "previewable_outputs_count": previewable if behaviour.is_recent else None,
            "preview_output": preview,
            "workflow_id": _workflow_id(extra_data),
        }
    )


def _summary(outputs: dict[str, Any]) -> tuple[int, int, dict[str, Any] | None]:
    records = [
        (node_id, media, item)
        for node_id, shown in outputs.items()
        for media, items in shown.items()
        if media != "animated" and isinstance(items, list)
        for item in items
        if isinstance(item, dict)
    ]
    previews = [
        {**item, "nodeId": node_id, "mediaType": media}
        for node_id, media, item in records
        if media in _PREVIEWABLE or str(item.get("format", "")).startswith(("video/", "audio/"))
    ]
    kept = [preview for preview in previews if preview.get("type") == "output"]
    best = kept or previews
    return len(records), len(previews), best[0] if best else None
