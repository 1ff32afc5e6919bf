"""The pool without an event loop: in scripts, at a prompt, and with handlers that go too far."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.pool._fleet import QUICK_COMFYUI, quick, text_to_image

from comfyfleet import PoolEvent, Refusal, Server, SyncWorkflowPool, WorkflowPool
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.connectors.simulated import SimulatedConnector


def simulated() -> SyncWorkflowPool:
    return SyncWorkflowPool([Server(id="a", connector=SimulatedConnector())])


def pool_threads() -> int:
    return sum(thread.name == "comfyfleet pool" for thread in threading.enumerate())


def wait_until(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def pool() -> Iterator[SyncWorkflowPool]:
    made = simulated()
    yield made
    made.close()


async def test_a_script_without_an_event_loop_can_use_the_pool() -> None:
    async with FakeComfyUI(quick()) as server:

        def script() -> tuple[list[str], int]:
            heard: list[str] = []
            with SyncWorkflowPool([server.url], comfyui=QUICK_COMFYUI) as pool:
                pool.on("job:completed", lambda event: heard.append(event.name))
                job_id = pool.enqueue(text_to_image())
                names = [event.name for event in pool.events(job_id)]
                assert names[-1] == "job:completed"
                result = pool.wait(job_id, timeout=60)
                size = len(pool.fetch(result.files[0]))
                assert pool.stats().completed == 1
            return heard, size

        heard, size = await asyncio.to_thread(script)
        assert heard == ["job:completed"]
        assert size > 100


def test_the_first_call_starts_it_and_close_ends_it() -> None:
    before = pool_threads()
    pool = simulated()
    assert pool_threads() == before
    pool.run(text_to_image())
    assert pool_threads() == before + 1
    pool.close()
    pool.close()
    assert pool_threads() == before
    with pytest.raises(Refusal, match="closed"):
        pool.stats()


def test_a_pool_that_cannot_be_built_or_started_leaves_no_thread() -> None:
    before = pool_threads()
    with pytest.raises(Refusal, match="no store for"):
        SyncWorkflowPool(store="nowhere:")
    with pytest.raises(Refusal, match="needs a host"):
        SyncWorkflowPool(["http://"]).stats()
    assert pool_threads() == before


def test_a_handler_that_calls_the_pool_is_told_that_it_cannot(pool: SyncWorkflowPool) -> None:
    told = threading.Event()
    errors: list[PoolEvent] = []

    def note(event: PoolEvent) -> None:
        errors.append(event)
        told.set()

    pool.on("pool:error", note)
    pool.on("job:completed", lambda event: pool.get_job(event.job_id or ""))
    pool.run(text_to_image())
    assert told.wait(60)
    assert errors[0].error_type == "RuntimeError"
    assert "cannot call it" in errors[0].message
    assert pool.stats().completed == 1


def test_an_async_handler_may_await_the_pool_inside(pool: SyncWorkflowPool) -> None:
    told = threading.Event()
    seen: list[str] = []

    async def look(event: PoolEvent) -> None:
        seen.append((await pool.pool.get_job(event.job_id or "")).status)
        told.set()

    pool.on("job:completed", look)
    pool.run(text_to_image())
    assert told.wait(60)
    assert seen == ["completed"]


def test_whoever_waits_in_another_thread_is_let_go_when_it_closes() -> None:
    pool = SyncWorkflowPool()
    job_id = pool.enqueue(text_to_image())
    names: list[str] = []
    seen = threading.Event()
    refused: list[Exception] = []

    def watch() -> None:
        for event in pool.events(job_id):
            names.append(event.name)
            seen.set()

    def wait() -> None:
        try:
            pool.wait(job_id)
        except Refusal as refusal:
            refused.append(refusal)

    threads = [threading.Thread(target=work, daemon=True) for work in (watch, wait)]
    for thread in threads:
        thread.start()
    assert seen.wait(60)
    wait_until(lambda: bool(pool.pool._waiting._waiting))
    pool.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert names == ["job:queued"]
    assert len(refused) == 1


def test_a_pool_closed_while_its_events_are_iterated_ends_the_iteration() -> None:
    pool = SyncWorkflowPool()
    names = []
    for event in pool.events(pool.enqueue(text_to_image())):
        names.append(event.name)
        pool.close()
    assert names == ["job:queued"]


def test_help_shows_the_same_options_and_words() -> None:
    for name, method in vars(WorkflowPool).items():
        if name.startswith("_"):
            continue
        ours = getattr(SyncWorkflowPool, name)
        assert not inspect.iscoroutinefunction(ours)
        assert inspect.signature(ours).parameters.keys() == inspect.signature(method).parameters.keys(), name
        assert ours.__doc__ or not method.__doc__, name
    assert "preferred_client_ids" in inspect.signature(SyncWorkflowPool.enqueue).parameters
    assert "cooldown" in inspect.signature(SyncWorkflowPool).parameters
