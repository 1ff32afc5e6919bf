"""Every fault of the fake server, and that the attempt neither hangs nor runs twice nor is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.worker._comfyui import (
    Attempt,
    LateSubmit,
    eventually,
    lab_fail,
    lab_ui,
    leased,
    picture,
    queue_of,
    server_and_connector,
    slow,
    tuned,
)

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.job import Timeouts
from comfyfleet.testing.fake_comfyui import FakeComfyUI, Faults, NodeFault
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.comfyui.listener import Message


async def is_empty(fake: FakeComfyUI, connector: ComfyUI) -> bool:
    return not await queue_of(fake, connector)


async def test_a_failing_node_is_told_in_its_own_words() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.fail_nodes = [
            NodeFault(class_type="EmptyImage", exception_type="ValueError", message="bad value")
        ]
        failure = await Attempt(connector, leased(picture())).failure()
    assert failure.kind is FailureKind.NODE_ERROR
    assert "bad value" in failure.message
    assert (failure.node_id, failure.node_type, failure.exception_type) == ("1", "EmptyImage", "ValueError")


async def test_out_of_memory_names_the_size_of_the_card() -> None:
    async with server_and_connector(vram_gb=12.0) as (fake, connector):
        fake.faults.out_of_memory = 1
        failure = await Attempt(connector, leased(slow())).failure()
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert failure.vram_gb == 12.0


async def test_a_prompt_that_never_starts_times_out_and_is_taken_back() -> None:
    async with server_and_connector(tuned(idle_queue_s=30.0)) as (fake, connector):
        fake.faults.never_start = True
        attempt = Attempt(connector, leased(picture(), timeouts=Timeouts(start_s=0.4)))
        failure = await attempt.failure()
        assert failure.kind is FailureKind.START_TIMEOUT
        assert await queue_of(fake, connector) == []


async def test_a_server_that_runs_nothing_although_prompts_wait_is_dead() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.never_start = True
        assert (await Attempt(connector, leased(picture())).failure()).kind is FailureKind.DEAD_WORKER


async def test_waiting_behind_others_is_not_a_dead_worker() -> None:
    async with server_and_connector() as (_, connector):
        other = Attempt(connector, leased(slow(steps=20)))
        await other.heard(ProgressKind.STARTED)
        assert (await Attempt(connector, leased(picture())).result()).files
        await other.result()


async def test_a_start_timeout_counts_while_others_run() -> None:
    async with server_and_connector() as (_, connector):
        other = Attempt(connector, leased(slow(steps=30)))
        await other.heard(ProgressKind.STARTED)
        waiting = Attempt(connector, leased(picture(), timeouts=Timeouts(start_s=0.3)))
        assert (await waiting.failure()).kind is FailureKind.START_TIMEOUT
        assert (await other.result()).files


async def test_a_start_that_nobody_heard_is_looked_up_before_it_counts_as_late() -> None:
    async with server_and_connector(tuned(poll_s=5.0)) as (fake, connector):
        assert await connector._listening().wait_connected(2)
        fake.faults.deaf_sockets = True
        attempt = Attempt(connector, leased(slow(steps=20), timeouts=Timeouts(start_s=0.3)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.deaf_sockets = False
        assert (await attempt.result()).files


async def test_a_stalled_node_times_out_and_is_interrupted() -> None:
    async with server_and_connector(tuned(stop_s=0.5)) as (fake, connector):
        fake.faults.stall = "LabSlow"
        attempt = Attempt(connector, leased(slow(), timeouts=Timeouts(stall_s=0.5)))
        failure = await attempt.failure()
        assert failure.kind is FailureKind.STALL_TIMEOUT
        assert failure.node_id == "1"
        fake.faults.stall = None
        await eventually(lambda: fake.stats.prompt_log[0].ended_at is not None)
        assert fake.stats.prompt_log[0].outcome == "interrupted"


async def test_a_long_run_with_progress_does_not_stall() -> None:
    async with server_and_connector() as (_, connector):
        attempt = Attempt(connector, leased(slow(steps=12, step_seconds=0.1), timeouts=Timeouts(stall_s=0.5)))
        assert (await attempt.result()).files


async def test_progress_of_another_prompt_does_not_hide_our_stall() -> None:
    async with server_and_connector(tuned(stop_s=0.3)) as (fake, connector):
        fake.faults.stall = "LabSlow"
        stalled = Attempt(connector, leased(slow(), timeouts=Timeouts(stall_s=0.4)))
        await stalled.heard(ProgressKind.STARTED)
        async with asyncio.TaskGroup() as group:
            ping = group.create_task(_submit_for_ever(fake, connector))
            failure = await stalled.failure()
            ping.cancel()
        assert failure.kind is FailureKind.STALL_TIMEOUT


async def _submit_for_ever(fake: FakeComfyUI, connector: ComfyUI) -> None:
    """Each submit makes the server send a status message to everybody."""
    while True:
        async with connector._api.session.post(f"{fake.url}/prompt", json={"prompt": picture()}):
            await asyncio.sleep(0.05)


async def test_a_success_that_was_heard_stands_although_the_server_is_gone() -> None:
    async with server_and_connector(tuned(poll_s=5.0)) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=4)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.slow_paths = ["/history"]
        fake.faults.slow_answer_s = 5.0
        await attempt.heard(ProgressKind.OUTPUT)
        await eventually(lambda: attempt_is_told(connector, attempt))
        await fake.crash()
        assert (await attempt.result()).files


def attempt_is_told(connector: ComfyUI, attempt: Attempt) -> bool:
    return connector._runs[attempt.prompt_id]._end_told.is_set()


async def test_a_long_blocking_node_is_not_a_dead_worker() -> None:
    graph = {
        "1": {"class_type": "LabBlock", "inputs": {"seconds": 1.2, "seed": 1}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    async with server_and_connector() as (_, connector):
        assert (await Attempt(connector, leased(graph)).result()).files


async def test_a_server_that_crashes_in_a_run_and_stays_away_has_crashed() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.crash_after_nodes = 1
        failure = await Attempt(connector, leased(slow())).failure()
        assert failure.kind is FailureKind.CRASHED
        assert "refused connections" in failure.message


async def test_a_server_that_comes_back_without_our_prompt_has_crashed() -> None:
    async with server_and_connector(tuned(refused_s=60.0, unreachable_s=60.0)) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=100)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.down_seconds = 0.2
        fake.faults.crash = True
        failure = await attempt.failure()
        assert failure.kind is FailureKind.CRASHED
        assert "restarted" in failure.message
        fake.faults.crash_after_nodes = None
        assert (await Attempt(connector, leased(picture())).result()).files


async def test_a_server_that_is_back_at_once_is_asked_and_has_crashed() -> None:
    async with server_and_connector(tuned(poll_s=600.0)) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=100)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.restart = True
        assert (await attempt.failure()).kind is FailureKind.CRASHED


async def test_an_output_that_stops_the_server_is_a_crash() -> None:
    async with server_and_connector() as (_, connector):
        assert (await Attempt(connector, leased(lab_ui("bytes"))).failure()).kind is FailureKind.CRASHED


async def test_a_server_that_is_away_from_the_start_has_crashed() -> None:
    async with server_and_connector(tuned(listen_s=0.1)) as (fake, connector):
        await fake.crash()
        assert not await connector.check_health()
        assert (await Attempt(connector, leased(picture())).failure()).kind is FailureKind.CRASHED


async def test_a_server_that_comes_up_late_gets_the_prompt() -> None:
    async with server_and_connector(tuned(unreachable_s=5.0, accept_s=5.0, listen_s=0.1)) as (
        fake,
        connector,
    ):
        await fake.crash()
        attempt = Attempt(connector, leased(picture()))
        await asyncio.sleep(0.3)
        assert not attempt.task.done()
        await fake.restart()
        assert (await attempt.result()).files


async def test_a_lost_socket_is_opened_again_and_the_run_goes_on() -> None:
    async with server_and_connector() as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=20)))
        await attempt.heard(ProgressKind.PROGRESS, 4)
        fake.faults.drop_sockets = True
        await eventually(lambda: connector._listening().losses == 1)
        before = len(attempt.of(ProgressKind.PROGRESS))
        await attempt.heard(ProgressKind.PROGRESS, before + 5)
        assert (await attempt.result()).files
        assert fake.stats.prompts_run == {attempt.prompt_id: 1}


async def test_an_end_that_nobody_heard_is_found_in_the_history() -> None:
    async with server_and_connector() as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=4)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.fail_request_paths = ["/ws"]
        fake.faults.fail_requests = -1
        fake.faults.drop_sockets = True
        assert (await attempt.result()).files
        assert not attempt.of(ProgressKind.OUTPUT)


async def test_sockets_cut_in_the_middle_of_a_run_are_told_as_lost_and_back() -> None:
    async with server_and_connector() as (fake, connector):
        told: list[bool] = []
        connector.on_connection = told.append
        fake.faults.drop_sockets_after_nodes = 1
        await Attempt(connector, leased(slow())).result()
        await eventually(lambda: told == [False, True])
    assert told == [False, True], "a socket that we close is not lost"


async def test_a_listener_survives_what_nobody_foresaw(caplog: pytest.LogCaptureFixture) -> None:
    async with server_and_connector() as (_, connector):
        listener = connector._listening()
        route = listener.route

        def stumble(message: Message) -> None:
            listener.__dict__.pop("route")
            raise LookupError("a defect")

        listener.__dict__["route"] = stumble
        await Attempt(connector, leased(slow())).result()
        assert listener.route == route
        assert await listener.wait_connected(2.0)
        attempt = Attempt(connector, leased(slow(seed=2)))
        await attempt.result()
        assert attempt.of(ProgressKind.PROGRESS)
    assert "a defect" in caplog.text


def test_every_switch_of_the_fake_is_met_by_the_connector() -> None:
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in Faults.__struct_fields__ if f"faults.{name}" not in sources] == []


async def test_a_server_without_websockets_still_runs_jobs() -> None:
    async with FakeComfyUI() as fake:
        fake.faults.fail_request_paths = ["/ws"]
        fake.faults.fail_requests = -1
        async with ComfyUI(fake.url, tuned(listen_s=0.1)) as connector:
            attempt = Attempt(connector, leased(slow()))
            assert (await attempt.result()).files
    assert [report.kind for report in attempt.reports] == [ProgressKind.ACCEPTED, ProgressKind.STARTED]


async def test_a_deaf_socket_does_not_hang_the_run_and_is_replaced() -> None:
    async with server_and_connector() as (fake, connector):
        assert await connector._listening().wait_connected(2)
        fake.faults.deaf_sockets = True
        attempt = Attempt(connector, leased(slow()))
        assert (await attempt.result()).files
        assert attempt.of(ProgressKind.STARTED)
        assert connector._listening().reopened >= 1
        assert connector._listening().losses == 0


async def deafen(fake: FakeComfyUI, connector: ComfyUI) -> None:
    """As a real server does it: when another socket of this client id closes, ours is forgotten."""
    async with connector._api.session.ws_connect(f"{fake.url}/ws?clientId={connector._client_id}"):
        pass


async def test_a_socket_that_went_deaf_hears_again_before_a_stall_is_believed() -> None:
    async with server_and_connector() as (fake, connector):
        timeouts = Timeouts(stall_s=0.9)
        attempt = Attempt(connector, leased(slow(steps=40, step_seconds=0.06), timeouts=timeouts))
        await attempt.heard(ProgressKind.PROGRESS, 4)
        await deafen(fake, connector)
        assert (await attempt.result()).files
        assert connector._listening().reopened >= 1


async def test_a_socket_that_was_deaf_from_the_start_is_replaced_during_the_run() -> None:
    async with server_and_connector() as (fake, connector):
        assert await connector._listening().wait_connected(2)
        await deafen(fake, connector)
        attempt = Attempt(connector, leased(slow(steps=40, step_seconds=0.05)))
        await attempt.heard(ProgressKind.PROGRESS)
        assert connector._listening().reopened >= 1
        await connector.cancel_job(attempt.job)
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED


async def test_a_slow_server_is_waited_for() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.slow_answer_s = 0.2
        assert (await Attempt(connector, leased(picture())).result()).files


@pytest.mark.parametrize("manner", ["drop", "hang"])
async def test_a_prompt_whose_answer_was_lost_is_found_and_not_sent_again(
    manner: Literal["drop", "hang"],
) -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.lost_answer_manner = manner
        fake.faults.lose_submit_answers = 1
        attempt = Attempt(connector, leased(slow(), timeouts=Timeouts(accept_s=0.5)))
        assert (await attempt.result()).files
        assert fake.stats.prompts_run == {attempt.prompt_id: 1}
        assert [report.kind for report in attempt.reports][:2] == [
            ProgressKind.ACCEPTED,
            ProgressKind.STARTED,
        ]


async def test_a_submit_that_takes_longer_than_we_wait_is_found_all_the_same() -> None:
    graph = {
        "1": {"class_type": "LabSlowValidate", "inputs": {"seconds": 1.0, "seed": 1}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    async with server_and_connector() as (fake, connector):
        attempt = Attempt(connector, leased(graph, timeouts=Timeouts(accept_s=0.3)))
        assert (await attempt.result()).files
        assert fake.stats.prompts_run == {attempt.prompt_id: 1}


async def test_a_submit_that_is_never_answered_nor_accepted_times_out() -> None:
    async with server_and_connector(tuned(sweep_s=0.2)) as (fake, connector):
        fake.faults.slow_paths = ["/prompt"]
        fake.faults.slow_answer_s = 30.0
        failure = await Attempt(connector, leased(picture(), timeouts=Timeouts(accept_s=0.3))).failure()
        assert failure.kind is FailureKind.ACCEPT_TIMEOUT


async def test_a_prompt_that_arrives_after_its_timeout_is_removed() -> None:
    async with server_and_connector() as (fake, connector):
        other = Attempt(connector, leased(slow(steps=40)))
        await other.heard(ProgressKind.STARTED)
        late = LateSubmit(connector)
        failure = await Attempt(connector, leased(picture())).failure()
        assert failure.kind is FailureKind.ACCEPT_TIMEOUT
        await late.arrive()
        assert fake.stats.prompts_accepted == 2
        await other.result()
        await eventually(lambda: is_empty(fake, connector))
        assert list(fake.stats.prompts_run) == [other.prompt_id]


async def test_a_server_error_on_submit_is_transient_when_the_prompt_did_not_arrive() -> None:
    async with server_and_connector(tuned(sweep_s=0.1)) as (fake, connector):
        fake.faults.fail_request_paths = ["/prompt"]
        fake.faults.fail_requests = 1
        failure = await Attempt(connector, leased(picture())).failure()
        assert failure.kind is FailureKind.TRANSIENT
        assert "500" in failure.message
        assert fake.stats.prompts_accepted == 0


async def test_server_errors_during_a_run_are_outlasted() -> None:
    async with server_and_connector() as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=10)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.fail_request_paths = ["/queue", "/history"]
        fake.faults.fail_requests = 4
        assert (await attempt.result()).files


async def test_a_missing_model_is_named() -> None:
    graph: dict[str, Any] = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd15.safetensors"}},
        "2": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "3": {"class_type": "VAEDecode", "inputs": {"samples": ["2", 0], "vae": ["1", 2]}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "x"}},
    }
    async with server_and_connector() as (fake, connector):
        fake.faults.missing_models = ["sd15.safetensors"]
        failure = await Attempt(connector, leased(graph)).failure()
        assert failure.kind is FailureKind.MISSING_MODEL
        assert failure.missing == ("sd15.safetensors",)
        assert failure.node_errors is not None
        fake.faults.missing_models = []
        fake.faults.corrupt_models = ["sd15.safetensors"]
        failure = await Attempt(connector, leased(graph)).failure()
        assert failure.kind is FailureKind.NODE_ERROR
        fake.faults.corrupt_models = []
        fake.faults.added_models = {"checkpoints": {"new.safetensors": 1.0}}
        graph["1"]["inputs"]["ckpt_name"] = "new.safetensors"
        assert (await Attempt(connector, leased(graph)).result()).files


@pytest.mark.parametrize("version", ["0.3.45", "0.7.0", "0.33.0"])
async def test_a_missing_node_class_is_named(version: str) -> None:
    graph = {**picture(), "1": {"class_type": "NoSuchNode", "inputs": {}}}
    async with server_and_connector(version=version) as (_, connector):
        failure = await Attempt(connector, leased(graph)).failure()
    assert failure.kind is FailureKind.MISSING_NODE
    assert failure.missing == ("NoSuchNode",)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ValueError", FailureKind.NODE_ERROR),
        ("torch OOM", FailureKind.OUT_OF_MEMORY),
        ("MemoryError", FailureKind.OUT_OF_MEMORY),
        ("FileNotFoundError", FailureKind.MISSING_MODEL),
        ("Interrupt", FailureKind.INTERRUPTED),
    ],
)
async def test_an_exception_in_a_node_is_classified(kind: str, expected: FailureKind) -> None:
    async with server_and_connector() as (_, connector):
        assert (await Attempt(connector, leased(lab_fail(kind))).failure()).kind is expected


async def test_a_half_accepted_prompt_is_stopped_and_fails() -> None:
    graph = {
        **slow(steps=60),
        "3": {"class_type": "LoadImage", "inputs": {"image": "not_there.png"}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "x"}},
    }
    async with server_and_connector() as (fake, connector):
        failure = await Attempt(connector, leased(graph)).failure()
        assert failure.kind is FailureKind.MISSING_INPUT
        assert failure.missing == ("not_there.png",)
        assert await queue_of(fake, connector) == []
        assert all(run.outcome == "interrupted" for run in fake.stats.prompt_log)


async def test_a_graph_that_would_kill_the_worker_thread_is_never_sent() -> None:
    graph = {**picture(), "9": {"class_type": "EmptyImage"}}
    async with server_and_connector() as (fake, connector):
        failure = await Attempt(connector, leased(graph)).failure()
        assert failure.kind is FailureKind.INVALID_WORKFLOW
        assert failure.node_id == "9"
        assert fake.stats.prompts_accepted == 0


async def test_a_prompt_that_somebody_else_removed_is_not_waited_for() -> None:
    async with server_and_connector() as (_, connector):
        other = Attempt(connector, leased(slow(steps=30)))
        await other.heard(ProgressKind.STARTED)
        attempt = Attempt(connector, leased(picture()))
        await attempt.heard(ProgressKind.ACCEPTED)
        await connector._api.delete(attempt.prompt_id)
        failure = await attempt.failure()
        assert failure.kind is FailureKind.INTERRUPTED
        assert "another client" in failure.message
        await other.result()


async def test_a_cleared_history_does_not_hide_a_success_that_was_heard() -> None:
    async with server_and_connector(tuned(poll_s=5.0)) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=4)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.slow_paths = ["/queue", "/history/"]
        fake.faults.slow_answer_s = 0.3
        await attempt.heard(ProgressKind.OUTPUT)
        async with connector._api.session.post(f"{fake.url}/history", json={"clear": True}) as response:
            assert response.status == 200
        assert (await attempt.result()).files


async def test_a_server_too_old_for_our_ids_is_refused_and_left_clean() -> None:
    async with server_and_connector(version="0.3.40") as (fake, connector):
        failure = await Attempt(connector, leased(slow(steps=60))).failure()
        assert failure.kind is FailureKind.DEAD_WORKER
        assert "0.3.45" in failure.message
        assert await queue_of(fake, connector) == []
