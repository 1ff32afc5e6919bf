"""Whether the account can be used: its key, its money and its plan.

A refusal for money or rights concerns every job of the account, so it pauses the worker. `connector.py` gives the
lease back; the job waits for another worker or for the end of the pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from comfyfleet.model.failure import Failure, FailureKind, ServiceBusy
from comfyfleet.worker.connectors.comfy_cloud.api import CloudAnswer, CloudApi
from comfyfleet.worker.connectors.comfy_cloud.failures import not_begun
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui.api import Unreachable

_log = logging.getLogger(__name__)

_MAX_SLOTS = 1_000


class CloudAccount:
    def __init__(self, api: CloudApi, settings: ComfyCloudSettings, on_pause: Callable[[], None]) -> None:
        self._api = api
        self._settings = settings
        self._on_pause = on_pause
        self._paused_until = 0.0
        self._pause_s = settings.pause_s
        self._answered_at: float | None = None
        self._plan_slots: int | None = None
        self._max_upload_bytes: int | None = None
        self.defect: str | None = None
        """Why the account cannot be used. It contains neither the address nor the key."""

    @property
    def is_paused(self) -> bool:
        return asyncio.get_running_loop().time() < self._paused_until

    @property
    def slots(self) -> int:
        """Never more than the plan, and one while the plan is not known."""
        plan = self._plan_slots or 1
        return plan if self._settings.slots is None else min(plan, self._settings.slots)

    @property
    def max_upload_bytes(self) -> int:
        most = self._settings.max_upload_bytes
        return most if self._max_upload_bytes is None else min(most, self._max_upload_bytes)

    def pause(self, why: str, seconds: float | None = None) -> ServiceBusy:
        """The account is not used for a while; then a health check, or the next job, looks again."""
        for_s = self._pause_s if seconds is None else seconds
        if seconds is None:
            self._pause_s = min(2 * self._pause_s, self._settings.pause_max_s)
        self._paused_until = asyncio.get_running_loop().time() + for_s
        self._answered_at = None
        self.defect = f"{why}. It is tried again in {for_s:.0f} s"
        _log.warning("Comfy Cloud is not used: %s", self.defect)
        self._on_pause()
        return self._unusable()

    def _unusable(self) -> ServiceBusy:
        """After this kind the agent checks the account and takes no more jobs."""
        return ServiceBusy(
            Failure(FailureKind.DEAD_WORKER, self.defect or "Comfy Cloud is not used for now.")
        )

    def refused(self, answer: CloudAnswer) -> ServiceBusy:
        """For 401, 402, 403 and a 429 that means payment."""
        said = f" ({answer.message[:300]})" if answer.message else ""
        if answer.status == 401:
            return self.pause(f"it does not accept the key{said}: give the right one as `key` or `key_file`")
        if answer.status == 403:
            return self.pause(f"the account is not allowed to do this{said}: check its plan and providers")
        return self.pause(f"the account cannot pay{said}: add credits, or check the subscription")

    def accepted(self) -> None:
        """A submission was accepted, so there is money."""
        self._pause_s = self._settings.pause_s
        self._paused_until = 0.0
        self.defect = None

    def busy(self, runs: int) -> ServiceBusy | None:
        """Why no further run may start now."""
        if self.is_paused:
            return self._unusable()
        if runs >= self.slots:
            return not_begun(
                f"The account runs {runs} jobs, and {self.slots} is its limit: use --slots {self.slots}."
            )
        return None

    async def read_plan(self) -> None:
        """Raises `Unreachable`."""
        answer = await self._api.get("/api/features", self._settings.inventory_s)
        if answer.status in (401, 403):
            self.refused(answer)
            raise Unreachable(str(self.defect), status=answer.status)
        if not answer.is_ok or not isinstance(answer.body, dict):
            raise Unreachable(f"it answers {answer.status} to /api/features", status=answer.status)
        slots, size = answer.body.get("max_concurrent_jobs"), answer.body.get("max_upload_size")
        self._plan_slots = slots if isinstance(slots, int) and 0 < slots <= _MAX_SLOTS else 1
        self._max_upload_bytes = size if isinstance(size, int) and size > 0 else None

    @property
    def has_plan(self) -> bool:
        return self._plan_slots is not None

    async def check(self) -> bool:
        """Asks who the account is, which costs nothing. False: `defect` says why."""
        if self.is_paused:
            return False
        now = asyncio.get_running_loop().time()
        if self._answered_at is not None and now < self._answered_at + self._settings.health_s:
            return True
        self._answered_at = None
        try:
            answer = await self._api.get("/api/user")
        except Unreachable as error:
            self.defect = str(error)
            return False
        if answer.status == 429:
            # A rate limit says that the key is known.
            self._answered_at, self.defect = now, None
            return True
        if answer.status in (401, 402, 403):
            self.refused(answer)
            return False
        if not answer.is_ok or not isinstance(answer.body, dict):
            self.defect = (
                f"what answers there is not Comfy Cloud, or it is out of order (status {answer.status})"
            )
            return False
        if answer.body.get("status") == "waitlist":
            self.defect = "the account is on the waiting list of Comfy Cloud"
            return False
        self._answered_at, self.defect = now, None
        return True
