"""Whether one LangFlow server is usable: it answers, and it accepts the worker's key.

A component that blocks LangFlow's process delays every answer. So a check waits a little, and the next check goes on
waiting for the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from comfyfleet.worker.connectors.langflow import failures
from comfyfleet.worker.connectors.langflow.api import LangFlowApi, Unreachable
from comfyfleet.worker.connectors.langflow.settings import LangFlowSettings


class _Finding(NamedTuple):
    defect: str | None
    is_silent: bool = False
    """It accepts connections and does not answer."""


class ServerHealth:
    def __init__(self, api: LangFlowApi, settings: LangFlowSettings) -> None:
        self.defect: str | None = None
        self.restarts = 0
        """Counts how often the server came back after its port was closed."""
        self._api = api
        self._settings = settings
        self._is_key_accepted = False
        self._was_closed = False
        self._is_healthy = False
        self._question: asyncio.Task[_Finding] | None = None

    async def check(self, *, is_running: bool) -> bool:
        """`is_running`: the server runs jobs of this worker, so its silence is no defect."""
        if self._question is None:
            self._question = asyncio.create_task(self._ask())
        await asyncio.wait({self._question}, timeout=self._settings.health_wait_s)
        if not self._question.done():
            self._is_healthy = self._is_healthy or is_running
            return self._is_healthy
        question, self._question = self._question, None
        finding = question.result()
        self._is_healthy = finding.defect is None or (finding.is_silent and is_running)
        self.defect = None if self._is_healthy else finding.defect
        return self._is_healthy

    def refused_key(self, status: int | None) -> None:
        """The server refused a request with the key, so the next check asks for it."""
        self._is_key_accepted = False
        if status is not None:
            self.defect = failures.KEY_REFUSED.format(status=status)

    async def close(self) -> None:
        question, self._question = self._question, None
        if question is not None:
            question.cancel()
            await asyncio.wait({question})

    async def _ask(self) -> _Finding:
        try:
            answer = await self._api.health()
            if self._was_closed:
                self._was_closed = False
                self.restarts += 1
            if answer.status in (401, 403):
                return _Finding(failures.KEY_REFUSED.format(status=answer.status))
            if not answer.is_ok:
                body = answer.body if isinstance(answer.body, Mapping) else {}
                broken = ", ".join(f"{name}: {str(each)[:100]}" for name, each in list(body.items())[:5])
                return _Finding(
                    f"LangFlow answers its health check with status {answer.status} ({broken or 'no details'}). "
                    "Look into its log."
                )
            if not isinstance(answer.body, Mapping) or answer.body.get("status") != "ok":
                return _Finding("What answers there is not LangFlow. Check the address.")
            if not self._is_key_accepted:
                answer = await self._api.whoami()
                if answer.status in (401, 403):
                    return _Finding(failures.KEY_REFUSED.format(status=answer.status))
                self._is_key_accepted = answer.is_ok
        except Unreachable as error:
            self._was_closed = self._was_closed or error.is_closed
            return _Finding(str(error), is_silent=error.is_timeout)
        return _Finding(None)
