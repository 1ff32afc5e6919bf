"""The simulated connector keeps the promises of a real one."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worker._scripted import leased_job, until

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.canonical_json import canonical_json
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.ports import Connector
from comfyfleet.worker.connectors.registry import connect
from comfyfleet.worker.connectors.simulated import SimulatedConnector, fails, hangs, instant, takes
from comfyfleet.worker.connectors.simulated_payload import SimulatedFormat

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


# the service of its own


def _job(payload: dict[str, Any], **changes: Any) -> LeasedJob:
    return msgspec.structs.replace(leased_job(), workflow=payload, service="simulated", **changes)


def _made(payload: dict[str, Any]) -> str:
    return sha256(canonical_json(payload)).hexdigest()


async def test_a_payload_decides_what_a_run_does_and_the_result_proves_it(tmp_path: Path) -> None:
    connector = connect("simulated", "1000")
    (tmp_path / "picture").write_bytes(b"content")
    payload = {"seconds": 0, "outputs": {"out": {"texts": ["hello"]}}, "seed": 7, "inputs": {"image": None}}
    fetched = FetchedFile("a.png", tmp_path / "picture", "inputs", "image")
    told: list[ProgressReport] = []
    result = await connector.process_job(_job(payload, fetched=(fetched,)), told.append)
    assert result.outputs == {
        "out": {"texts": ["hello"]},
        "payload": {
            "sha256": [_made(payload)],
            "seed": [7],
            "files": [["image", sha256(b"content").hexdigest()]],
        },
    }
    assert told[-1].data == {"value": 4, "max": 4}
    named = await connector.process_job(_job(payload, include_outputs=("out",)), ignore)
    assert named.outputs == {"out": {"texts": ["hello"]}}


async def test_a_payload_fails_its_first_attempts() -> None:
    connector = connect("simulated", "0")
    payload = {"fail": {"kind": "crashed", "message": "as told", "times": 2}}
    for attempt in (1, 2):
        with pytest.raises(ServiceFailed) as failed:
            await connector.process_job(_job(payload, attempt=attempt), ignore)
        assert (failed.value.failure.kind, failed.value.failure.message) == (FailureKind.CRASHED, "as told")
    result = await connector.process_job(_job(payload, attempt=3), ignore)
    assert result.outputs == {"payload": {"sha256": [_made(payload)]}}


async def test_a_payload_that_is_none_fails_as_an_invalid_one() -> None:
    with pytest.raises(ServiceFailed) as failed:
        await connect("simulated", "0").process_job(_job({"second": 1}), ignore)
    assert failed.value.failure.kind is FailureKind.INVALID_WORKFLOW


async def test_a_graph_that_an_older_version_accepted_still_runs() -> None:
    graph = {"9": {"class_type": "SaveImage", "inputs": {}}}
    result = await connect("simulated", "0").process_job(_job(graph), ignore)
    assert result.outputs == {"payload": {"sha256": [_made(graph)]}}


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"seconds": -1}, "'payload.seconds'"),
        ({"seconds": float("nan")}, "'seconds' of the payload is not JSON"),
        ({"fail": {"kind": "hunger"}}, "'payload.fail.kind'"),
        ({"second": 1}, "unknown field `second`"),
        ({"outputs": {"a": 1}}, "'payload.outputs"),
    ],
)
def test_a_wrong_payload_is_refused_with_the_name_of_the_field(payload: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidWorkflow, match=told):
        SimulatedFormat().read(payload)


def test_the_identity_of_a_payload_leaves_out_its_values() -> None:
    read = SimulatedFormat().read
    one = read({"outputs": {"out": {"texts": ["a"]}}, "seed": -1, "models": ["m"], "inputs": {"image": "x"}})
    other = read({"outputs": {"out": {"texts": ["b"]}}, "seed": 3, "models": ["m"], "inputs": {"image": "y"}})
    assert one.workflow_hash == other.workflow_hash
    assert (one.seeds, other.seeds) == (("seed",), ())
    assert (one.models, one.inputs) == (frozenset({"m"}), frozenset({"inputs.image"}))
    assert read({"seconds": 2}).workflow_hash != read({"seconds": 3}).workflow_hash


async def test_a_worker_offers_the_models_of_its_settings() -> None:
    (service,) = (await connect("simulated", "0", {"models": ["a"]}).inventory()).capabilities.services
    assert (service.name, service.models) == ("simulated", frozenset({"a"}))
