"""The contract of connectors for faults: each has its kind of failure, loses nothing and runs nothing too often."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.failure import FailureKind, FileTooLarge, ServiceBusy, ServiceFailed
from comfyfleet.model.job import JobResult, Timeouts
from comfyfleet.policy.retry import CountsAgainst, rule_of
from comfyfleet.ports import OutputSource
from comfyfleet.testing.contract.connector_scene import (
    CANNOT,
    ConnectorAbility,
    ConnectorBench,
    ConnectorFault,
    DeliveryPromise,
)

_SHORT_S = 0.5
_CONNECTION = frozenset(
    {
        FailureKind.TRANSIENT,
        FailureKind.CRASHED,
        FailureKind.ACCEPT_TIMEOUT,
        FailureKind.DEAD_WORKER,
        FailureKind.UNKNOWN,
    }
)
_HOSTILE = (ConnectorFault.ENDLESS_ANSWER, ConnectorFault.GARBAGE_ANSWER, ConnectorFault.REDIRECT)


def assert_not_blamed(failed: ServiceFailed) -> None:
    """The attempt costs the job nothing: the worker is at fault, or the job is given back."""
    if isinstance(failed, ServiceBusy):
        return
    rule = rule_of(failed.failure)
    assert not rule.is_final and rule.counts_against is not CountsAgainst.ATTEMPTS, (
        f"{failed.failure.kind} blames the job for {failed.failure.message!r}"
    )


def assert_retried(failed: ServiceFailed, promise: DeliveryPromise) -> None:
    if promise is DeliveryPromise.AT_MOST_ONCE and failed.failure.kind is FailureKind.OUTCOME_UNKNOWN:
        # Only a person decides to pay a second time.
        return
    assert isinstance(failed, ServiceBusy) or not rule_of(failed.failure).is_final, (
        f"{failed.failure.kind} ends the job for {failed.failure.message!r}"
    )


def _lost(failed: ServiceFailed) -> str:
    kinds = ", ".join(sorted(kind.name for kind in _CONNECTION))
    return f"a lost server or connection is one of {kinds}, not {failed.failure}"


class ConnectorFailureContract:
    """Failures of a run, and limits of the job."""

    async def test_a_run_that_fails_is_told_in_the_services_words(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorFault.RUN_FAILS)
        await bench.cause(ConnectorFault.RUN_FAILS)
        attempt = bench.start()
        failure = await attempt.failure()
        assert failure.kind is FailureKind.NODE_ERROR, f"a run that fails is a NODE_ERROR, not {failure}"
        assert failure.message.strip(), "the failure has no words of the service"
        await bench.scene.repair()
        await bench.completes_anew(attempt.job)

    async def test_out_of_memory_has_its_own_kind(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorFault.OUT_OF_MEMORY)
        await bench.cause(ConnectorFault.OUT_OF_MEMORY)
        failure = await bench.start().failure()
        assert failure.kind is FailureKind.OUT_OF_MEMORY, f"too little memory is OUT_OF_MEMORY, not {failure}"

    async def test_a_missing_model_is_named_and_nothing_is_made_with_another(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorFault.MISSING_MODEL)
        await bench.cause(ConnectorFault.MISSING_MODEL)
        failure = await bench.start().failure()
        assert failure.kind in (FailureKind.MISSING_MODEL, FailureKind.MISSING_NODE), (
            f"what the server lacks is MISSING_MODEL or MISSING_NODE, not {failure}"
        )
        assert failure.missing, "the agent looks for the missing names again, so it needs them"
        if bench.scene.payload_format is not None:
            reading = bench.scene.payload_format.read(bench.scene.payload(1001))
            needs = reading.models | reading.node_classes
            assert set(failure.missing) <= needs, (
                f"`missing` has the spelling of the payload format, {sorted(needs)}, not {failure.missing}"
            )

    @pytest.mark.parametrize("fault", [ConnectorFault.WRONG_KEY, ConnectorFault.OUT_OF_CREDITS])
    async def test_the_job_is_not_blamed_for_the_account(
        self, bench: ConnectorBench, fault: ConnectorFault
    ) -> None:
        bench.needs(fault)
        await bench.cause(fault)
        job = bench.job()
        end = await bench.ends_in_time(bench.start(job).end(), "the attempt")
        assert isinstance(end, ServiceFailed), repr(end)
        assert_not_blamed(end)
        bench.assert_says_no_secret(end, end.failure)
        assert bench.begun(job) == 0
        health = await bench.ends_in_time(bench.connector.check_health(), "the health check")
        assert health is not True, "the worker must take no jobs meanwhile"
        bench.assert_says_no_secret(health, getattr(bench.connector, "defect", ""))
        await bench.scene.repair()
        # The agent uses a server again after a good health check.
        await bench.eventually(bench.connector.check_health, "it is healthy again")
        await bench.completes_anew(job)

    async def test_a_submit_that_is_not_answered_times_out(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorFault.NEVER_ACCEPTS)
        await bench.cause(ConnectorFault.NEVER_ACCEPTS)
        job = bench.job(timeouts=Timeouts(accept_s=_SHORT_S))
        end = await bench.ends_in_time(bench.as_an_agent(job), "the attempt")
        assert isinstance(end, ServiceFailed), repr(end)
        assert isinstance(end, ServiceBusy) or end.failure.kind in (
            FailureKind.ACCEPT_TIMEOUT,
            FailureKind.TRANSIENT,
        ), end.failure
        await bench.scene.repair()
        await bench.completes_anew(job)

    async def test_a_job_that_does_not_start_times_out_and_is_taken_back(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorFault.NEVER_STARTS)
        await bench.cause(ConnectorFault.NEVER_STARTS)
        job = bench.job(timeouts=Timeouts(start_s=_SHORT_S))
        end = await bench.ends_in_time(bench.start(job).end(), "the attempt")
        assert isinstance(end, ServiceFailed), repr(end)
        kinds = (FailureKind.START_TIMEOUT, FailureKind.DEAD_WORKER)
        assert end.failure.kind in kinds, f"a job that does not start is START_TIMEOUT, not {end.failure}"
        mark = bench.mark_of(job)
        await bench.eventually(lambda: "waiting" not in bench.scene.runs(mark), "it is taken back")
        await bench.scene.repair()
        await bench.eventually(bench.connector.check_health, "it is healthy again")
        await bench.completes_anew(job)
        assert bench.begun(mark) == 1, "the job that timed out ran later"

    async def test_a_run_without_progress_times_out_and_is_stopped(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorFault.STALLS, ConnectorAbility.CANCEL_RUNNING)
        await bench.cause(ConnectorFault.STALLS)
        job = bench.job(timeouts=Timeouts(stall_s=_SHORT_S))
        failure = bench.start(job).failure()
        end = await bench.ends_in_time(failure, "the attempt")
        assert not isinstance(end, BaseException), repr(end)
        assert end.kind is FailureKind.STALL_TIMEOUT, f"a run without progress is STALL_TIMEOUT, not {end}"
        mark = bench.mark_of(job)
        await bench.eventually(lambda: "running" not in bench.scene.runs(mark), "the run is stopped")
        await bench.scene.release()
        await bench.completes_anew(job)


class ConnectorLossContract:
    """The server or the connection is lost: nothing is lost with it, and nothing runs more often than promised."""

    async def test_a_server_that_is_gone_before_the_submit_gives_the_job_back(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorFault.CRASH)
        await bench.cause(ConnectorFault.CRASH)
        health = await bench.ends_in_time(bench.connector.check_health(), "the health check")
        assert health is not True
        job = bench.job()
        end = await bench.ends_in_time(bench.as_an_agent(job), "the attempt")
        assert isinstance(end, ServiceFailed), repr(end)
        assert isinstance(end, ServiceBusy) or end.failure.kind in _CONNECTION, _lost(end)
        for work, what in (
            (bench.connector.inventory(), "the inventory"),
            (bench.connector.reconcile(job), "reconcile"),
            (bench.connector.cancel_job(job), "the cancel"),
        ):
            await bench.ends_in_time(work, what)
        await bench.scene.repair()
        await bench.eventually(bench.connector.check_health, "it is healthy again")
        await bench.completes_anew(job)

    async def test_a_server_that_crashes_in_a_run_is_noticed_and_the_job_completes_later(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorFault.CRASH)
        attempt = await bench.running()
        await bench.cause(ConnectorFault.CRASH)
        end = await bench.ends_in_time(bench.settled(attempt), "the attempt")
        assert isinstance(end, ServiceFailed), repr(end)
        assert end.failure.kind in _CONNECTION, _lost(end)
        assert end.failure.kind is not FailureKind.ACCEPT_TIMEOUT, (
            f"the service had accepted the job, and it failed as one that was not accepted: {end.failure}"
        )
        bench.assert_says_no_secret(end, end.failure)
        await bench.scene.release()
        await bench.scene.repair()
        await bench.eventually(bench.connector.check_health, "it is healthy again")
        await bench.completes_anew(attempt.job)

    async def test_a_server_that_restarts_in_a_run_has_lost_it_and_has_another_boot(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorFault.RESTART)
        await bench.start().result()
        before = (await bench.connector.inventory()).boot
        attempt = await bench.running()
        await bench.cause(ConnectorFault.RESTART)
        await bench.scene.release()
        end = await bench.ends_in_time(bench.settled(attempt), "the attempt")
        assert isinstance(end, ServiceFailed), f"its run is lost, and it completed: {end!r}"
        assert end.failure.kind in _CONNECTION, _lost(end)
        found = await bench.connector.reconcile(attempt.job)
        assert found.state not in ("waiting", "running", "completed") and found.result is None, (
            f"the restart ended the run, and `reconcile` tells {found}"
        )
        if ConnectorAbility.TELLS_BOOT not in bench.scene.cannot:
            await bench.eventually(bench.connector.check_health, "it is healthy again")

            async def has_changed() -> bool:
                return (await bench.connector.inventory()).boot != before

            await bench.eventually(has_changed, "the boot changes")
        await bench.completes_anew(attempt.job)

    async def test_a_connection_lost_before_acceptance_runs_nothing_twice(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorFault.LOST_BEFORE_ACCEPTANCE)
        await bench.cause(ConnectorFault.LOST_BEFORE_ACCEPTANCE)
        job = bench.job()
        end = await bench.ends_in_time(bench.as_an_agent(job), "the attempt")
        mark = bench.mark_of(job)
        if isinstance(end, JobResult):
            await bench.assert_made_from(end, job)
            assert bench.begun(mark) == 1
            return
        assert isinstance(end, ServiceBusy) or end.failure.kind in _CONNECTION, _lost(end)
        assert bench.begun(mark) == 0
        await bench.scene.repair()
        await bench.eventually(bench.connector.check_health, "it is healthy again")
        await bench.completes_anew(job)
        assert bench.begun(mark) == 1

    async def test_a_connection_lost_after_acceptance_keeps_the_promise(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorFault.LOST_AFTER_ACCEPTANCE)
        await bench.cause(ConnectorFault.LOST_AFTER_ACCEPTANCE)
        job = bench.job()
        end = await bench.ends_in_time(bench.as_an_agent(job), "the attempt")
        await self._keeps_its_promise(bench, job, end)

    async def test_a_connection_lost_in_a_run_keeps_the_promise(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorFault.LOST_IN_RUN)
        attempt = await bench.running()
        await bench.cause(ConnectorFault.LOST_IN_RUN)
        await bench.scene.release()
        end = await bench.ends_in_time(bench.settled(attempt), "the attempt")
        await self._keeps_its_promise(bench, attempt.job, end)

    async def test_a_run_that_costs_money_is_not_paid_again_by_the_next_lease(
        self, bench: ConnectorBench, tmp_path: Path
    ) -> None:
        if bench.scene.promise is not DeliveryPromise.AT_MOST_ONCE:
            pytest.skip(f"{CANNOT}its runs cost no money, so the next lease may begin anew")
        attempt = await bench.running()
        # The agent is lost with its machine, and the lease expires.
        attempt.task.cancel()
        await asyncio.wait({attempt.task})
        other = bench.scene.connect()
        await other.open()
        try:
            await bench.scene.release()
            next_bench = ConnectorBench(bench.scene, other, tmp_path)
            await next_bench.completes_anew(attempt.job)
        finally:
            await other.close()
        assert bench.begun(attempt.job) == 1, "the run was paid twice"

    async def test_a_key_that_is_refused_in_a_run_is_not_the_fault_of_the_job(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorFault.WRONG_KEY)
        attempt = await bench.running()
        await bench.cause(ConnectorFault.WRONG_KEY)
        await bench.scene.release()
        done, _ = await asyncio.wait({attempt.task}, timeout=_SHORT_S)
        if not done:
            # It may wait until it is let in again.
            await bench.scene.repair()
        end = await bench.ends_in_time(bench.settled(attempt), "the attempt")
        await bench.scene.repair()
        if isinstance(end, JobResult):
            await bench.assert_made_from(end, attempt.job)
            return
        assert isinstance(end, ServiceFailed), repr(end)
        bench.assert_says_no_secret(end, end.failure)
        assert_not_blamed(end)

    async def _keeps_its_promise(self, bench: ConnectorBench, job: LeasedJob, end: object) -> None:
        promise = bench.scene.promise
        if isinstance(end, JobResult):
            await bench.assert_made_from(end, job)
        else:
            assert isinstance(end, ServiceFailed), repr(end)
            assert promise is not DeliveryPromise.EXACTLY_ONCE, (
                f"the run went on at the server, and the attempt failed: {end.failure}"
            )
            assert_retried(end, promise)
        if promise is not DeliveryPromise.AT_LEAST_ONCE:
            assert bench.begun(job) <= 1, "it ran twice"
        await bench.scene.repair()
        if isinstance(end, JobResult):
            return
        await bench.eventually(bench.connector.check_health, "it is healthy again")
        if promise is DeliveryPromise.AT_LEAST_ONCE:
            await bench.completes_anew(job)
            assert bench.begun(job) <= 2, "one lost connection made more than one further run"
            return
        # Asked again, it must look before it submits, also for the next lease of the job.
        for again in (job, bench.next_lease(job)):
            found = await bench.ends_in_time(bench.as_an_agent(again), "the attempt")
            if isinstance(found, JobResult):
                await bench.assert_made_from(found, job)
            assert bench.begun(job) <= 1, "it ran twice"


class HostileServerContract:
    """A server that sends nonsense costs a bounded amount of memory and time, and is not used."""

    @pytest.mark.parametrize("fault", _HOSTILE)
    async def test_it_is_not_healthy_and_ends_every_call(
        self, bench: ConnectorBench, fault: ConnectorFault
    ) -> None:
        bench.needs(fault)
        async with _Stranger() as elsewhere:
            bench.scene.elsewhere = elsewhere.url
            await bench.cause(fault)
            with _at_most(bench.scene.memory_bytes):
                health = await bench.ends_in_time(bench.connector.check_health(), "the health check")
                assert health is not True, f"a server with {fault} is not healthy"
                seen = await bench.ends_in_time(bench.connector.inventory(), "the inventory")
                assert isinstance(seen, Exception), f"it has an inventory: {seen}"
                job = bench.job()
                found = await bench.ends_in_time(bench.connector.reconcile(job), "reconcile")
                assert isinstance(found, Exception) or found.result is None
                stopped = await bench.ends_in_time(bench.connector.cancel_job(job), "the cancel")
                assert stopped is None or isinstance(stopped, Exception)
            assert elsewhere.requests == [], "it follows a redirect to a stranger"
        bench.assert_says_no_secret(health, seen, found, stopped)

    @pytest.mark.parametrize("fault", _HOSTILE)
    async def test_a_job_ends_with_a_reason(self, bench: ConnectorBench, fault: ConnectorFault) -> None:
        bench.needs(fault)
        async with _Stranger() as elsewhere:
            bench.scene.elsewhere = elsewhere.url
            await bench.cause(fault)
            job = bench.job(timeouts=Timeouts(accept_s=_SHORT_S, start_s=2.0))
            with _at_most(bench.scene.memory_bytes):
                end = await bench.ends_in_time(bench.start(job).end(), "the attempt")
            assert elsewhere.requests == [], "it follows a redirect to a stranger"
        assert isinstance(end, ServiceFailed), repr(end)
        assert end.failure.message.strip()
        assert len(end.failure.message) < 10_000
        assert_retried(end, bench.scene.promise)

    @pytest.mark.parametrize("fault", _HOSTILE)
    async def test_a_run_that_the_server_falsifies_ends(
        self, bench: ConnectorBench, fault: ConnectorFault
    ) -> None:
        bench.needs(fault)
        async with _Stranger() as elsewhere:
            bench.scene.elsewhere = elsewhere.url
            attempt = await bench.running(bench.job(timeouts=Timeouts(stall_s=2.0)))
            with _at_most(bench.scene.memory_bytes):
                await bench.cause(fault)
                await bench.cause(ConnectorFault.LOST_IN_RUN)
                end = await bench.ends_in_time(attempt.end(), "the attempt")
            assert elsewhere.requests == [], "it follows a redirect to a stranger"
        assert isinstance(end, ServiceFailed), f"nobody said how it ended, and it completed: {end!r}"
        assert_retried(end, bench.scene.promise)

    async def test_an_output_without_an_end_fills_no_disk(
        self, bench: ConnectorBench, tmp_path: Path
    ) -> None:
        bench.needs(ConnectorAbility.MAKES_FILES, ConnectorFault.ENDLESS_OUTPUT)
        result = await bench.start().result()
        await bench.cause(ConnectorFault.ENDLESS_OUTPUT)
        assert isinstance(bench.connector, OutputSource), "a connector that makes files has `save`"
        path = tmp_path / "endless"
        with _at_most(bench.scene.memory_bytes):
            saved = await bench.ends_in_time(bench.connector.save(result.files[0], path), "the save")
        assert isinstance(saved, ServiceFailed), f"`save` raises ServiceFailed at its limit, not {saved!r}"
        assert not (isinstance(saved, FileTooLarge) and path.exists()), "a part of a file is left"


class _Stranger:
    """An address that nobody should follow."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> _Stranger:
        self._server = await asyncio.start_server(self._note, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _note(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.read(1000))
        writer.close()


@contextmanager
def _at_most(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= size, f"it used {peak - before} bytes"
