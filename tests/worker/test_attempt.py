"""One lease from its receipt to its report, as an agent runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.worker._scripted import QUICK, ScriptedApi, cancel, leased_job, quick, running, until

from comfyfleet.model.calls import Command, HeartbeatReply, LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.payload_digest import leased_sha256
from comfyfleet.worker.attempt import AttemptRun, StopReason
from comfyfleet.worker.connectors.simulated import SimulatedConnector, fails, hangs, takes
from comfyfleet.worker.progress_sender import ProgressSender

# what a run took


@pytest.mark.parametrize("failure", [None, Failure(FailureKind.NODE_ERROR, "bad")])
async def test_the_wait_in_the_servers_own_queue_is_not_counted(failure: Failure | None) -> None:
    api = ScriptedApi()

    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        report(ProgressReport(job.ref, ProgressKind.ACCEPTED))
        await asyncio.sleep(1.0)
        report(ProgressReport(job.ref, ProgressKind.STARTED))
        report(ProgressReport(job.ref, ProgressKind.STARTED))
        if failure is not None:
            raise ServiceFailed(failure)
        return JobResult()

    async with running(api, SimulatedConnector(behaviour=behave)):
        api.give(leased_job())
        await until(lambda: api.named("complete") + api.named("fail"))
    (told,) = api.named("complete") + api.named("fail")
    assert 0 <= told.seconds < 1.0


async def test_a_run_that_never_told_its_start_counts_from_its_beginning() -> None:
    api = ScriptedApi()

    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        await asyncio.sleep(0.1)
        return JobResult()

    async with running(api, SimulatedConnector(behaviour=behave)):
        api.give(leased_job())
        await until(lambda: api.named("complete"))
    assert api.named("complete")[0].seconds >= 0.09


# a payload that is not the job's


@pytest.mark.parametrize("is_its_own", [True, False])
async def test_a_payload_runs_only_if_its_hash_is_the_one_that_the_lease_says(
    is_its_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    api, connector = ScriptedApi(), SimulatedConnector(behaviour=takes(0))
    whose = leased_job() if is_its_own else leased_job("another")
    job = msgspec.structs.replace(leased_job(), payload_sha256=leased_sha256(whose).hex())
    async with running(api, connector):
        api.give(job)
        await until(lambda: api.named("complete") + api.named("fail"))
    assert bool(connector.runs) == bool(api.named("complete")) == is_its_own
    if not is_its_own:
        (told,) = api.named("fail")
        assert told.failure.kind is FailureKind.PAYLOAD_MISMATCH
        assert "did not run it" in told.failure.message
        assert told.failure.message in caplog.text, "the operator of the worker hears of it too"


# a lease that ends early


async def test_a_lost_lease_stops_the_run_without_a_report() -> None:
    api, job = ScriptedApi(), leased_job()
    connector = SimulatedConnector(behaviour=hangs())
    async with running(api, connector, settings=quick(heartbeat_share=0.0005)):
        api.give(job)
        await until(lambda: connector.runs)
        api.lost.add(job.ref)
        await until(lambda: connector.runs[0].state == "cancelled")
        await until(lambda: api.parked == 1)
    assert connector.cancels
    assert not {"complete", "fail", "release"} & set(api.names)


async def test_a_run_is_given_up_at_a_share_of_its_lease_without_a_confirmed_heartbeat() -> None:
    api, job = ScriptedApi(), leased_job(ttl_s=3.0)
    api.holds["heartbeat"] = asyncio.Event()
    connector = SimulatedConnector(behaviour=hangs())
    loop = asyncio.get_running_loop()
    async with running(api, connector):
        given_at = loop.time()
        api.give(job)
        await until(lambda: connector.runs)
        started_at = loop.time()
        await until(lambda: connector.cancels)
        assert loop.time() - given_at >= 2.0
        assert loop.time() - started_at < 3.0
        await until(lambda: api.parked == 1)
    assert not {"complete", "fail", "release"} & set(api.names)


async def test_a_run_that_was_given_up_is_given_back_when_the_hub_answers_again() -> None:
    """The hub may have extended the lease at its start, and would wait for its end."""
    api, job = ScriptedApi(), leased_job(ttl_s=0.3)
    api.faults["heartbeat"].extend([Fault("away")] * 10_000)
    connector = SimulatedConnector(behaviour=hangs())
    async with running(api, connector):
        api.give(job)
        await until(lambda: connector.cancels)
        await until(lambda: api.parked == 1)
        assert not api.named("release"), "the hub is still away"
        api.faults["heartbeat"].clear()
        await until(lambda: api.named("release"))
    assert [(call.ref, call.reason) for call in api.named("release")] == [(job.ref, "retry")]
    assert not {"complete", "fail"} & set(api.names)


async def test_a_lease_whose_heartbeats_fail_for_a_while_is_kept() -> None:
    api, job = ScriptedApi(), leased_job(ttl_s=0.5)
    api.faults["heartbeat"].extend([Fault("away")] * 3)
    async with running(api, SimulatedConnector(behaviour=takes(0.6)), settings=quick(heartbeat_s=100.0)):
        api.give(job)
        await until(lambda: api.named("complete"))
    assert not api.faults["heartbeat"]


async def test_a_heartbeat_that_hangs_is_given_up_in_time_for_another() -> None:
    class HangsOnce(ScriptedApi):
        async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
            if not self.named("heartbeat"):
                self.holds["heartbeat"] = asyncio.Event()
            try:
                return await super().heartbeat(worker_id, refs)
            finally:
                self.holds.pop("heartbeat", None)

    api = HangsOnce()
    api.ttl_s = 0.6
    connector = SimulatedConnector(behaviour=takes(0.8))
    async with running(api, connector, settings=quick(heartbeat_s=1000.0)):
        api.give(leased_job(ttl_s=0.6))
        await until(lambda: api.named("complete"))
    assert not connector.cancels


# cancel in every phase


async def test_a_job_cancelled_before_it_started_never_runs() -> None:
    api, connector, job = ScriptedApi(), SimulatedConnector(), leased_job()
    run = AttemptRun(job, connector, api, ProgressSender(api, QUICK, lambda _: None), QUICK)
    run.stop(StopReason.CANCELLED)
    await run.run()
    assert not connector.runs
    assert [(call.ref, call.reason) for call in api.named("release")] == [(job.ref, "cancelled")]


@pytest.mark.parametrize(("action", "reason"), [("cancel", "cancelled"), ("retry", "retry")])
async def test_a_running_job_is_stopped_and_given_back_on_command(action: Any, reason: str) -> None:
    api, connector, job = ScriptedApi(), SimulatedConnector(behaviour=hangs()), leased_job()
    async with running(api, connector):
        api.give(job)
        await until(lambda: connector.runs)
        api.orders.append(Command(action, job.job_id, job.ref.number))
        await until(lambda: api.named("release"))
        assert connector.runs[0].state == "cancelled", "the release confirms that the run was stopped"
        await until(lambda: api.parked == 1)
    assert [call.reason for call in api.named("release")] == [reason]
    assert not {"complete", "fail"} & set(api.names)


async def test_a_cancel_can_come_with_the_answer_to_news() -> None:
    api, job = ScriptedApi(), leased_job()
    connector = SimulatedConnector(behaviour=hangs())
    api.orders.append(cancel(job))
    async with running(api, connector, settings=quick(heartbeat_s=1000.0)):
        api.give(job)
        await until(lambda: api.named("release"))


async def test_a_cancel_of_another_lease_of_the_job_is_not_ours() -> None:
    api, job = ScriptedApi(), leased_job()
    connector = SimulatedConnector(behaviour=takes(0.1))
    async with running(api, connector):
        api.give(job)
        await until(lambda: connector.runs)
        api.orders += [Command("cancel", job.job_id, 7), Command("cancel", JobId("other"))]
        await until(lambda: api.named("complete"))
    assert not connector.cancels


async def test_a_cancel_after_the_run_finished_leaves_the_completion_to_decide() -> None:
    api, connector, job = ScriptedApi(), SimulatedConnector(), leased_job()
    answered = api.holds["complete"] = asyncio.Event()
    async with running(api, connector):
        api.give(job)
        await until(lambda: api.named("complete"))
        api.orders.append(cancel(job))
        await until(lambda: not api.orders)
        answered.set()
        await until(lambda: api.parked == 1)
    assert not connector.cancels
    assert not api.named("release")
    assert len(api.named("complete")) == 1


async def test_a_run_that_does_not_react_to_a_cancel_is_torn_off() -> None:
    class Deaf(SimulatedConnector):
        async def cancel_job(self, job: LeasedJob) -> None:
            self.cancels.append(job)

    api, connector, job = ScriptedApi(), Deaf(behaviour=hangs()), leased_job()
    async with running(api, connector):
        api.give(job)
        await until(lambda: connector.runs)
        api.orders.append(cancel(job))
        await until(lambda: api.named("release"))
        assert len(connector.cancels) == 2, "what arrived while it was torn off is cancelled again"
        api.give(leased_job("next"))
        await until(lambda: connector.run_count == 2)
        api.orders += [cancel(leased_job("next")), Command("pause"), Command("resume")]
        await until(lambda: len(api.named("release")) == 2)
        await until(lambda: api.parked == 1)
        api.orders += [Command("pause")]
        await until(lambda: api.parked == 0)
        api.orders += [Command("resume")]
        await until(lambda: api.parked == 1)


async def test_a_cancel_that_the_service_cannot_carry_out_still_ends_the_lease() -> None:
    class Broken(SimulatedConnector):
        async def cancel_job(self, job: LeasedJob) -> None:
            raise ConnectionError("the server is gone")

    api, connector, job = ScriptedApi(), Broken(behaviour=hangs()), leased_job()
    async with running(api, connector):
        api.give(job)
        await until(lambda: connector.runs)
        api.orders.append(cancel(job))
        await until(lambda: api.named("release"))


# news


def reporting(*kinds_and_values: tuple[ProgressKind, int]) -> Any:
    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        for kind, value in kinds_and_values:
            report(ProgressReport(job.ref, kind, {"value": value}))
        return JobResult()

    return behave


async def test_news_is_in_order_the_newest_progress_wins_and_nothing_else_is_dropped() -> None:
    api = ScriptedApi()
    kinds = ProgressKind
    behaviour = reporting(
        (kinds.ACCEPTED, 0),
        (kinds.STARTED, 1),
        (kinds.PROGRESS, 2),
        (kinds.PREVIEW, 3),
        (kinds.OUTPUT, 4),
        (kinds.PROGRESS, 5),
        (kinds.OUTPUT, 6),
        (kinds.PREVIEW, 7),
    )
    async with running(api, SimulatedConnector(behaviour=behaviour)):
        api.give(leased_job())
        await until(lambda: api.named("complete"))
    assert [report.data["value"] for reports in api.named("progress") for report in reports] == [
        0,
        1,
        4,
        5,
        6,
        7,
    ]
    assert api.names.index("progress") < api.names.index("complete")


async def test_news_is_told_while_the_job_runs() -> None:
    api, connector = ScriptedApi(), SimulatedConnector(behaviour=hangs())
    async with running(api, connector):
        api.give(leased_job())
        await until(lambda: api.named("progress"))
        assert [report.kind for report in api.named("progress")[0]] == ["accepted", "started"]


async def test_news_whose_sending_failed_is_sent_again_in_order() -> None:
    api, connector = ScriptedApi(), SimulatedConnector(behaviour=hangs())
    api.faults["progress"].extend([Fault("away")] * 3)
    async with running(api, connector):
        api.give(leased_job())
        await until(lambda: len(api.named("progress")) == 4)
    assert [report.kind for report in api.named("progress")[3]] == ["accepted", "started"]


async def test_a_completion_waits_for_news_that_is_on_its_way() -> None:
    api, finish = ScriptedApi(), asyncio.Event()
    arrived = api.holds["progress"] = asyncio.Event()

    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        report(ProgressReport(job.ref, ProgressKind.STARTED))
        await finish.wait()
        return JobResult()

    connector = SimulatedConnector(behaviour=behave)
    async with running(api, connector):
        api.give(leased_job())
        await until(lambda: api.named("progress"))
        finish.set()
        await until(lambda: connector.runs[0].state == "completed")
        await asyncio.sleep(0)
        assert not api.named("complete")
        arrived.set()
        await until(lambda: api.named("complete"))


async def test_news_that_cannot_be_told_does_not_hold_up_a_completion_for_ever() -> None:
    api = ScriptedApi()
    api.holds["progress"] = asyncio.Event()
    async with running(api, SimulatedConnector(behaviour=takes(0.0)), settings=quick(flush_s=0.02)):
        api.give(leased_job())
        await until(lambda: api.named("complete"))


# ends


async def test_a_classified_failure_is_reported_as_it_is() -> None:
    failure = Failure(FailureKind.OUT_OF_MEMORY, "too big", vram_gb=8.0)
    api = ScriptedApi()
    async with running(api, SimulatedConnector(behaviour=fails(failure))):
        api.give(leased_job())
        await until(lambda: api.named("fail"))
    assert api.named("fail")[0].failure == failure


async def test_an_exception_in_the_connector_is_reported_with_its_traceback() -> None:
    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        raise ZeroDivisionError("a defect")

    api = ScriptedApi()
    async with running(api, SimulatedConnector(behaviour=behave)):
        api.give(leased_job())
        await until(lambda: api.named("fail"))
    failure = api.named("fail")[0].failure
    assert (failure.kind, failure.exception_type) == (FailureKind.UNKNOWN, "ZeroDivisionError")
    assert "in behave" in "".join(failure.traceback)


async def test_a_cancellation_that_escapes_a_connector_is_a_failure_of_the_job_not_of_the_slot() -> None:
    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        raise asyncio.CancelledError

    api = ScriptedApi()
    async with running(api, SimulatedConnector(behaviour=behave)):
        api.give(leased_job())
        await until(lambda: api.named("fail"))
        await until(lambda: api.parked == 1)


async def test_a_run_that_finished_while_the_connection_was_lost_is_completed() -> None:
    result = JobResult(outputs={"9": {"text": ["done"]}})

    class Finished(SimulatedConnector):
        async def reconcile(self, job: LeasedJob) -> RunningAttempt:
            return RunningAttempt("completed", result)

    api = ScriptedApi()
    connector = Finished(behaviour=fails(Failure(FailureKind.TRANSIENT, "the socket was lost")))
    async with running(api, connector):
        api.give(leased_job())
        await until(lambda: api.named("complete"))
    assert api.named("complete")[0].result == result
    assert not api.named("fail")


async def test_a_run_that_goes_on_after_its_failure_is_stopped_before_it_is_reported() -> None:
    class Running(SimulatedConnector):
        async def reconcile(self, job: LeasedJob) -> RunningAttempt:
            return RunningAttempt("running")

    api, job = ScriptedApi(), leased_job()
    connector = Running(behaviour=fails(Failure(FailureKind.TRANSIENT, "no news")))
    async with running(api, connector):
        api.give(job)
        await until(lambda: api.named("fail"))
        assert [cancelled.ref for cancelled in connector.cancels] == [job.ref]


async def test_a_completion_is_repeated_through_faults() -> None:
    api = ScriptedApi()
    api.faults["complete"].append(Fault("away"))
    api.lost_answers["complete"].append(ConnectionError("cut off"))
    async with running(api, SimulatedConnector()):
        api.give(leased_job())
        await until(lambda: len(api.named("complete")) == 3)
        await until(lambda: api.parked == 1)
    assert len({call.ref for call in api.named("complete")}) == 1


async def test_a_completion_is_not_repeated_for_ever_when_the_lease_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = ScriptedApi()
    api.faults["complete"].extend([Fault("away")] * 1000)
    api.faults["heartbeat"].extend([Fault("away")] * 1000)
    async with running(api, SimulatedConnector(behaviour=takes(0.0)), settings=quick(report_s=0.1)):
        api.give(leased_job(ttl_s=0.1))
        await until(lambda: api.named("complete"))
        await until(lambda: api.parked == 1)
        await until(lambda: "could not be reported" in caplog.text)
    assert api.faults["complete"]


async def test_a_run_that_ended_while_the_hub_was_away_is_reported_after_its_lease() -> None:
    """The hub may have extended the lease at its start; if not, it refuses the report."""
    api, job = ScriptedApi(), leased_job(ttl_s=0.1)
    connector = SimulatedConnector(behaviour=takes(0.0))
    for call in ("complete", "heartbeat"):
        api.faults[call].extend([Fault("away")] * 1000)
    async with running(api, connector):
        api.give(job)
        await until(lambda: api.named("complete"))
        await asyncio.sleep(0.3)
        for call in ("complete", "heartbeat"):
            api.faults[call].clear()
        told = len(api.named("complete"))
        await until(lambda: len(api.named("complete")) > told)
    assert not connector.cancels, "nothing was left to stop"
    assert not {"fail", "release"} & set(api.names)


async def test_a_completion_that_comes_too_late_ends_quietly() -> None:
    api, job = ScriptedApi(), leased_job()
    api.lost.add(job.ref)
    async with running(api, SimulatedConnector()):
        api.give(job)
        await until(lambda: api.parked == 1 and api.named("complete"))
    assert len(api.named("complete")) == 1
    assert not api.named("fail")


async def test_a_result_that_is_refused_is_reported_as_a_failure() -> None:
    api = ScriptedApi()
    api.faults["complete"].append(Refusal(RefusalCode.TOO_LARGE, "The result has 2 GB."))
    async with running(api, SimulatedConnector()):
        api.give(leased_job())
        await until(lambda: api.named("fail"))
    assert "The result has 2 GB." in api.named("fail")[0].failure.message
