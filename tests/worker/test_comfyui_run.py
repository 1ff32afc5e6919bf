"""A run that goes well on the fake server, for servers old and new: reports, results, files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.worker._comfyui import (
    QUICK,
    Attempt,
    lab_ui,
    leased,
    picture,
    server_and_connector,
    slow,
    tuned,
)

from comfyfleet.model.calls import ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, ServiceFailed
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import Timeouts
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.comfyui.api import ApiAnswer

VERSIONS = ["0.3.45", "0.3.57", "0.7.0", "0.33.0"]


def remove_outputs(fake: FakeComfyUI) -> None:
    folder = fake.disk.folder("output")
    assert folder is not None
    for path in folder.rglob("*.png"):
        path.unlink()


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_picture_comes_back_from_every_version(version: str) -> None:
    async with server_and_connector(version=version) as (_, connector):
        attempt = Attempt(connector, leased(picture()))
        result = await attempt.result()
        (file,) = result.files
        assert file.node_id == "2"
        assert file.kind == "images"
        assert (await connector.fetch(file)).startswith(b"\x89PNG")
        assert result.outputs["2"]["images"][0]["filename"] == file.filename


async def test_reports_come_in_the_order_accepted_started_output() -> None:
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(slow()))
        await attempt.result()
    kinds = [report.kind for report in attempt.reports]
    firsts = [
        kinds.index(kind) for kind in (ProgressKind.ACCEPTED, ProgressKind.STARTED, ProgressKind.OUTPUT)
    ]
    assert firsts == sorted(firsts)
    assert kinds.count(ProgressKind.STARTED) == 1
    assert attempt.of(ProgressKind.STARTED)[0].data == {"prompt_id": attempt.prompt_id}
    assert attempt.of(ProgressKind.ACCEPTED)[0].data == {"prompt_id": attempt.prompt_id, "number": 0}
    assert attempt.of(ProgressKind.OUTPUT)[0].data["files"][0]["node_id"] == "2"


async def test_progress_tells_value_max_node_and_a_percentage_that_grows() -> None:
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(slow(steps=4)))
        await attempt.result()
    data = [report.data for report in attempt.of(ProgressKind.PROGRESS)]
    assert any({"value": 2.0, "max": 4.0, "node": "1"}.items() <= entry.items() for entry in data)
    percentages = [entry["percentage"] for entry in data]
    assert percentages == sorted(percentages)
    assert percentages[-1] == 100.0
    assert data[-1]["nodes_done"] == data[-1]["nodes_total"] == 2


async def test_progress_is_throttled_and_the_last_one_is_sent() -> None:
    async with server_and_connector(tuned(progress_interval_s=5.0)) as (_, connector):
        attempt = Attempt(connector, leased(slow(steps=30, step_seconds=0.005)))
        await attempt.result()
    progress = attempt.of(ProgressKind.PROGRESS)
    assert len(progress) <= 4
    assert progress[-1].data["percentage"] == 100.0


async def test_timings_are_measured_for_each_node() -> None:
    async with server_and_connector() as (_, connector):
        result = await Attempt(connector, leased(slow(steps=4, step_seconds=0.05))).result()
    seconds = {timing.node_id: timing.seconds for timing in result.timings}
    assert set(seconds) == {"1", "2"}
    assert 0.15 < seconds["1"] < 2.0
    assert seconds["2"] < seconds["1"]


async def test_previews_come_with_node_and_format() -> None:
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(slow(preview=True)))
        await attempt.result()
    previews = attempt.of(ProgressKind.PREVIEW)
    assert previews
    assert all(report.image and report.image.startswith(b"\xff\xd8") for report in previews)
    assert previews[0].data == {"format": "image/jpeg", "node": "1"}


async def test_a_run_waits_for_its_listener_so_that_nothing_is_missed() -> None:
    async with FakeComfyUI() as fake:
        fake.faults.slow_paths = ["/ws"]
        fake.faults.slow_answer_s = 0.3
        async with ComfyUI(fake.url, QUICK) as connector:
            attempt = Attempt(connector, leased(picture()))
            await attempt.result()
    assert attempt.of(ProgressKind.OUTPUT)


async def test_a_cached_run_is_complete_and_names_its_cached_nodes() -> None:
    async with server_and_connector() as (fake, connector):
        graph = slow()
        await Attempt(connector, leased(graph)).result()
        result = await Attempt(connector, leased(graph)).result()
        assert result.cached_nodes == ("1",)
        assert fake.stats.nodes_by_class["LabSlow"] == 1
        (file,) = result.files
        assert await connector.fetch(file)


async def test_two_attempts_of_one_workflow_never_share_a_file() -> None:
    async with server_and_connector() as (fake, connector):
        first = await Attempt(connector, leased(picture())).result()
        remove_outputs(fake)
        second = await Attempt(connector, leased(picture())).result()
        assert first.files[0].subfolder != second.files[0].subfolder
        assert (await connector.fetch(second.files[0])).startswith(b"\x89PNG")
        with pytest.raises(ServiceFailed, match="no longer has"):
            await connector.fetch(first.files[0])


async def test_outputs_are_narrowed_to_those_asked_for() -> None:
    graph = {**picture(), "3": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(graph, include=("3",)))
        result = await attempt.result()
    assert set(result.outputs) == {"3"}
    assert {file.folder for file in result.files} == {"temp"}
    assert {report.data["node"] for report in attempt.of(ProgressKind.OUTPUT)} == {"3"}


async def test_an_expanded_node_counts_as_the_one_it_came_from() -> None:
    graph = {
        "1": {"class_type": "LabExpand", "inputs": {"seed": 3}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    async with server_and_connector() as (_, connector):
        result = await Attempt(connector, leased(graph, include=("1",))).result()
    assert {timing.node_id for timing in result.timings} == {"1", "2"}
    assert list(result.outputs) == ["1.0.0.2"]


async def test_progress_text_becomes_a_message() -> None:
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(lab_ui("progress text")))
        await attempt.result()
    assert "working..." in [report.data.get("message") for report in attempt.of(ProgressKind.PROGRESS)]


async def test_numbers_that_are_not_json_do_not_end_the_run() -> None:
    async with server_and_connector() as (_, connector):
        result = await Attempt(connector, leased(lab_ui("nan"))).result()
    value = result.outputs["1"]["value"]
    assert value[0] != value[0]


async def test_an_output_of_many_megabytes_arrives_over_the_websocket() -> None:
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(lab_ui("big", 9_000_000)))
        await attempt.result()
        assert connector._listening().losses == 0
    (output,) = attempt.of(ProgressKind.OUTPUT)
    assert len(str(output.data["output"])) >= 9_000_000


async def test_a_blocked_branch_does_not_end_the_run() -> None:
    graph = {
        "1": {"class_type": "LabBlocker", "inputs": {"message": "no licence"}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "a"}},
        "3": slow()["1"],
        "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "b"}},
    }
    async with server_and_connector() as (_, connector):
        result = await Attempt(connector, leased(graph)).result()
    assert set(result.outputs) == {"4"}


async def test_several_attempts_share_one_socket_and_keep_their_news_apart() -> None:
    async with server_and_connector() as (_, connector):
        attempts = [
            Attempt(connector, leased(slow(steps=3 + index, seed=index, preview=True))) for index in range(3)
        ]
        results = await asyncio.gather(*(attempt.result() for attempt in attempts))
    for index, (attempt, result) in enumerate(zip(attempts, results, strict=True)):
        assert {report.ref for report in attempt.reports} == {attempt.job.ref}
        assert {report.data["max"] for report in attempt.of(ProgressKind.PROGRESS)} >= {3.0 + index}
        assert not {3.0 + other for other in range(3) if other != index} & {
            report.data["max"] for report in attempt.of(ProgressKind.PROGRESS)
        }
        assert attempt.prompt_id in result.files[0].subfolder


async def test_news_of_other_callers_is_not_ours() -> None:
    async with server_and_connector() as (fake, connector):
        assert await connector._listening().wait_connected(2)
        # Without a client id, progress and previews of a prompt go to everybody.
        body = {"prompt": slow(steps=6, preview=True, seed=99)}
        async with connector._api.session.post(f"{fake.url}/prompt", json=body) as response:
            assert response.status == 200
        attempt = Attempt(connector, leased(picture()))
        await attempt.result()
    assert not attempt.of(ProgressKind.PREVIEW)
    assert 6.0 not in {report.data["max"] for report in attempt.of(ProgressKind.PROGRESS)}


async def test_a_file_is_streamed_to_a_path(tmp_path: Path) -> None:
    async with server_and_connector() as (_, connector):
        result = await Attempt(connector, leased(picture())).result()
        size = await connector.save(result.files[0], tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size == size > 0


async def test_a_receiver_that_raises_ends_its_own_attempt_only() -> None:
    async with server_and_connector() as (_, connector):

        def refuse(report: ProgressReport) -> None:
            if report.kind is ProgressKind.PROGRESS:
                raise ZeroDivisionError

        other = Attempt(connector, leased(slow()))
        with pytest.raises(ZeroDivisionError):
            await connector.process_job(leased(picture()), refuse)
        await other.result()


async def test_one_attempt_is_not_run_twice_at_a_time() -> None:
    async with server_and_connector() as (_, connector):
        job = leased(slow())
        first, second = Attempt(connector, job), Attempt(connector, job)
        assert (await second.failure()).kind is FailureKind.UNKNOWN
        await first.result()


async def test_an_attempt_the_server_already_has_is_taken_over_and_not_sent_again() -> None:
    async with server_and_connector() as (fake, connector):
        job = leased(slow(steps=10))
        async with ComfyUI(fake.url, QUICK) as former:
            attempt = Attempt(former, job)
            await attempt.heard(ProgressKind.STARTED)
            attempt.task.cancel()
            await asyncio.wait({attempt.task})
        result = await Attempt(connector, job).result()
        assert result.files
        assert fake.stats.prompts_run == {prompt_id_of(job.attempt_id): 1}


async def test_reconcile_tells_what_became_of_an_attempt() -> None:
    async with server_and_connector() as (_, connector):
        job = leased(slow(steps=20))
        assert (await connector.reconcile(job)).state == "unknown"
        attempt = Attempt(connector, job)
        await attempt.heard(ProgressKind.STARTED)
        waiting = Attempt(connector, leased(picture()))
        await waiting.heard(ProgressKind.ACCEPTED)
        assert (await connector.reconcile(job)).state == "running"
        assert (await connector.reconcile(waiting.job)).state == "waiting"
        result = await attempt.result()
        found = await connector.reconcile(job)
        assert found.state == "completed"
        assert found.result is not None
        assert found.result.files == result.files
        await waiting.result()


async def test_a_server_error_for_a_prompt_that_was_queued_all_the_same_is_no_failure() -> None:
    async with server_and_connector() as (fake, connector):
        submit = connector._api.submit

        async def stumble(*arguments: Any) -> ApiAnswer:
            assert (await submit(*arguments)).is_ok
            return ApiAnswer(500, "500 Internal Server Error\n\nServer got itself in trouble")

        connector._api.__dict__["submit"] = stumble
        attempt = Attempt(connector, leased(slow()))
        assert (await attempt.result()).files
        assert fake.stats.prompts_run == {attempt.prompt_id: 1}


async def test_silence_while_the_socket_is_lost_is_not_yet_a_stall() -> None:
    async with server_and_connector() as (fake, connector):
        timeouts = Timeouts(stall_s=0.6)
        attempt = Attempt(connector, leased(slow(steps=40, step_seconds=0.05), timeouts=timeouts))
        await attempt.heard(ProgressKind.PROGRESS, 4)
        fake.faults.fail_request_paths = ["/ws"]
        fake.faults.fail_requests = -1
        fake.faults.drop_sockets = True
        await asyncio.wait({attempt.task}, timeout=0.8)
        assert not attempt.task.done()
        fake.faults.fail_requests = 0
        assert (await attempt.result()).files
