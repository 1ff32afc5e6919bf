"""The simulated connector keeps the promises of a real one."""

from __future__ import annotations

import asyncio

import pytest
from tests.worker._scripted import leased_job, until

from comfyfleet.model.calls import ProgressReport
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.ports import Connector
from comfyfleet.worker.connectors.simulated import SimulatedConnector, fails, hangs, instant, takes

BROKEN = Failure(FailureKind.NODE_ERROR, "broken")


def ignore(report: ProgressReport) -> None:
    """Nobody listens."""


async def test_it_is_a_connector_and_completes_at_once_by_default() -> None:
    connector: Connector = SimulatedConnector()
    assert await connector.process_job(leased_job(), ignore) == JobResult()


async def test_it_records_its_runs() -> None:
    connector = SimulatedConnector(behaviour=fails(BROKEN, times=1))
    with pytest.raises(ServiceFailed):
        await connector.process_job(leased_job("one"), ignore)
    await connector.process_job(leased_job("two"), ignore)
    assert [(run.job.job_id, run.state) for run in connector.runs] == [
        ("one", "failed"),
        ("two", "completed"),
    ]


async def test_it_keeps_a_bounded_number_of_runs_and_counts_all() -> None:
    connector = SimulatedConnector(keep_runs=2)
    for name in ("one", "two", "three"):
        await connector.process_job(leased_job(name), ignore)
    assert [run.job.job_id for run in connector.runs] == ["two", "three"]
    assert connector.run_count == 3


async def test_seconds_are_slept_with_the_given_sleep_and_progress_is_told() -> None:
    slept: list[float] = []
    told: list[ProgressReport] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await SimulatedConnector(behaviour=8, sleep=sleep).process_job(leased_job(), told.append)
    assert slept == [2.0] * 4
    assert [report.kind for report in told] == ["accepted", "started", *["progress"] * 4]
    assert told[-1].data == {"value": 4, "max": 4}


async def test_a_run_without_steps_still_takes_its_time() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await takes(3.0, steps=0, sleep=sleep)(leased_job(), ignore)
    assert slept == [3.0]


async def test_it_fails_so_many_times_and_then_behaves() -> None:
    result = JobResult(outputs={"9": {}})
    connector = SimulatedConnector(behaviour=fails(BROKEN, times=2, then=instant(result)))
    for _ in range(2):
        with pytest.raises(ServiceFailed) as raised:
            await connector.process_job(leased_job(), ignore)
        assert raised.value.failure is BROKEN
    assert await connector.process_job(leased_job(), ignore) == result


async def test_a_cancel_stops_the_run_and_returns_once_it_is_over() -> None:
    connector, job = SimulatedConnector(behaviour=hangs()), leased_job()
    running = asyncio.create_task(connector.process_job(job, ignore))
    await until(lambda: connector.runs)
    assert (await connector.reconcile(job)).state == "running"
    await connector.cancel_job(job)
    with pytest.raises(ServiceFailed) as raised:
        await running
    assert raised.value.failure.kind is FailureKind.INTERRUPTED
    assert (await connector.reconcile(job)).state == "unknown"


async def test_a_cancel_never_touches_another_job() -> None:
    connector, job = SimulatedConnector(behaviour=hangs()), leased_job("mine")
    running = asyncio.create_task(connector.process_job(job, ignore))
    await until(lambda: connector.runs)
    await connector.cancel_job(leased_job("other"))
    assert not running.done()
    assert (await connector.reconcile(job)).state == "running"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert connector.runs[0].state == "cancelled"


async def test_a_server_that_is_down_has_no_inventory_and_says_when_it_is_back() -> None:
    offered = Capabilities((Service("comfyui", models=frozenset({"a"})),))
    connector = SimulatedConnector(capabilities=offered)
    told: list[bool] = []
    connector.on_connection = told.append
    before = await connector.inventory()
    connector.go_offline()
    assert not await connector.check_health()
    with pytest.raises(ConnectionError):
        await connector.inventory()
    connector.go_online(restarted=True)
    after = await connector.inventory()
    assert (before.capabilities, after.capabilities) == (offered, offered)
    assert before.boot != after.boot
    assert told == [False, True]
