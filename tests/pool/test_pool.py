"""What the pool promises its users, on fake servers."""

from __future__ import annotations

import asyncio
import io
from datetime import timedelta
from typing import Any

import pytest
from PIL import Image
from tests.pool._fleet import (
    QUICK_COMFYUI,
    QUICK_RULES,
    Told,
    eventually,
    fleet,
    invert,
    quick,
    text_to_image,
)

from comfyfleet import (
    Affinity,
    JobCancelled,
    JobFailed,
    PoolEvent,
    Refusal,
    Server,
    SmartFailover,
    WorkflowPool,
    attach,
    hash_workflow,
)
from comfyfleet.model.block import Block
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import WorkerId, WorkflowHash
from comfyfleet.policy.rules import Rules
from comfyfleet.testing.fake_comfyui import FakeComfyUI


def picture(colour: tuple[int, int, int] = (200, 10, 10)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (16, 16), colour).save(out, "PNG")
    return out.getvalue()


async def test_a_job_tells_its_whole_story_in_order() -> None:
    async with fleet() as it:
        job_id = await it.pool.enqueue(text_to_image(), metadata={"tenant": "a"})
        await it.pool.wait(job_id, timeout=60)
        await it.told.until("job:completed", job_id)
        names = it.told.names(job_id)
        milestones = [name for name in names if name not in ("job:progress", "job:preview", "job:output")]
        assert milestones == ["job:queued", "job:accepted", "job:started", "job:completed"]
        assert {"job:progress", "job:preview", "job:output"} < set(names)
        events = [event for event in it.told.events if event.job_id == job_id]
        assert all(event.metadata == {"tenant": "a"} for event in events)
        assert all(event.workflow_hash == hash_workflow(text_to_image()) for event in events)
        preview = it.told.of("job:preview", job_id)[0]
        assert preview.image is not None
        assert Image.open(io.BytesIO(preview.image)).size > (0, 0)
        done = it.told.of("job:completed", job_id)[0]
        assert done.result is not None
        assert done.result.files[0].filename == "cat_00001_.png"


async def test_the_record_says_where_when_and_how_long() -> None:
    async with fleet() as it:
        job_id = await it.pool.enqueue(text_to_image(), job_id="mine", priority=7)
        assert job_id == "mine"
        await it.pool.wait("mine", timeout=timedelta(seconds=60))
        record = await it.pool.get_job("mine")
        assert record.status == "completed"
        assert (record.priority, record.attempts, record.client_id) == (7, 1, it.id_of(0))
        assert record.prompt_id in it.servers[0].stats.prompts_run
        assert record.started_at is not None
        assert record.completed_at is not None
        assert record.queued_at <= record.started_at <= record.completed_at
        timed = {timing.node_id: timing.seconds for timing in record.node_timings}
        assert timed.keys() >= {"3", "4", "8", "9"}
        assert timed["3"] > 0
        assert list(record.seeds) == ["3"]
        assert record.seeds["3"] >= 0


async def test_the_output_can_be_fetched_and_is_a_picture() -> None:
    async with fleet() as it:
        result = await it.pool.run(text_to_image(), timeout=60)
        image = Image.open(io.BytesIO(await it.pool.fetch(result.files[0])))
        assert image.format == "PNG"


async def test_only_the_included_outputs_are_returned() -> None:
    async with fleet() as it:
        graph = text_to_image()
        graph["10"] = {"class_type": "PreviewImage", "inputs": {"images": ["8", 0]}}
        result = await it.pool.run(graph, include_outputs=["10"])
        assert list(result.outputs) == ["10"]
        assert {file.node_id for file in result.files} == {"10"}


async def test_an_attachment_is_uploaded_and_wired_in() -> None:
    async with fleet() as it:
        result = await it.pool.run(invert("placeholder.png"), attachments=[attach(picture(), "1", "image")])
        image = Image.open(io.BytesIO(await it.pool.fetch(result.files[0]))).convert("RGB")
        assert it.servers[0].stats.uploads == 1
        assert image.size > (0, 0)


async def test_higher_priorities_go_first_and_equal_ones_in_order() -> None:
    async with fleet() as it:
        await it.pool.pause_queue()
        jobs = [await it.pool.enqueue(text_to_image(), priority=priority) for priority in (0, -5, 10, 0, 10)]
        await it.pool.resume_queue()
        for job in jobs:
            await it.pool.wait(job, timeout=60)
        started = [event.job_id for event in it.told.of("job:started")]
        assert started == [jobs[2], jobs[4], jobs[0], jobs[3], jobs[1]]


async def test_the_priority_of_a_waiting_job_can_be_changed() -> None:
    async with fleet() as it:
        await it.pool.pause_queue()
        first = await it.pool.enqueue(text_to_image())
        second = await it.pool.enqueue(text_to_image())
        await it.pool.set_priority(second, 5)
        await it.pool.resume_queue()
        await it.pool.wait(first, timeout=60)
        assert [event.job_id for event in it.told.of("job:started")] == [second, first]
        with pytest.raises(Refusal, match="only a waiting one"):
            await it.pool.set_priority(second, 9)


async def test_an_affinity_restricts_and_a_jobs_own_choice_wins() -> None:
    async with fleet(quick(), quick()) as it:
        graph = text_to_image()
        it.pool.set_affinity(Affinity(hash_workflow(graph), preferred_client_ids=[it.id_of(1)]))
        bound = [await it.pool.enqueue(graph) for _ in range(4)]
        free = await it.pool.enqueue(graph, preferred_client_ids=[it.id_of(0)])
        for job in (*bound, free):
            await it.pool.wait(job, timeout=60)
        assert {(await it.pool.get_job(job)).client_id for job in bound} == {it.id_of(1)}
        assert (await it.pool.get_job(free)).client_id == it.id_of(0)
        it.pool.remove_affinity(hash_workflow(graph))
        anywhere = [await it.pool.enqueue(graph, excluded_client_ids=[it.id_of(1)]) for _ in range(2)]
        for job in anywhere:
            await it.pool.wait(job, timeout=60)
        assert {(await it.pool.get_job(job)).client_id for job in anywhere} == {it.id_of(0)}


async def test_seed_001s_example_keeps_both_servers_busy_in_both_orders() -> None:
    # A runs X only; B runs X and Y. X may run on both, so a greedy first fit would leave A idle.
    only_x = ("EmptyImage", "ImageInvert", "SaveImage")
    job_x: dict[str, Any] = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 1}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    job_y = text_to_image()
    for order in ((job_y, job_x), (job_x, job_y)):
        async with fleet(quick(node_classes=only_x), quick()) as it:
            for server in it.servers:
                server.faults.never_start = True
            await it.pool.pause_queue()
            for graph in order:
                await it.pool.enqueue(graph)
            await it.pool.resume_queue()
            await it.told.until("job:accepted", count=2)
            assert [server.stats.prompts_accepted for server in it.servers] == [1, 1]


async def test_jobs_for_different_servers_run_side_by_side_and_slots_are_kept() -> None:
    async with fleet(quick(), quick(), slots=2) as it:
        for server in it.servers:
            server.faults.never_start = True
        for _ in range(6):
            await it.pool.enqueue(text_to_image())
        await it.told.until("job:accepted", count=4)
        stats = await it.pool.stats()
        assert (stats.running, stats.queued) == (4, 2)
        assert [server.running for server in stats.servers] == [2, 2]


async def test_a_server_added_while_running_takes_waiting_work_and_a_removed_one_gets_none() -> None:
    async with fleet() as it, FakeComfyUI(quick()) as late:
        only_there = await it.pool.enqueue(text_to_image(), excluded_client_ids=[it.id_of(0)])
        assert await it.pool.add_server(Server(late.url, id="late")) == "late"
        await it.pool.wait(only_there, timeout=60)
        with pytest.raises(Refusal, match="already"):
            await it.pool.add_server(Server(late.url, id="late"))
        await it.pool.remove_server("late")
        again = [await it.pool.enqueue(text_to_image()) for _ in range(3)]
        for job in again:
            await it.pool.wait(job, timeout=60)
        assert sum(late.stats.prompts_run.values()) == 1
        with pytest.raises(Refusal, match="no server 'late'"):
            await it.pool.remove_server("late")


async def test_events_can_be_filtered_by_metadata_and_ended() -> None:
    async with fleet() as it:
        heard: list[PoolEvent] = []
        leave = it.pool.on("job:completed", heard.append, where={"tenant": "b"})
        for tenant in ("a", "b", "b"):
            await it.pool.run(text_to_image(), metadata={"tenant": tenant})
        await it.told.until("job:completed", count=3)
        assert [event.metadata["tenant"] for event in heard] == ["b", "b"]
        leave()
        await it.pool.run(text_to_image(), metadata={"tenant": "b"})
        await it.told.until("job:completed", count=4)
        assert len(heard) == 2


async def test_an_unknown_event_name_is_refused_with_the_list() -> None:
    pool = WorkflowPool()
    with pytest.raises(ValueError, match="job:completed"):
        pool.on("job:complete", print)  # type: ignore[arg-type]


async def test_a_handler_that_fails_harms_nobody_and_is_told_of() -> None:
    async with fleet() as it:

        async def broken(_: PoolEvent) -> None:
            raise ZeroDivisionError("oops")

        it.pool.on("job:queued", broken)
        await it.pool.run(text_to_image())
        error = await it.told.until("pool:error")
        assert (error.error_type, "oops" in error.message) == ("ZeroDivisionError", True)


async def test_the_events_of_one_job_can_be_iterated_from_its_start_to_its_end() -> None:
    async with fleet() as it:
        job_id = await it.pool.enqueue(text_to_image())
        await it.told.until("job:started", job_id)
        names = [event.name async for event in it.pool.events(job_id)]
        assert names[0] == "job:queued"
        assert names[-1] == "job:completed"
        assert names.count("job:completed") == 1


async def test_a_workflow_of_the_editor_with_nodes_that_no_server_has_is_refused_with_advice() -> None:
    async with fleet() as it:
        with pytest.raises(Refusal, match=r"none has Nobodys.*Export \(API\)"):
            await it.pool.enqueue({"nodes": [{"id": 1, "type": "Nobodys"}], "links": []})


async def test_a_job_nobody_can_run_waits_and_says_why() -> None:
    async with fleet() as it:
        graph = text_to_image("nobody-has-this.safetensors")
        job_id = await it.pool.enqueue(graph)
        why = await it.pool.explain(job_id)
        assert why.able == ()
        assert "nobody-has-this.safetensors" in why.summary
        with pytest.raises(Refusal, match=r"nobody-has-this\.safetensors"):
            await it.pool.enqueue(graph, require_workable=True)
        it.servers[0].faults.added_models = {"checkpoints": {"nobody-has-this.safetensors": 2.0}}
        await it.pool.refresh()
        await it.pool.wait(job_id, timeout=60)


async def test_the_same_job_id_with_another_workflow_is_refused() -> None:
    async with fleet() as it:
        await it.pool.enqueue(text_to_image(), job_id="one")
        assert await it.pool.enqueue(text_to_image(), job_id="one") == "one"
        with pytest.raises(Refusal, match="choose a different one"):
            await it.pool.enqueue(invert(), job_id="one")
        await it.pool.wait("one", timeout=60)
        assert sum(it.starts()) == 1


async def test_a_graph_may_be_changed_for_the_next_job_while_the_last_one_waits() -> None:
    async with fleet() as it:
        await it.pool.pause_queue()
        graph = text_to_image()
        jobs = []
        for seed in (1, 2, 3):
            graph["3"]["inputs"]["seed"] = seed
            jobs.append(await it.pool.enqueue(graph))
        await it.pool.resume_queue()
        for job in jobs:
            await it.pool.wait(job, timeout=60)
        assert it.servers[0].stats.nodes_by_class["KSampler"] == 3, (
            "equal seeds would be taken from the cache"
        )


async def test_waiting_has_its_own_timeout_and_the_job_another() -> None:
    async with fleet() as it:
        it.servers[0].faults.never_start = True
        job_id = await it.pool.enqueue(text_to_image(), timeout=0.3)
        await it.told.until("job:accepted", job_id)
        with pytest.raises(TimeoutError, match=f"job {job_id} has not ended after 0.01 s, it is running: "):
            await it.pool.wait(job_id, timeout=0.01)
        record = await it.pool.wait_for_record(job_id, timeout=60)
        assert record.status == "failed"
        assert record.last_error is not None
        assert record.last_error.kind == "total_timeout"


async def test_a_failover_strategy_of_ones_own_decides() -> None:
    class NeverTheFirst(SmartFailover):
        def __init__(self) -> None:
            super().__init__(Rules())
            self.failures: list[tuple[str, str]] = []
            self.avoid = ""

        def should_skip(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> bool:
            return worker_id == self.avoid

        def record_failure(
            self,
            worker_id: WorkerId,
            workflow_hash: WorkflowHash,
            failure: Failure,
            previous: Block | None,
            now: float,
        ) -> Block | None:
            self.failures.append((worker_id, failure.kind))
            return None

    strategy = NeverTheFirst()
    async with fleet(quick(), quick(), failover=strategy) as it:
        strategy.avoid = it.id_of(0)
        for _ in range(3):
            await it.pool.run(text_to_image())
        assert it.starts() == [0, 3]


async def test_a_server_that_is_down_does_not_fail_the_start() -> None:
    async with FakeComfyUI(quick()) as server:
        address = server.url
    pool = WorkflowPool([address], comfyui=QUICK_COMFYUI, rules=QUICK_RULES)
    told = Told(pool)
    async with pool:
        ready = await told.until("pool:ready")
        assert ready.message == "0 of 1 server(s) online"
        job_id = await pool.enqueue(text_to_image())
        assert "is offline: connection refused" in (await pool.explain(job_id)).summary


async def test_a_closed_pool_refuses_and_closing_twice_is_harmless() -> None:
    async with fleet() as it:
        job_id = await it.pool.enqueue(text_to_image())
        await it.pool.wait(job_id, timeout=60)
        await it.pool.close()
        await it.pool.close()
        for use in (
            lambda: it.pool.enqueue(text_to_image()),
            lambda: it.pool.add_server("http://127.0.0.1:9"),
            lambda: it.pool.get_job(job_id),
            lambda: it.pool.wait(job_id),
        ):
            with pytest.raises(Refusal, match="the pool is closed"):
                await use()


async def test_closing_stops_what_runs_on_the_servers() -> None:
    async with fleet() as it:
        it.servers[0].faults.stall = "KSampler"
        job_id = await it.pool.enqueue(text_to_image())
        await it.told.until("job:started", job_id)
        waiting = asyncio.create_task(it.pool.wait(job_id))
        await asyncio.sleep(0)
        closing = asyncio.create_task(it.pool.close())
        await asyncio.sleep(0)
        it.servers[0].faults.stall = None
        await closing
        with pytest.raises((Refusal, JobCancelled)):
            await waiting
        await eventually(lambda: all(run.ended_at for run in it.servers[0].stats.prompt_log))


async def test_jobs_that_are_lost_with_the_pool_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with WorkflowPool() as pool:
        for _ in range(2):
            await pool.enqueue(text_to_image())
    assert "2 job(s) were still waiting or running and are lost with the memory store" in caplog.text
    caplog.clear()
    async with fleet() as it:
        await it.pool.run(text_to_image())
    assert "memory store" not in caplog.text


async def test_a_job_that_never_got_an_attempt_says_so() -> None:
    async with WorkflowPool() as pool:
        with pytest.raises(JobFailed, match="failed and no attempt was made: total_timeout"):
            await pool.run(text_to_image(), timeout=0.05)


async def test_a_stuck_server_is_noticed_without_any_setting() -> None:
    async with WorkflowPool() as pool, WorkflowPool(node_execution_timeout=None) as patient:
        assert pool._engine.rules.start_timeout_s == pool._engine.rules.stall_timeout_s == 600
        assert patient._engine.rules.stall_timeout_s is None


async def test_draining_lets_what_runs_finish() -> None:
    async with fleet() as it:
        job_id = await it.pool.enqueue(text_to_image(steps=30))
        waiting = await it.pool.enqueue(text_to_image())
        await it.told.until("job:started", job_id)
        await it.pool.drain()
        assert (await it.pool.get_job(job_id)).status == "completed"
        assert (await it.pool.get_job(waiting)).status == "queued"


async def test_a_full_queue_refuses_and_takes_again_when_there_is_room() -> None:
    async with fleet(rules=Rules(max_waiting=2)) as it:
        await it.pool.pause_queue()
        jobs = [await it.pool.enqueue(text_to_image()) for _ in range(2)]
        with pytest.raises(Refusal, match="the queue is full: 2 jobs wait"):
            await it.pool.enqueue(text_to_image())
        await it.pool.cancel(jobs[0])
        await it.pool.enqueue(text_to_image())
