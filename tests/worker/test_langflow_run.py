"""The LangFlow connector runs flows: what it submits, what it reports, and what it makes of the end."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.worker._langflow import (
    QUICK,
    connected,
    content_of,
    failure_of,
    leased,
    refusal_of,
    tuned,
)

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.job import Attachment, Timeouts
from comfyfleet.testing.contract.connector_scene import ConnectorAttempt
from comfyfleet.testing.fake_langflow import FakeFlow, FakeLangFlow, FakeLangFlowSettings
from comfyfleet.worker.connectors.langflow import LangFlow

SLEEP = {"flow": "lab-sleep", "input_value": "tea", "tweaks": {"LabSleep-m": {"seconds": 0.1}}}
ENDLESS = {"flow": "lab-sleep", "input_value": "endless", "tweaks": {"LabSleep-m": {"seconds": 3600}}}


async def _running(connector: LangFlow, fake: FakeLangFlow, job: LeasedJob | None = None) -> ConnectorAttempt:
    attempt = ConnectorAttempt(connector, job or leased(ENDLESS))
    async with asyncio.timeout(60):
        while not attempt.has_heard(ProgressKind.STARTED):
            await asyncio.sleep(0.01)
    return attempt


async def test_progress_counts_finished_components_of_those_that_run() -> None:
    async with connected() as (connector, fake):
        attempt = ConnectorAttempt(connector, leased(SLEEP))
        result = await attempt.result()
        (job,) = fake.jobs.by_id.values()
    assert result.outputs["ChatOutput-z"]["content"] == "slept 0.1: tea"
    assert attempt.reports[0].kind is ProgressKind.ACCEPTED
    assert attempt.reports[0].data == {"prompt_id": job.job_id}
    steps = [each.data for each in attempt.reports if each.kind is ProgressKind.PROGRESS]
    assert [(each["value"], each["max"]) for each in steps if "message" not in each][-1] == (3, 3)
    assert steps[-1]["percentage"] == 100.0
    (output,) = (each.data for each in attempt.reports if each.kind is ProgressKind.OUTPUT)
    assert output["node"] == "ChatOutput-z" and output["output"]["content"] == "slept 0.1: tea"


async def test_the_attempt_is_the_key_and_the_session() -> None:
    async with connected() as (connector, fake):
        job = leased({"flow": "lab-echo"})
        await ConnectorAttempt(connector, job).result()
        await ConnectorAttempt(connector, leased({"flow": "lab-echo", "session_id": "mine"})).result()
        first, second = fake.jobs.by_id.values()
    assert (first.key, first.session) == (job.attempt_id, job.attempt_id)
    assert second.session == "mine"


async def test_tweaks_reach_components_by_id_and_by_display_name() -> None:
    async with connected() as (connector, _):
        for name in ("LabSleep-m", "Lab Sleep"):
            payload = {"flow": "lab-sleep", "input_value": "x", "tweaks": {name: {"seconds": 0.25}}}
            assert await content_of(connector, payload) == "slept 0.25: x"


@pytest.mark.parametrize(
    ("tweaks", "words"),
    [
        ({"Nobody-1": {"a": 1}}, "no component 'Nobody-1'"),
        ({"LabSleep-m": {"second": 1}}, "no field 'second'"),
    ],
)
async def test_tweaks_that_langflow_would_ignore_are_refused(
    tweaks: dict[str, dict[str, int]], words: str
) -> None:
    async with connected() as (connector, fake):
        failure = await failure_of(connector, {"flow": "lab-sleep", "tweaks": tweaks})
        assert not fake.jobs.by_id
    assert failure.kind is FailureKind.INVALID_WORKFLOW and words in failure.message


async def test_a_flow_is_found_by_id_endpoint_name_and_name() -> None:
    async with connected() as (connector, fake):
        flow = fake.settings.flows[2]
        for name in (flow.flow_id, flow.flow_id.upper(), "lab-echo"):
            assert await content_of(connector, {"flow": name, "input_value": "hello"}) == "hello"
        models = (await connector.inventory()).capabilities.services[0].models
    assert models is not None and {flow.flow_id, "lab-echo", "Lab Person"} <= models


async def test_an_endpoint_name_that_moves_leads_to_the_new_flow_at_once() -> None:
    one = FakeFlow("00000000-0000-4000-8000-000000000000", "one", None, "live")
    async with connected(fake=FakeLangFlowSettings(flows=(one,))) as (connector, fake):
        await connector.inventory()
        assert await content_of(connector, {"flow": "live", "input_value": "a"}) == "a"
        other = FakeFlow("11111111-0000-4000-8000-000000000000", "other", "LabPicture", "live")
        fake.settings = msgspec.structs.replace(fake.settings, flows=(other,))
        assert await content_of(connector, {"flow": "live", "input_value": "a"}) == "drew a"


async def test_two_flows_of_one_name_are_not_guessed() -> None:
    flows = tuple(FakeFlow(f"{n}{n}{n}{n}{n}{n}{n}{n}-0000-4000-8000-000000000000", "twin") for n in (1, 2))
    async with connected(fake=FakeLangFlowSettings(flows=flows)) as (connector, _):
        failure = await failure_of(connector, {"flow": "twin"})
    assert failure.kind is FailureKind.INVALID_WORKFLOW and "2 flows" in failure.message


async def test_only_the_wanted_outputs_are_returned() -> None:
    async with connected() as (connector, _):
        for payload, include, count in (
            ({}, (), 1),
            ({"output_ids": ["ChatOutput-z"]}, (), 1),
            ({"output_ids": ["Other-1"]}, (), 0),
            ({}, ("Other-1",), 0),
            ({"output_type": "chat"}, (), 1),
            ({"output_type": "text"}, (), 0),
        ):
            job = leased({"flow": "lab-picture", "input_value": "cat", **payload}, include=include)
            result = await ConnectorAttempt(connector, job).result()
            assert len(result.outputs) == count, payload
            if payload.get("output_ids") or include:
                assert len(result.files) == count


async def test_global_variables_reach_the_flow_although_background_jobs_ignore_them() -> None:
    async with connected() as (connector, fake):
        payload = {"flow": "lab-global", "input_value": "x", "globals": {"api_key": "k1"}}
        assert await content_of(connector, payload) == "x globals: API_KEY=k1"
        assert await content_of(connector, {"flow": "lab-global", "input_value": "x"}) == "x globals: none"
        assert len(fake.jobs.by_id) == 1


async def test_input_files_are_attached_or_set_into_a_field_and_removed_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"from the hub")
    async with connected() as (connector, fake):
        for node, field in (("files", "picture"), ("LabRead-m", "path"), ("ChatInput-a", "files")):
            fetched = (FetchedFile("f1.txt", tmp_path / "f", node, field),)
            job = leased({"flow": "lab-read", "input_value": "I"}, fetched=fetched)
            result = await ConnectorAttempt(connector, job).result()
            assert result.outputs["ChatOutput-z"]["content"] == "I read: from the hub"
            assert len(fake.storage) == 1
            await connector.clean_up(job, are_outputs_kept=True)
            assert not fake.storage
        attached = (Attachment("a b.txt", b"small", "files", "x"),)
        failure = await failure_of(connector, {"flow": "lab-raise"}, attachments=attached)
        assert failure.kind is FailureKind.NODE_ERROR
        async with asyncio.timeout(60):
            while fake.storage:
                await asyncio.sleep(0.01)


async def test_a_file_for_a_field_that_is_not_there_is_refused_before_the_upload() -> None:
    async with connected() as (connector, fake):
        attached = (Attachment("a.txt", b"small", "LabRead-m", "paths"),)
        failure = await failure_of(connector, {"flow": "lab-read"}, attachments=attached)
        assert failure.kind is FailureKind.INVALID_WORKFLOW and "'paths'" in failure.message
        assert not fake.storage


async def test_a_file_of_the_users_own_storage_is_saved_too(tmp_path: Path) -> None:
    async with connected() as (connector, fake):
        attempt = ConnectorAttempt(connector, leased({"flow": "lab-picture", "input_value": "cat"}))
        (file,) = (await attempt.result()).files
        assert await connector.save(file, tmp_path / "a") == len(b"made from: cat")
        headers = {"x-api-key": "sk-fake"}
        form = aiohttp.FormData()
        form.add_field("file", b"the user's", filename="mine.txt")
        async with aiohttp.request("POST", f"{fake.url}/api/v2/files/", data=form, headers=headers) as answer:
            prefix, _, name = (await answer.json())["path"].partition("/")
        other = msgspec.structs.replace(file, subfolder=prefix, filename=name)
        assert await connector.save(other, tmp_path / "b") == len(b"the user's")
        assert (tmp_path / "b").read_bytes() == b"the user's"


@pytest.mark.parametrize(
    ("kind", "failure_kind", "exception"),
    [
        ("value", FailureKind.NODE_ERROR, "ValueError"),
        ("oom", FailureKind.OUT_OF_MEMORY, "OutOfMemoryError"),
        ("memory", FailureKind.OUT_OF_MEMORY, "MemoryError"),
    ],
)
@pytest.mark.parametrize("version", ["1.13.0", "1.10.2"])
async def test_an_error_of_a_component_is_told_in_its_words(
    kind: str, failure_kind: FailureKind, exception: str, version: str
) -> None:
    async with connected(fake=FakeLangFlowSettings(version=version)) as (connector, _):
        payload = {"flow": "lab-raise", "input_value": "boom", "tweaks": {"LabRaise-m": {"kind": kind}}}
        failure = await failure_of(connector, payload)
    assert (failure.kind, failure.exception_type) == (failure_kind, exception)
    assert (failure.node_id, failure.node_type) == ("LabRaise-m", "Lab Raise")
    assert failure.traceback[0].startswith("Traceback")
    if kind == "value":
        assert failure.message == "Lab Raise failed: the lab component refuses: boom"


async def test_a_component_that_cannot_be_built_fails_although_langflow_says_completed() -> None:
    async with connected() as (connector, fake):
        failure = await failure_of(
            connector, {"flow": "lab-sleep", "tweaks": {"LabSleep-m": {"seconds": "soon"}}}
        )
        (job,) = fake.jobs.by_id.values()
    assert job.state == "completed"
    assert failure.kind is FailureKind.NODE_ERROR and failure.node_id == "LabSleep-m"
    assert "Could not convert 'soon' to float" in failure.message


async def test_a_flow_that_waits_for_a_person_is_stopped_and_ends_the_job() -> None:
    async with connected() as (connector, fake):
        failure = await failure_of(connector, {"flow": "Lab Person"})
        (job,) = fake.jobs.by_id.values()
    assert failure.kind is FailureKind.INVALID_WORKFLOW and "waits for a person" in failure.message
    assert job.state == "cancelled"


async def test_the_servers_own_time_limit_is_named() -> None:
    async with connected(fake=FakeLangFlowSettings(job_timeout_s=0.05)) as (connector, _):
        failure = await failure_of(connector, ENDLESS)
    assert failure.kind is FailureKind.NODE_ERROR and "LANGFLOW_BACKGROUND_JOB_TIMEOUT" in failure.message


async def test_a_job_that_the_server_forgot_is_stopped_and_submitted_anew() -> None:
    async with connected(tuned(queued_s=0.3)) as (connector, fake):
        fake.faults.forgets_submits = 1
        assert await content_of(connector, {"flow": "lab-echo", "input_value": "again"}) == "again"
        states = [job.state for job in fake.jobs.by_id.values()]
    assert states == ["cancelled", "completed"]
    assert fake.jobs.runs == ["again"]


async def test_a_stopped_job_that_shows_as_failed_for_a_while_is_cancelled() -> None:
    async with connected(fake=FakeLangFlowSettings(unclear_s=0.3)) as (connector, fake):
        attempt = await _running(connector, fake)
        await connector.cancel_job(attempt.job)
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED


async def test_a_stop_by_somebody_else_is_told_as_that() -> None:
    async with connected() as (connector, fake):
        attempt = await _running(connector, fake)
        (job,) = fake.jobs.by_id.values()
        fake.jobs.stop(job)
        failure = await attempt.failure()
    assert failure.kind is FailureKind.INTERRUPTED and "Somebody stopped" in failure.message


async def test_a_server_that_is_shut_down_in_a_run_has_crashed_for_the_job() -> None:
    async with connected(tuned(refused_s=30.0)) as (connector, fake):
        attempt = await _running(connector, fake)
        await fake.terminate()
        await fake.start()
        assert (await attempt.failure()).kind is FailureKind.CRASHED


async def test_events_go_on_after_each_cut_and_none_is_lost() -> None:
    async with connected(tuned(settle_s=60.0)) as (connector, fake):
        fake.faults.cut_streams = 6
        attempt = ConnectorAttempt(connector, leased({"flow": "lab-picture", "input_value": "cat"}))
        result = await attempt.result()
    assert len(result.files) == 1 and fake.faults.cut_streams == 0
    streams = [path for _, path in fake.requests if path.endswith("/events")]
    assert len(streams) >= 7
    values = [each.data["value"] for each in attempt.reports if each.kind is ProgressKind.PROGRESS]
    assert values == sorted(set(values)) and values[-1] == 3


async def test_without_events_the_status_alone_ends_the_run() -> None:
    async with connected() as (connector, fake):
        fake.faults.deaf_streams = True
        assert await content_of(connector, SLEEP) == "slept 0.1: tea"


async def test_events_without_an_end_are_left_and_the_status_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(tuned(max_message_bytes=100_000)) as (connector, fake):
        fake.faults.endless_answers = "/events"
        assert await content_of(connector, SLEEP) == "slept 0.1: tea"
    assert "more than 100000 bytes" in caplog.text


async def test_a_component_that_blocks_the_process_is_no_defect_of_the_server() -> None:
    settings = tuned(health_wait_s=0.05, health_s=0.2, request_s=0.2, unresponsive_s=30.0)
    async with connected(settings) as (connector, fake):
        tweaks = {"LabSleep-m": {"seconds": 1.0, "blocking": True}}
        attempt = ConnectorAttempt(
            connector, leased({"flow": "lab-sleep", "input_value": "b", "tweaks": tweaks})
        )
        async with asyncio.timeout(60):
            while not fake.jobs.runs:
                await asyncio.sleep(0.01)
        seen = [await connector.check_health() for _ in range(8)]
        result = await attempt.result()
    assert all(seen)
    assert result.outputs["ChatOutput-z"]["content"] == "slept 1.0: b"


async def test_a_server_that_hangs_without_our_jobs_is_not_healthy() -> None:
    async with connected(tuned(health_wait_s=0.05, health_s=0.2)) as (connector, fake):
        assert await connector.check_health()
        fake.faults.stalls = True
        async with asyncio.timeout(60):
            while await connector.check_health():
                await asyncio.sleep(0.01)
        assert "no answer in time" in (connector.defect or "")
        fake.faults.stalls = False
        async with asyncio.timeout(60):
            while not await connector.check_health():
                await asyncio.sleep(0.01)


async def test_a_busy_server_is_asked_again() -> None:
    async with connected() as (connector, fake):
        fake.faults.busy_submits = 2
        assert await content_of(connector, SLEEP) == "slept 0.1: tea"
        fake.faults.busy_submits = 1000
        end = await ConnectorAttempt(connector, leased(SLEEP, timeouts=Timeouts(accept_s=0.3))).failure()
    assert end.kind is FailureKind.ACCEPT_TIMEOUT and "DATABASE_ERROR" not in end.message
    assert "Failed to fetch flow" in end.message


async def test_a_restarted_agent_stops_a_run_of_which_it_knows_only_the_attempt() -> None:
    async with connected() as (connector, fake):
        attempt = await _running(connector, fake)
        bare = msgspec.structs.replace(attempt.job, workflow={}, workflow_hash=WorkflowHash(""))
        async with LangFlow(fake.url, QUICK) as other:
            assert (await other.reconcile(bare)).state == "running"
            await other.cancel_job(bare)
            assert (await other.reconcile(bare)).state == "unknown"
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED
    assert fake.jobs.runs == ["endless"]


@pytest.mark.parametrize("version", ["1.13.0", "1.11.0"])
async def test_a_submit_that_arrives_after_the_cancel_does_not_run(version: str) -> None:
    async with connected(fake=FakeLangFlowSettings(version=version)) as (connector, fake):
        job = leased(SLEEP)
        await connector.cancel_job(job)
        failure = await ConnectorAttempt(connector, job).failure()
    assert failure.kind is FailureKind.INTERRUPTED
    assert fake.jobs.runs == []


@pytest.mark.parametrize("version", ["1.13.0", "1.11.0"])
async def test_asking_for_an_unknown_attempt_leaves_its_key_free(version: str) -> None:
    async with connected(fake=FakeLangFlowSettings(version=version)) as (connector, fake):
        job = leased(SLEEP)
        for _ in range(2):
            assert (await connector.reconcile(job)).state == "unknown"
        result = await ConnectorAttempt(connector, job).result()
    assert result.outputs["ChatOutput-z"]["content"] == "slept 0.1: tea"
    assert fake.jobs.runs == ["tea"]


async def test_a_refused_key_gives_the_job_back_and_is_never_written_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with connected(tuned(key="sk-secret-1")) as (connector, fake):
        assert not await connector.check_health()
        assert "[connectors.langflow]" in (connector.defect or "")
        failed = await refusal_of(connector, SLEEP)
        assert isinstance(failed, ServiceBusy)
        assert "sk-secret-1" not in f"{caplog.text}{connector.defect}{failed.failure}{connector!r}"
        assert all("key" not in path for _, path in fake.requests)


async def test_an_older_server_runs_flows_and_a_warning_says_what_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(fake=FakeLangFlowSettings(version="1.10.2")) as (connector, fake):
        attempt = ConnectorAttempt(connector, leased(SLEEP))
        result = await attempt.result()
        assert result.outputs["ChatOutput-z"]["content"] == "slept 0.1: tea"
        picture = await ConnectorAttempt(
            connector, leased({"flow": "lab-picture", "input_value": "cat"})
        ).result()
        (file,) = picture.files
        attached = (Attachment("a.txt", b"small", "files", "x"),)
        job = leased({"flow": "lab-read", "input_value": "I"}, attachments=attached)
        read = await ConnectorAttempt(connector, job).result()
        assert read.outputs["ChatOutput-z"]["content"] == "I read: small"
        endless = ConnectorAttempt(connector, leased(ENDLESS))
        async with asyncio.timeout(60):
            while not endless.has_heard(ProgressKind.STARTED):
                await asyncio.sleep(0.01)
        await connector.cancel_job(endless.job)
        assert fake.direct_runs.all[-1].state == "stopped"
        assert (await endless.failure()).kind is FailureKind.INTERRUPTED
    assert caplog.text.count("has no background jobs") == 1
    assert (file.node_id, file.subfolder) == ("ChatOutput-z", "0c1b6f0e-5d3a-4f0e-9a53-2e6b9b3c2501")


@pytest.mark.parametrize(
    ("version", "has_jobs"),
    [("1.10.3", False), ("1.11.0", True), ("0.10.3", False), ("0.11.6", True), ("2.0.0", True)],
)
async def test_the_version_says_how_flows_run(version: str, has_jobs: bool) -> None:
    async with connected(fake=FakeLangFlowSettings(version=version)) as (connector, fake):
        assert await content_of(connector, SLEEP) == "slept 0.1: tea"
        assert (await connector.inventory()).capabilities.services[0].version == version
    assert bool(fake.jobs.by_id) is has_jobs
    assert bool(fake.direct_runs.all) is not has_jobs


async def test_a_compressed_list_of_flows_is_unpacked_up_to_the_limit() -> None:
    many = tuple(FakeFlow(f"{n:08d}-0000-4000-8000-000000000000", f"flow {n}") for n in range(2_000))
    older = FakeLangFlowSettings(version="1.11.0", flows=many)
    async with connected(fake=older) as (connector, _):
        models = (await connector.inventory()).capabilities.services[0].models
        assert models is not None and "flow 1999" in models
    async with connected(tuned(max_answer_bytes=100_000), older) as (connector, _):
        with pytest.raises(ServiceFailed, match="more than 100000 bytes"):
            await connector.inventory()
