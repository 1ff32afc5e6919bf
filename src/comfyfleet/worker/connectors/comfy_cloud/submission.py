"""Submits a graph to Comfy Cloud so that it is paid at most once.

The idempotency key makes a repeated request safe for 24 hours: if the first one arrived, the repetition is refused,
and the job must be found in the list. If it cannot be found, nobody knows whether it exists, and nothing is submitted
again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from comfyfleet.model.failure import FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.worker.connectors.comfy_cloud import failures
from comfyfleet.worker.connectors.comfy_cloud.account import CloudAccount
from comfyfleet.worker.connectors.comfy_cloud.api import CloudAnswer, CloudApi
from comfyfleet.worker.connectors.comfy_cloud.backoff import CloudBackoff
from comfyfleet.worker.connectors.comfy_cloud.failures import Refusal429, fail
from comfyfleet.worker.connectors.comfy_cloud.job_list import CloudJobList
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui.api import Unreachable

_FIRST_LOOK_S = 0.25
_KEY_IS_USED = "idempotency_key_reuse"


class CloudSubmission:
    """Submits once. `is_in_doubt`: a request was sent, and nobody knows whether a job came of it."""

    def __init__(
        self,
        api: CloudApi,
        settings: ComfyCloudSettings,
        account: CloudAccount,
        jobs: CloudJobList,
        graph: dict[str, object],
        mark: str,
    ) -> None:
        self._api = api
        self._settings = settings
        self._account = account
        self._jobs = jobs
        self._graph = graph
        self._mark = mark
        self.is_in_doubt = False
        self._cancelled = asyncio.Event()
        self._why = "Comfy Cloud did not answer the submission."

    def cancel(self) -> None:
        """Sends nothing more. A job that may exist is still looked for, so that it can be stopped."""
        self._cancelled.set()

    async def submit(self, accept_s: float) -> str:
        """The id of the job. Raises `ServiceFailed`; `ServiceBusy` if surely no job was made."""
        loop = asyncio.get_running_loop()
        began, backoff = loop.time(), CloudBackoff(self._settings)
        while not self._cancelled.is_set():
            job_id, asked_s = await self._try(began + accept_s - loop.time())
            if job_id is not None:
                return job_id
            if self.is_in_doubt and loop.time() >= began + self._settings.doubt_s:
                return await self._find()
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s(asked_s)):
                    await self._cancelled.wait()
        if self.is_in_doubt:
            return await self._find()
        raise fail(FailureKind.INTERRUPTED, "The attempt was cancelled before it was submitted.")

    async def _try(self, left_s: float) -> tuple[str | None, float | None]:
        """Sends the request once. `left_s`: how long a submission that made no job may still wait. Returns the job's
        id if there is one, and the pause that the server asks for."""
        try:
            answer = await self._api.submit(self._graph, self._mark, self._settings.request_s)
        except Unreachable as error:
            self._why = f"Comfy Cloud did not answer the submission: {error}."
            # Without a connection nothing was sent.
            self.is_in_doubt = self.is_in_doubt or not error.is_refused
            if not self.is_in_doubt and left_s <= 0:
                raise failures.not_begun(self._why) from error
            return None, None
        if (job_id := self._accepted(answer)) is not None:
            return job_id, None
        if answer.status == 422 and answer.code == _KEY_IS_USED:
            self.is_in_doubt = True
            self._why = "Comfy Cloud has had this submission before."
            return await self._find(), None
        refusal = self._refusal(answer)
        # Validation comes before a job is made, so it would have refused the lost request too.
        if refusal is not None and not (self.is_in_doubt and isinstance(refusal, ServiceBusy)):
            raise refusal
        if self.is_in_doubt:
            # The lost request may have taken the last credits, or the last place in the queue.
            return await self._look(), answer.retry_after_s
        if answer.status >= 500 or answer.is_ok:
            self.is_in_doubt = True
            self._why = (
                f"Comfy Cloud answered {answer.status} to the submission, which does not tell the outcome."
            )
        elif (answer.retry_after_s or 0.0) >= left_s:
            words = f"Comfy Cloud takes no job now ({answer.code or answer.status}): {answer.message}"
            raise failures.not_begun(words)
        return None, answer.retry_after_s

    def _accepted(self, answer: CloudAnswer) -> str | None:
        if not answer.is_ok or not isinstance(answer.body, dict):
            return None
        job_id = answer.body.get("id")
        return job_id if isinstance(job_id, str) and 0 < len(job_id) <= 256 else None

    def _refusal(self, answer: CloudAnswer) -> ServiceFailed | None:
        """What the answer means for a submission that surely made no job. None: wait, or not known."""
        status = answer.status
        if status in (401, 402, 403):
            return self._account.refused(answer)
        if status == 429:
            is_payment = failures.meaning_of_429(answer) is Refusal429.PAYMENT
            return self._account.refused(answer) if is_payment else None
        if status >= 500 or answer.is_ok or status in (408, 425):
            return None
        if (refused := failures.refused_workflow(answer)) is not None:
            return ServiceFailed(refused)
        return failures.not_comfy_cloud(answer, "the submission")

    async def _look(self) -> str | None:
        try:
            found = await self._jobs.find({self._mark})
        except Unreachable:
            return None
        return found[0].job_id if found else None

    async def _find(self) -> str:
        """A job may be listed late, so it is looked for several times."""
        loop = asyncio.get_running_loop()
        began, first_look_at = loop.time(), None
        backoff = CloudBackoff(self._settings, _FIRST_LOOK_S)
        while True:
            try:
                found = await self._jobs.find({self._mark})
            except Unreachable as error:
                is_over = loop.time() >= began + self._settings.doubt_s
                why = f"the list of its jobs cannot be read: {error}"
            else:
                if found:
                    return found[0].job_id
                first_look_at = loop.time() if first_look_at is None else first_look_at
                is_over = loop.time() >= first_look_at + self._settings.find_s
                why = f"the job is not among the newest {self._settings.find_jobs} of the account"
            if is_over:
                raise failures.unknown_outcome(self._mark, f"{self._why} And {why}.")
            await asyncio.sleep(backoff.next_s())
