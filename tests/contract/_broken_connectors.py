"""The example connector with one rule broken each, and the test of the contract that must catch it.

Copied beside the example and run there, so it imports nothing of the tests.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from textmill.connector import PLUGIN, Settings, Status, TextMillConnector, TextMillFormat

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.job import JobResult
from comfyfleet.model.payload import PayloadReading
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.ports import ConnectorPlugin, Inventory
from comfyfleet.worker.connectors.json_api import JsonApi, JsonReply

Report = Callable[[ProgressReport], None]


class ReturnsAnOlderResult(TextMillConnector):
    _first: JobResult | None = None

    async def process_job(self, job: LeasedJob, report: Report) -> JobResult:
        result = await super().process_job(job, report)
        self._first = self._first or result
        return self._first


class StopsWhateverRuns(TextMillConnector):
    async def cancel_job(self, job: LeasedJob) -> None:
        await super().cancel_job(job)
        await self._api.ask("DELETE", "/running")


class StopsNothing(TextMillConnector):
    async def cancel_job(self, job: LeasedJob) -> None:
        return


class SubmitsUnderANewIdEachTime(TextMillConnector):
    async def _ask(self, method: str, job: LeasedJob, body: Any = None) -> Status | None:
        if method == "PUT":
            self._id = uuid.uuid4().hex
        reply = await self._api.ask(method, f"/jobs/{getattr(self, '_id', 'none')}", body)
        return None if reply.status == 404 else reply.read(Status)


class StopsWithItsAgent(TextMillConnector):
    async def process_job(self, job: LeasedJob, report: Report) -> JobResult:
        try:
            return await super().process_job(job, report)
        except asyncio.CancelledError:
            await self.cancel_job(job)
            raise


class BlamesTheJobForTheKey(TextMillConnector):
    async def _ask(self, method: str, job: LeasedJob, body: Any = None) -> Status | None:
        try:
            return await super()._ask(method, job, body)
        except ServiceFailed as failed:
            raise ServiceFailed(Failure(FailureKind.NODE_ERROR, failed.failure.message)) from failed


class TellsTheKey(TextMillConnector):
    async def _ask(self, method: str, job: LeasedJob, body: Any = None) -> Status | None:
        try:
            return await super()._ask(method, job, body)
        except ServiceFailed as failed:
            words = f"{failed.failure.message} The key was {self._settings.key}."
            raise ServiceFailed(msgspec.structs.replace(failed.failure, message=words)) from failed


class BlamesTheJobForAKeyRefusedInItsRun(TextMillConnector):
    async def _ask(self, method: str, job: LeasedJob, body: Any = None) -> Status | None:
        try:
            return await super()._ask(method, job, body)
        except ServiceFailed as failed:
            if method == "GET" and failed.failure.kind is FailureKind.DEAD_WORKER:
                raise ServiceFailed(Failure(FailureKind.CRASHED, failed.failure.message)) from failed
            raise


class CallsALostServerOneThatAcceptsNothing(TextMillConnector):
    async def process_job(self, job: LeasedJob, report: Report) -> JobResult:
        try:
            return await super().process_job(job, report)
        except ServiceFailed as failed:
            if failed.failure.kind is not FailureKind.TRANSIENT:
                raise
            raise ServiceFailed(Failure(FailureKind.ACCEPT_TIMEOUT, failed.failure.message)) from failed


class FailsToCancelAtOnce(TextMillConnector):
    async def cancel_job(self, job: LeasedJob) -> None:
        if job.attempt_id in self._submits:
            raise TimeoutError
        await super().cancel_job(job)


class _Trusting(JsonApi):
    """Follows redirects, and reads to the end."""

    async def ask(self, method: str, path: str, body: Any = None) -> JsonReply:
        assert self._session is not None
        try:
            async with self._session.request(method, self._base + path, json=body) as response:
                return JsonReply(response.status, await response.read(), self._service)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServiceFailed(Failure(FailureKind.TRANSIENT, str(error))) from error


class TrustsTheServer(TextMillConnector):
    def __init__(self, url: str, settings: Settings) -> None:
        super().__init__(url, settings)
        self._api = _Trusting("TextMill", url, {"X-Key": settings.key}, request_s=2.0)


class LeavesATask(TextMillConnector):
    async def open(self) -> None:
        await super().open()
        self._watch = asyncio.create_task(asyncio.Event().wait())


class CallsAnyAnswerHealthy(TextMillConnector):
    async def check_health(self) -> bool:
        await self._api.ask("GET", "/info")
        return True


class NeverSeesARestart(TextMillConnector):
    async def inventory(self) -> Inventory:
        return msgspec.structs.replace(await super().inventory(), boot="1")


class WatchesNoTime(TextMillConnector):
    async def process_job(self, job: LeasedJob, report: Report) -> JobResult:
        timeouts = msgspec.structs.replace(job.timeouts, start_s=None, stall_s=None)
        return await super().process_job(msgspec.structs.replace(job, timeouts=timeouts), report)


class ForgetsResults(TextMillConnector):
    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        found = await super().reconcile(job)
        return RunningAttempt("unknown") if found.state == "completed" else found


class ReportsTheWrongLease(TextMillConnector):
    async def process_job(self, job: LeasedJob, report: Report) -> JobResult:
        ref = msgspec.structs.replace(job.ref, lease_number=7)
        return await super().process_job(
            job, lambda each: report(ProgressReport(ref, each.kind, each.data, each.image))
        )


class NamesNoMissingStyle(TextMillConnector):
    async def process_job(self, job: LeasedJob, report: Report) -> JobResult:
        try:
            return await super().process_job(job, report)
        except ServiceFailed as failed:
            raise ServiceFailed(msgspec.structs.replace(failed.failure, missing=())) from failed


class HashesTheText(TextMillFormat):
    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        found = super().read(payload)
        return msgspec.structs.replace(
            found, workflow_hash=WorkflowHash(found.workflow_hash + payload["text"])
        )


class HashesNothing(TextMillFormat):
    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        return msgspec.structs.replace(super().read(payload), workflow_hash=WorkflowHash("same"))


class NamesNoField(TextMillFormat):
    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        try:
            return super().read(payload)
        except InvalidWorkflow as error:
            raise InvalidWorkflow("The payload is wrong.") from error


class SpellsStylesItsOwnWay(TextMillFormat):
    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        found = super().read(payload)
        return msgspec.structs.replace(found, models=frozenset(each.title() for each in found.models))


CAUGHT_BY: dict[type, str] = {
    ReturnsAnOlderResult: "test_runs_after_one_another_do_not_mix_their_content",
    StopsWhateverRuns: "test_a_cancel_of_what_is_over_or_unknown_touches_nobody",
    StopsNothing: "test_a_cancelled_run_stops_and_a_strangers_goes_on",
    SubmitsUnderANewIdEachTime: "test_a_connection_lost_after_acceptance_keeps_the_promise",
    StopsWithItsAgent: "test_a_cancelled_agent_returns_at_once_and_nothing_runs_twice",
    BlamesTheJobForTheKey: "test_the_job_is_not_blamed_for_the_account[wrong_key]",
    BlamesTheJobForAKeyRefusedInItsRun: "test_a_key_that_is_refused_in_a_run_is_not_the_fault_of_the_job",
    CallsALostServerOneThatAcceptsNothing: (
        "test_a_server_that_crashes_in_a_run_is_noticed_and_the_job_completes_later"
    ),
    FailsToCancelAtOnce: "test_a_cancel_at_once_leaves_nothing_that_runs",
    TellsTheKey: "test_the_job_is_not_blamed_for_the_account[wrong_key]",
    TrustsTheServer: "test_it_is_not_healthy_and_ends_every_call[redirect]",
    LeavesATask: "test_a_close_may_be_repeated_and_leaves_no_task_and_no_file",
    CallsAnyAnswerHealthy: "test_it_is_not_healthy_and_ends_every_call[garbage_answer]",
    NeverSeesARestart: "test_a_server_that_restarts_in_a_run_has_lost_it_and_has_another_boot",
    WatchesNoTime: "test_a_run_without_progress_times_out_and_is_stopped",
    ForgetsResults: "test_the_state_of_an_attempt_is_told",
    ReportsTheWrongLease: "test_reports_have_the_shape_that_the_hub_expects",
    NamesNoMissingStyle: "test_a_missing_model_is_named_and_nothing_is_made_with_another",
    HashesTheText: "test_the_hash_ignores_values_and_changes_with_what_is_done",
    HashesNothing: "test_the_hash_ignores_values_and_changes_with_what_is_done",
    NamesNoField: "test_wrong_payloads_are_refused_by_the_name_of_the_field",
    SpellsStylesItsOwnWay: "test_the_inventory_names_the_service_its_version_and_what_a_payload_needs",
}


def plugin_with(broken: type) -> ConnectorPlugin:
    if issubclass(broken, TextMillFormat):
        return msgspec.structs.replace(PLUGIN, payload=broken())
    assert issubclass(broken, TextMillConnector)
    kind: type[TextMillConnector] = broken

    def connect(address: str, settings: Mapping[str, Any]) -> TextMillConnector:
        return kind(address, msgspec.convert(dict(settings), Settings))

    return msgspec.structs.replace(PLUGIN, connect=connect)
