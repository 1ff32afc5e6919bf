"""What a job's state at Comfy Cloud means, and the stop of a job.

A job is stopped by its own id. The interrupt of v1 hits other jobs of the account, so it is not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from comfyfleet.model.failure import FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.comfy_cloud import failures
from comfyfleet.worker.connectors.comfy_cloud.account import CloudAccount
from comfyfleet.worker.connectors.comfy_cloud.api import CloudAnswer, CloudApi
from comfyfleet.worker.connectors.comfy_cloud.backoff import CloudBackoff
from comfyfleet.worker.connectors.comfy_cloud.failures import fail
from comfyfleet.worker.connectors.comfy_cloud.outputs import read_outputs
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui.api import Unreachable

ENDS = frozenset({"succeeded", "failed", "canceled", "expired"})
STATES = ENDS | {"queued", "running", "canceling"}
LOST = "lost"
"""Our word: Comfy Cloud does not know the job."""
_CAP_TOLERANCE = 0.95


def read_end(
    job: Mapping[str, Any],
    api: CloudApi,
    account: CloudAccount,
    settings: ComfyCloudSettings,
    included: Collection[str],
    *,
    is_cancelled: bool = False,
) -> JobResult:
    """The result of an ended job. Raises `ServiceFailed`."""
    match job.get("status"):
        case "succeeded":
            return read_outputs(job, api, included)
        case "failed":
            found = failures.failed_run(job.get("error"))
            if found.is_of_account:
                # Not the job's fault: it waits, and the worker is paused.
                raise account.pause(f"a run failed for lack of money: {found.failure.message[:300]}")
            raise ServiceFailed(found.failure)
        case "canceled" if is_cancelled:
            raise fail(FailureKind.INTERRUPTED, "The run was cancelled.")
        case "canceled":
            seconds = run_seconds(job)
            if seconds is not None and seconds >= _CAP_TOLERANCE * settings.run_cap_s:
                raise fail(
                    FailureKind.TOTAL_TIMEOUT,
                    f"Comfy Cloud cancelled the run after {seconds:.0f} s: the plan limits a run to "
                    f"{settings.run_cap_s:g} s (`run_cap_s`).",
                )
            raise fail(FailureKind.INTERRUPTED, "Somebody cancelled the run at Comfy Cloud.")
        case _:
            raise fail(
                FailureKind.TOTAL_TIMEOUT,
                f"The job expired at Comfy Cloud, which keeps jobs for a limited time (until {_time(job)}).",
            )


def run_seconds(job: Mapping[str, Any]) -> float | None:
    began, ended = _moment(job.get("started_at")), _moment(job.get("completed_at"))
    return None if began is None or ended is None else (ended - began).total_seconds()


def _moment(value: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None


def _time(job: Mapping[str, Any]) -> str:
    found = _moment(job.get("expires_at"))
    return "an unknown time" if found is None else found.isoformat(timespec="seconds")


def job_in(answer: CloudAnswer) -> Mapping[str, Any] | None:
    """The job, if the answer is one."""
    body = answer.body
    return body if answer.is_ok and isinstance(body, dict) and body.get("status") in STATES else None


async def stop(
    api: CloudApi, settings: ComfyCloudSettings, job_id: str, within_s: float
) -> Mapping[str, Any] | None:
    """Cancels the job and waits until it is over. Returns the ended job, or None if it is not known to have ended."""
    loop = asyncio.get_running_loop()
    deadline, backoff, is_told = loop.time() + within_s, CloudBackoff(settings), False
    while True:
        asked_s: float | None = None
        try:
            # Cancelling is idempotent, and answers with the job.
            answer = await (api.job(job_id) if is_told else api.cancel(job_id))
        except Unreachable:
            pass
        else:
            if answer.status == 404:
                return {"id": job_id, "status": LOST}
            asked_s, found = answer.retry_after_s, job_in(answer)
            if found is not None and found["status"] in ENDS:
                return found
            is_told = is_told or found is not None
        pause_s = backoff.next_s(asked_s)
        if loop.time() + pause_s >= deadline:
            return None
        await asyncio.sleep(pause_s)
