"""The connector of TextMill for ComfyFleet: what a payload is, how a job runs, and the plugin that is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import JobResult
from comfyfleet.model.payload import PayloadReading, check_plain, payload_hash
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.ports import Connector, ConnectorPlugin, Inventory
from comfyfleet.worker.connectors.json_api import JsonApi, JsonReply
from comfyfleet.worker.connectors.settings import converted_settings

SERVICE = "textmill"


# 1. The payload


class Payload(msgspec.Struct, forbid_unknown_fields=True):
    style: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    text: Annotated[str, msgspec.Meta(max_length=100_000)]


class TextMillFormat:
    service = SERVICE

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        check_plain(payload)
        try:
            read = msgspec.convert(payload, Payload)
        except msgspec.ValidationError as error:
            words = f"The payload for {SERVICE} is wrong: {error}. Send `style` and `text`."
            raise InvalidWorkflow(words) from error
        # The style is what the job does; the text is a value. The style must be installed, like a model.
        identity = payload_hash(SERVICE, {"style": read.style})
        return PayloadReading(dict(payload), identity, models=frozenset({read.style}))

    def json_schema(self) -> dict[str, Any]:
        return msgspec.json.schema(Payload)


# 2. The connector


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    key: str = ""
    request_s: float = 10.0
    poll_s: float = 0.5
    gone_s: float = 30.0
    """So long the connector keeps asking a server that does not answer."""


class Info(msgspec.Struct):
    version: str
    boot: str
    styles: list[str]


class Status(msgspec.Struct):
    state: Literal["waiting", "running", "done", "failed", "stopped"]
    progress: float
    text: str
    error: str


class TextMillConnector:
    service_name = SERVICE

    def __init__(self, url: str, settings: Settings) -> None:
        self._settings = settings
        self._api = JsonApi(
            "TextMill", url, {"X-Key": settings.key}, request_s=settings.request_s, max_answer_bytes=1 << 20
        )
        self._submits: dict[str, asyncio.Task[Status]] = {}

    async def open(self) -> None:
        await self._api.open()

    async def close(self) -> None:
        await self._api.close()

    async def inventory(self) -> Inventory:
        info = _checked(await self._api.ask("GET", "/info")).read(Info)
        service = Service(SERVICE, version=info.version, models=frozenset(info.styles))
        return Inventory(Capabilities(services=(service,)), boot=info.boot)

    async def check_health(self) -> bool:
        try:
            await self.inventory()
        except ServiceFailed:
            return False
        return True

    async def process_job(self, job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        loop, limits = asyncio.get_running_loop(), job.timeouts
        # A repeated PUT starts nothing, so an agent that comes back continues the job.
        submit = asyncio.create_task(self._insist("PUT", job, limits.accept_s, job.workflow))
        self._submits[job.attempt_id] = submit
        try:
            status = await submit
        finally:
            del self._submits[job.attempt_id]
        report(ProgressReport(job.ref, ProgressKind.ACCEPTED))
        accepted_at = changed_at = loop.time()
        is_started, progress = False, -1.0
        while status.state in ("waiting", "running"):
            if status.state == "running" and not is_started:
                is_started, changed_at = True, loop.time()
                report(ProgressReport(job.ref, ProgressKind.STARTED))
            if status.progress > progress and is_started:
                progress, changed_at = status.progress, loop.time()
                report(
                    ProgressReport(
                        job.ref, ProgressKind.PROGRESS, {"percentage": 100 * min(1, max(0, progress))}
                    )
                )
            if not is_started and limits.start_s is not None and loop.time() > accepted_at + limits.start_s:
                await self.cancel_job(job)
                raise _failed(
                    FailureKind.START_TIMEOUT, f"The job did not start within {limits.start_s:g} s."
                )
            if is_started and limits.stall_s is not None and loop.time() > changed_at + limits.stall_s:
                await self.cancel_job(job)
                raise _failed(
                    FailureKind.STALL_TIMEOUT, f"The run made no progress for {limits.stall_s:g} s."
                )
            await asyncio.sleep(self._settings.poll_s)
            status = await self._insist("GET", job)
        return _result(status)

    async def cancel_job(self, job: LeasedJob) -> None:
        if (submit := self._submits.get(job.attempt_id)) is not None:
            # A DELETE that overtakes the PUT would stop nothing.
            await asyncio.wait({submit})
        await self._ask("DELETE", job)

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        status = await self._ask("GET", job)
        if status is None:
            return RunningAttempt("unknown")
        return (
            RunningAttempt("completed", _result(status))
            if status.state == "done"
            else RunningAttempt(status.state)
        )

    async def _insist(
        self, method: str, job: LeasedJob, within_s: float | None = None, body: Any = None
    ) -> Status:
        """Asks until there is an answer: a connection may break, and each request may be repeated."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._settings.gone_s if within_s is None else within_s)
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    status = await self._ask(method, job, body)
            except TimeoutError as error:
                # The time to accept a job limits only its submit.
                kind = FailureKind.TRANSIENT if within_s is None else FailureKind.ACCEPT_TIMEOUT
                raise _failed(kind, "TextMill did not answer in time.") from error
            except ServiceFailed as failed:
                is_last = loop.time() + self._settings.poll_s >= deadline
                if failed.failure.kind is not FailureKind.TRANSIENT or is_last:
                    raise
                await asyncio.sleep(self._settings.poll_s)
            else:
                if status is None:
                    raise _failed(FailureKind.CRASHED, "TextMill has lost the job. Was it restarted?")
                return status

    async def _ask(self, method: str, job: LeasedJob, body: Any = None) -> Status | None:
        """None: TextMill does not know the job. Raises `ServiceFailed`."""
        # The id is the same for each agent, and has no characters with a meaning in a URL.
        reply = await self._api.ask(method, f"/jobs/{prompt_id_of(job.attempt_id)}", body)
        if reply.status == 404:
            return None
        if reply.status == 422:
            style = job.workflow["style"]
            words = f"TextMill has no style {style!r}. Install it, or choose another."
            raise ServiceFailed(Failure(FailureKind.MISSING_MODEL, words, missing=(style,)))
        return _checked(reply).read(Status)


def _checked(reply: JsonReply) -> JsonReply:
    if reply.status >= 500:
        raise _failed(FailureKind.TRANSIENT, f"TextMill answered {reply.status}.")
    if reply.status != 200:
        # The worker is set up wrong. The job is not to blame and goes to another worker.
        raise _failed(
            FailureKind.DEAD_WORKER, f"TextMill answered {reply.status}. Check its address and key."
        )
    return reply


def _result(status: Status) -> JobResult:
    if status.state == "done":
        return JobResult(outputs={"text": {"text": [status.text]}})
    if status.state == "stopped":
        raise _failed(FailureKind.INTERRUPTED, "The run was stopped.")
    raise _failed(FailureKind.NODE_ERROR, f"TextMill failed: {status.error or 'no reason given'}")


def _failed(kind: FailureKind, message: str) -> ServiceFailed:
    return ServiceFailed(Failure(kind, message))


# 3. The plugin


def connect(address: str, settings: Mapping[str, Any]) -> Connector:
    if urlsplit(address).scheme not in ("http", "https"):
        raise ValueError(f"the address of TextMill is like http://host:9000, not {address!r}")
    return TextMillConnector(address, converted_settings(settings, Settings))


PLUGIN = ConnectorPlugin(SERVICE, TextMillFormat(), connect)
