"""One attempt as an open request to `/api/v1/run`: for servers before 1.11, and for runs with global variables.

The run lives as long as the request: leaving it stops the run. So nothing is found again after a lost connection, and
the only progress is the messages and logs of the components.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.comfyui.api import read_json
from comfyfleet.worker.connectors.langflow import failures
from comfyfleet.worker.connectors.langflow.api import (
    AnswerTooLarge,
    LangFlowApi,
    Unreachable,
    chunks_of,
    read_bounded,
)
from comfyfleet.worker.connectors.langflow.events import EventReader, RunEvents, StreamEvent
from comfyfleet.worker.connectors.langflow.failures import fail, interrupted
from comfyfleet.worker.connectors.langflow.outputs import read_streamed
from comfyfleet.worker.connectors.langflow.payload import FlowCall
from comfyfleet.worker.connectors.langflow.settings import LangFlowSettings

_GLOBAL = "X-LANGFLOW-GLOBAL-VAR-"


class DirectRun:
    def __init__(
        self,
        job: LeasedJob,
        call: FlowCall,
        report: Callable[[ProgressReport], None],
        api: LangFlowApi,
        settings: LangFlowSettings,
    ) -> None:
        self.is_cancelled = False
        self.is_over = asyncio.Event()
        self._job = job
        self._call = call
        self._report = report
        self._api = api
        self._settings = settings
        self._events = RunEvents()
        self._reader: asyncio.Task[JobResult] | None = None
        self._message = ""

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._reader is not None:
            self._reader.cancel()

    async def run(self, flow_id: str, tweaks: Mapping[str, Any]) -> JobResult:
        """Raises `ServiceFailed`."""
        call = self._call
        body = {
            "input_value": call.input_value,
            "input_type": call.input_type,
            # The selection is made here, so that it is the same on every version.
            "output_type": "debug" if call.output_type == "debug" else "any",
            "tweaks": tweaks,
            "session_id": call.session_id or self._job.attempt_id,
        }
        headers = {f"{_GLOBAL}{name.upper()}": value for name, value in call.globals.items()}
        self._reader = asyncio.create_task(self._read(flow_id, body, headers))
        try:
            await asyncio.wait({self._reader})
        except asyncio.CancelledError:
            self._reader.cancel()
            await asyncio.wait({self._reader})
            raise
        finally:
            self.is_over.set()
        if self._reader.cancelled():
            raise interrupted("The run was cancelled.")
        return self._reader.result()

    async def _read(self, flow_id: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> JobResult:
        is_sent = False
        accept_s = self._job.timeouts.accept_s
        accept_s = self._settings.accept_s if accept_s is None else accept_s
        try:
            async with (
                asyncio.timeout(accept_s) as limit,
                self._api.run(flow_id, body, headers) as response,
            ):
                # The stream begins with the run, so only its beginning has a limit.
                limit.reschedule(None)
                is_sent = True
                if response.status != 200 or response.content_type != "text/event-stream":
                    content = await read_json(await read_bounded(response, self._settings))
                    return self._read_answer(response.status, content)
                self._tell(ProgressKind.ACCEPTED, {})
                self._tell(ProgressKind.STARTED, {})
                await self._read_events(response)
        except TimeoutError as error:
            raise fail(
                FailureKind.ACCEPT_TIMEOUT, f"LangFlow did not begin the run within {accept_s:g} s."
            ) from error
        except AnswerTooLarge as error:
            raise fail(
                FailureKind.NODE_ERROR,
                f"The events of the flow have {error}, which is the limit. Return less, or raise max_message_bytes.",
            ) from error
        except Unreachable as error:
            if not is_sent and error.is_refused:
                raise fail(FailureKind.TRANSIENT, f"Cannot submit to LangFlow: {error}") from error
            raise fail(
                FailureKind.CRASHED,
                f"The connection was lost during the run, which LangFlow then stops: {error}",
            ) from error
        if self._events.result is not None:
            return self._result(self._events.result)
        if self._events.failure is not None:
            raise ServiceFailed(self._events.failure)
        raise fail(FailureKind.CRASHED, "LangFlow ended the stream of the run without a result.")

    def _read_answer(self, status: int, content: Any) -> JobResult:
        if status == 200 and isinstance(content, Mapping):
            return self._result(content)
        if status == 404:
            raise failures.missing_flow(self._call.flow)
        if status == 500 and isinstance(content, Mapping) and isinstance(content.get("detail"), str):
            raise ServiceFailed(failures.run_error({"error": content}))
        raise failures.refused_request(status, content, "the run")

    def _result(self, content: Mapping[str, Any]) -> JobResult:
        return read_streamed(content, self._events, self._call, self._job.include_outputs, self._api.base)

    async def _read_events(self, response: aiohttp.ClientResponse) -> None:
        reader = EventReader(self._settings.max_message_bytes)
        chunks = chunks_of(response)
        while True:
            stall_s = self._job.timeouts.stall_s
            try:
                async with asyncio.timeout(stall_s):
                    chunk = await anext(chunks, None)
            except TimeoutError as error:
                raise fail(
                    FailureKind.STALL_TIMEOUT, f"The flow showed no progress for {stall_s:g} s."
                ) from error
            for event in reader.finish() if chunk is None else reader.feed(chunk):
                self._heard(event)
            if chunk is None or self._events.has_ended:
                return

    def _heard(self, event: StreamEvent) -> None:
        kind = self._events.take(event)
        data = event.content.get("data")
        message = data.get("message") if isinstance(data, Mapping) and kind == "log" else None
        if isinstance(message, str) and message != self._message:
            self._message = message
            self._tell(ProgressKind.PROGRESS, {"node": self._events.component, "message": message[:200]})

    def _tell(self, kind: ProgressKind, data: dict[str, Any]) -> None:
        self._report(ProgressReport(self._job.ref, kind, data))
