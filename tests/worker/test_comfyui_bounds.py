"""A broken or malicious server: whatever it sends, its worker takes a bounded part of it and stops using it."""

from __future__ import annotations

import gzip
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.worker._comfyui import Attempt, eventually, leased, picture, server_and_connector, slow, tuned
from tests.worker._scripted import WORKER, ScriptedApi, leased_job, quick, until

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, FileTooLarge, ServiceFailed
from comfyfleet.model.job import OutputFile
from comfyfleet.model.workflow_graph import MAX_NODES
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.agent import Agent, AgentStatus
from comfyfleet.worker.connectors.comfyui import ComfyUI, prompt_state
from comfyfleet.worker.connectors.comfyui.api import Unreachable
from comfyfleet.worker.connectors.comfyui.listener import Message
from comfyfleet.worker.connectors.comfyui.outputs import MAX_FILES, read_entry
from comfyfleet.worker.connectors.comfyui.prompt_state import is_poison
from comfyfleet.worker.connectors.comfyui.tracker import MAX_NODES_HEARD, RunTracker

MEGABYTE = 1 << 20
SMALL = tuned(max_answer_bytes=MEGABYTE, max_message_bytes=MEGABYTE, max_file_bytes=MEGABYTE, stop_s=0.2)
FILE = OutputFile("2", "images", "out.png", "", "output", "")


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """What is done here never has more than so many bytes in memory at a time."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= size


@pytest.mark.parametrize("path", ["/object_info", "/system_stats", "/models", "/embeddings"])
async def test_lists_that_never_end_are_cut_off_and_the_server_is_not_used(path: str) -> None:
    async with server_and_connector(SMALL) as (fake, connector):
        assert await connector.check_health()
        fake.faults.endless_paths = [path]
        with at_most(12 * MEGABYTE), pytest.raises(ServiceFailed, match=f"GET {path} with more than 1048576"):
            await connector.inventory()
        # What was on its way in the buffers of both sides is all that was sent beyond the bound.
        assert fake.stats.bytes_without_end < 24 * MEGABYTE
        assert not await connector.check_health()
        assert connector.defect == f"it answers GET {path} with more than 1048576 bytes"


async def test_many_lists_that_are_each_within_the_bound_are_not_read_for_ever() -> None:
    folders = {f"folder-{number}": {"m" * 1_000_000 + ".safetensors": 1.0} for number in range(8)}
    async with server_and_connector(SMALL, models=folders) as (_, connector):
        with pytest.raises(ServiceFailed, match="more than 2097152 bytes together"):
            await connector.inventory()
        assert not await connector.check_health()


async def test_an_answer_of_very_many_values_is_not_decoded() -> None:
    settings = tuned(max_answer_bytes=8 * MEGABYTE, max_answer_values=100_000)
    async with server_and_connector(settings) as (fake, connector):
        fake.faults.swollen_paths = ["/object_info"]
        # Decoded, the million lists take 56 MB and more.
        with at_most(30 * MEGABYTE), pytest.raises(ServiceFailed, match="more than 100000 values"):
            await connector.inventory()
        assert not await connector.check_health()


async def test_a_server_is_tried_again_after_a_while() -> None:
    async with server_and_connector(msgspec.structs.replace(SMALL, broken_s=0.3)) as (fake, connector):
        fake.faults.endless_paths = ["/object_info"]
        with pytest.raises(ServiceFailed):
            await connector.inventory()
        assert not await connector.check_health()
        fake.faults.endless_paths = []
        await eventually(connector.check_health)
        await connector.inventory()


async def test_a_run_that_completes_does_not_excuse_what_else_the_server_sends() -> None:
    async with server_and_connector(SMALL) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=10)))
        await attempt.heard(ProgressKind.PROGRESS)
        fake.faults.endless_paths = ["/object_info"]
        with pytest.raises(ServiceFailed):
            await connector.inventory()
        await attempt.result()
        assert not await connector.check_health()


async def test_an_endless_health_check_is_no_health() -> None:
    async with server_and_connector(SMALL) as (fake, connector):
        fake.faults.endless_paths = ["/prompt"]
        with at_most(12 * MEGABYTE):
            assert not await connector.check_health()
        assert connector.defect is not None and "GET /prompt" in connector.defect


async def test_an_endless_queue_ends_the_attempt_and_the_use_of_the_server() -> None:
    async with server_and_connector(SMALL) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=200)))
        await attempt.heard(ProgressKind.PROGRESS)
        fake.faults.endless_paths = ["/queue"]
        failure = await attempt.failure()
        assert failure.kind is FailureKind.DEAD_WORKER
        assert "GET /queue with more than 1048576 bytes" in failure.message
        assert not await connector.check_health()


@pytest.mark.parametrize(
    "graph",
    [
        {str(number): {"class_type": "X"} for number in range(MAX_NODES + 1)},
        {str(number): number for number in range(MAX_NODES + 1)},
    ],
)
def test_a_huge_prompt_of_somebody_else_is_not_looked_through(graph: dict[str, Any]) -> None:
    assert is_poison(dict(list(graph.items())[:MAX_NODES])) is isinstance(graph["0"], dict)
    assert not is_poison(graph), (
        "a server may say that a million nodes run, and it is asked every few seconds"
    )


async def test_a_large_queue_is_looked_through_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[int] = []

    def noted(_: Any) -> bool:
        where.append(threading.get_ident())
        return False

    monkeypatch.setattr(prompt_state, "is_poison", noted)
    monkeypatch.setattr(prompt_state, "LARGE_BODY", 100)
    async with server_and_connector() as (_, connector):
        await connector._api.submit(slow(steps=400), "foreign", "somebody", 5.0)
        attempt = Attempt(connector, leased(picture()))
        await attempt.heard(ProgressKind.ACCEPTED)
        await eventually(lambda: bool(where))
        await connector._api.interrupt("foreign")
        await attempt.result()
    assert threading.get_ident() not in where


def test_more_files_than_anybody_wants_are_not_fetched() -> None:
    def left(count: int) -> Any:
        status = {"status_str": "success"}
        return read_entry({"status": status, "outputs": {"1": {"images": [{"filename": "a"}] * count}}}, "")

    assert len(left(MAX_FILES).files) == MAX_FILES
    assert left(MAX_FILES + 1).kind is FailureKind.NODE_ERROR


async def test_what_a_run_left_may_be_too_much_without_its_server_being_to_blame() -> None:
    """A tenant decides how much text its nodes give: that must not take servers from everybody."""
    async with server_and_connector(SMALL) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=4)))
        await attempt.heard(ProgressKind.PROGRESS)
        fake.faults.endless_paths = ["/history"]
        with at_most(12 * MEGABYTE):
            failure = await attempt.failure()
        assert failure.kind is FailureKind.NODE_ERROR
        assert "more than 1048576 bytes" in failure.message and "save files" in failure.message
        assert await connector.check_health()


async def test_an_endless_history_of_a_prompt_that_was_never_there_is_the_servers_fault() -> None:
    async with server_and_connector(SMALL) as (fake, connector):
        fake.faults.endless_paths = ["/history"]
        failure = await Attempt(connector, leased(picture())).failure()
        assert failure.kind is FailureKind.DEAD_WORKER
        assert fake.stats.prompts_accepted == 0
        assert not await connector.check_health()


async def test_a_frame_of_three_gigabytes_is_not_taken_in() -> None:
    async with FakeComfyUI() as fake:
        fake.faults.huge_frame_bytes = 3 * 1024 * MEGABYTE
        with at_most(12 * MEGABYTE):
            async with ComfyUI(fake.url, SMALL) as connector:
                await eventually(lambda: connector.defect is not None)
                assert connector.defect == "its WebSocket sends messages of more than 1048576 bytes"
                assert not await connector.check_health()


async def test_a_huge_frame_during_a_run_costs_the_news_and_not_the_run() -> None:
    async with server_and_connector(SMALL) as (fake, connector):
        attempt = Attempt(connector, leased(slow(steps=10)))
        await attempt.heard(ProgressKind.PROGRESS)
        fake.faults.huge_frame_bytes = 64 * MEGABYTE
        fake.faults.drop_sockets = True
        assert (await attempt.result()).files


async def test_a_file_that_never_ends_is_cut_off_and_the_server_is_not_used(tmp_path: Path) -> None:
    async with server_and_connector(SMALL) as (fake, connector):
        fake.faults.endless_paths = ["/view"]
        with at_most(12 * MEGABYTE), pytest.raises(FileTooLarge, match="more than 1048576 bytes"):
            await connector.save(FILE, tmp_path / "out.png")
        assert names_in(tmp_path) == []
        assert not await connector.check_health()
        assert connector.defect is not None and connector.defect.startswith("its files do not end")


async def test_a_file_that_says_how_large_it_is_stays_on_its_server_which_is_not_to_blame(
    tmp_path: Path,
) -> None:
    async with server_and_connector(SMALL) as (fake, connector):
        (fake.disk.base / "output" / "out.png").write_bytes(bytes(2 * MEGABYTE))
        with pytest.raises(FileTooLarge):
            await connector.save(FILE, tmp_path / "out.png")
        with pytest.raises(ServiceFailed):
            settings = msgspec.structs.replace(SMALL, max_fetch_bytes=MEGABYTE)
            async with ComfyUI(fake.url, settings) as other:
                await other.fetch(FILE)
        assert await connector.check_health()


async def test_no_file_takes_the_last_of_the_disk(tmp_path: Path) -> None:
    async with server_and_connector(tuned(min_free_bytes=1 << 60)) as (fake, connector):
        (fake.disk.base / "output" / "out.png").write_bytes(b"x")
        with pytest.raises(FileTooLarge, match="which is the limit"):
            await connector.save(FILE, tmp_path / "out.png")
        assert names_in(tmp_path) == []


@asynccontextmanager
async def elsewhere(**answers: web.Response) -> AsyncIterator[tuple[str, list[str]]]:
    """A program at another address, and what it was asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return answers.get(request.path.strip("/"), web.json_response({}))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def test_no_request_and_no_websocket_goes_where_a_server_sends_it(tmp_path: Path) -> None:
    async with elsewhere() as (url, asked), FakeComfyUI() as fake:
        fake.faults.redirect_paths = ["/"]
        fake.faults.redirect_to = url
        async with ComfyUI(fake.url.replace("http://", "http://user:secret@"), SMALL) as connector:
            assert not await connector._listening().wait_connected(0.3)
            assert not await connector.check_health()
            with pytest.raises(ServiceFailed):
                await connector.inventory()
            with pytest.raises(ServiceFailed):
                await connector.save(FILE, tmp_path / "out.png")
            assert (await Attempt(connector, leased(picture())).failure()).kind is FailureKind.DEAD_WORKER
        assert asked == []


async def test_a_packed_answer_is_not_unpacked() -> None:
    bomb = web.Response(body=gzip.compress(bytes(64 * MEGABYTE)), headers={"Content-Encoding": "gzip"})
    async with elsewhere(queue=bomb) as (url, _), ComfyUI(url, SMALL) as connector:
        with at_most(4 * MEGABYTE), pytest.raises(Unreachable, match="compressed"):
            await connector._api.queue()


def test_what_is_heard_of_one_run_is_bounded() -> None:
    tracker = RunTracker({"1": {}}, "http://x", max_output_size=1_000)
    for number in range(MAX_NODES_HEARD + 100):
        tracker.on_message(
            Message("executing", "p", {"node": f"1.{number}", "display_node": f"1.{number}"}), 0.0, 0.0
        )
    assert len(tracker.timings) <= MAX_NODES_HEARD
    output = Message("executed", "p", {"node": "1", "output": {"text": ["x"]}}, size=600)
    assert any(progress.kind is ProgressKind.OUTPUT for progress in tracker.on_message(output, 0.0, 0.0))
    assert not any(progress.kind is ProgressKind.OUTPUT for progress in tracker.on_message(output, 0.0, 0.0))


async def test_an_agent_says_why_such_a_server_is_offline() -> None:
    async with FakeComfyUI() as fake:
        api, connector = ScriptedApi(), ComfyUI(fake.url, SMALL)
        async with Agent(api, WORKER, [connector], quick(health_interval_s=0.1)) as agent:
            await until(lambda: api.parked == 1)
            fake.faults.endless_paths = ["/queue"]
            api.give(msgspec.structs.replace(leased_job("1"), workflow=picture()))
            await until(lambda: agent.state.status is AgentStatus.OFFLINE)
            assert "GET /queue with more than 1048576 bytes" in agent.state.reason
            await until(lambda: bool(api.named("unregister")))
            assert api.named("unregister") == ["it answers GET /queue with more than 1048576 bytes"]
