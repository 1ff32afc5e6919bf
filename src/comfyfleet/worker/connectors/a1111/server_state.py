"""What a server of the A1111 family says of its one run and of a task id.

Two routes are needed: one knows the flags and does not name the task, the other knows the task and not the flags. A
task that failed stays active and one that failed before its start stays queued, so only both together tell the truth.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

from comfyfleet.model.failure import ServiceFailed
from comfyfleet.worker.connectors.a1111.api import A1111Api
from comfyfleet.worker.connectors.a1111.failures import refused_request
from comfyfleet.worker.connectors.comfyui.api import Unreachable

_MAX_COUNT = 1 << 40


class ServerLook(msgspec.Struct, frozen=True):
    """The one run of the server, ours or not."""

    is_idle: bool
    timestamp: str = ""
    """When the run began, to the second; the answer to the run has the same."""
    is_disturbed: bool = False
    """Somebody interrupted or skipped it."""
    share: float = 0.0
    step: int = 0
    steps: int = 0
    number: int = 0
    """Of the picture, from 0."""

    @property
    def sign(self) -> tuple[object, ...]:
        """It changes as long as the run lives."""
        return (self.timestamp, self.is_idle, self.number, self.step, round(self.share, 4))


class TaskLook(msgspec.Struct, frozen=True):
    """What the server knows of our task id."""

    is_active: bool = False
    is_queued: bool = False
    is_completed: bool = False
    eta_s: float | None = None
    preview: bytes | None = None
    preview_format: str = ""
    preview_id: int = -1

    @property
    def is_known(self) -> bool:
        return self.is_active or self.is_queued or self.is_completed


async def look_at_server(api: A1111Api, timeout_s: float | None = None) -> ServerLook:
    """Raises `Unreachable`, or `ServiceFailed` if the server refuses to tell."""
    answer = await api.progress(timeout_s)
    if not answer.is_ok:
        raise ServiceFailed(refused_request(answer.status, answer.body, "the request for its progress"))
    state = answer.body.get("state") if isinstance(answer.body, Mapping) else None
    if not isinstance(state, Mapping):
        raise Unreachable("what it answers to the request for its progress is not that of the web UI")
    # While a model loads, the count is -1.
    is_idle = _count(state.get("job_count")) == 0 and not state.get("job")
    return ServerLook(
        is_idle=is_idle,
        timestamp=str(state.get("job_timestamp") or "")[:40],
        is_disturbed=any(
            state.get(name) is True for name in ("interrupted", "skipped", "stopping_generation")
        ),
        share=_share(answer.body.get("progress")),
        step=_count(state.get("sampling_step")),
        steps=_count(state.get("sampling_steps")),
        number=_count(state.get("job_no")),
    )


async def look_at_task(
    api: A1111Api, task_id: str, preview_id: int | None = None, max_preview_bytes: int = 0
) -> TaskLook | None:
    """None: the server has no route for it. Raises `Unreachable`."""
    answer = await api.task_progress(task_id, preview_id)
    if answer.status in (404, 405):
        return None
    body = answer.body
    if not answer.is_ok or not isinstance(body, Mapping) or "active" not in body:
        raise Unreachable(f"it answers {answer.status} to the question for a task")
    preview, preview_format = _preview(body.get("live_preview"), max_preview_bytes)
    eta = body.get("eta")
    return TaskLook(
        is_active=body.get("active") is True,
        is_queued=body.get("queued") is True,
        is_completed=body.get("completed") is True,
        eta_s=float(eta) if isinstance(eta, int | float) and 0 <= eta < _MAX_COUNT else None,
        preview=preview,
        preview_format=preview_format,
        preview_id=_count(body.get("id_live_preview", -1)),
    )


async def pending_ids(api: A1111Api) -> frozenset[str]:
    """The task ids that wait. Empty if the server does not tell. Raises `Unreachable`."""
    answer = await api.pending_tasks()
    tasks = answer.body.get("tasks") if answer.is_ok and isinstance(answer.body, Mapping) else None
    return frozenset(str(each)[:200] for each in tasks) if isinstance(tasks, list) else frozenset()


def _preview(text: Any, most: int) -> tuple[bytes | None, str]:
    if not isinstance(text, str) or not text.startswith("data:image/") or len(text) > 2 * most:
        return None, ""
    head, _, content = text.partition(";base64,")
    try:
        picture = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        return None, ""
    return (picture, head.removeprefix("data:")[:40]) if 0 < len(picture) <= most else (None, "")


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < _MAX_COUNT else 0


def _share(value: Any) -> float:
    return min(1.0, max(0.0, float(value))) if isinstance(value, int | float) and value == value else 0.0
