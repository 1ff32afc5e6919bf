"""A pool in front of servers that fail in every way they can: the job moves on, and moves on once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.pool._fleet import eventually, fleet, quick, text_to_image

from comfyfleet import JobFailed, hash_workflow
from comfyfleet.model.errors import Refusal
from comfyfleet.testing.fake_comfyui import NodeFault

SAMPLER_FAILS = NodeFault(class_type="KSampler", times=-1, message="the card is unwell")


async def test_a_failing_server_is_left_for_another_and_the_pair_is_blocked() -> None:
    async with fleet(quick(speed=100), quick()) as it:
        it.servers[0].faults.fail_nodes = [SAMPLER_FAILS]
        job_id = await it.pool.enqueue(
            text_to_image(), preferred_client_ids=[it.id_of(0)], affinity_mode="prefer"
        )
        await it.pool.wait(job_id, timeout=60)
        record = await it.pool.get_job(job_id)
        assert record.client_id == it.id_of(1)
        assert record.attempts == 2
        assert record.last_error is None
        failed = it.told.of("job:failed", job_id)
        assert [event.will_retry for event in failed] == [True]
        assert failed[0].failure is not None
        assert "the card is unwell" in failed[0].failure.message
        blocked = it.told.of("client:blocked_workflow")
        assert [(event.client_id, event.workflow_hash) for event in blocked] == [
            (it.id_of(0), hash_workflow(text_to_image()))
        ]


async def test_a_threshold_of_three_blocks_on_the_third_failure_and_not_before() -> None:
    async with fleet(max_failures_before_block=3, max_attempts=9, cooldown=60) as it:
        it.servers[0].faults.fail_nodes = [SAMPLER_FAILS]
        job_id = await it.pool.enqueue(text_to_image())
        for count in (1, 2):
            await it.told.until("job:failed", job_id, count=count)
            # Reading the state must not reset what is counted.
            assert [(block.failures, block.blocked_until) for block in await it.pool.blocks()] == [
                (count, None)
            ]
            assert it.told.of("client:blocked_workflow") == []
        event = await it.told.until("client:blocked_workflow")
        assert event.failures == 3
        assert len(it.told.of("job:failed", job_id)) == 3


async def test_a_job_blocked_on_the_only_server_runs_by_itself_when_the_cooldown_ends() -> None:
    async with fleet(cooldown=0.5) as it:
        it.servers[0].faults.fail_nodes = [NodeFault(class_type="KSampler", times=1)]
        job_id = await it.pool.enqueue(text_to_image())
        blocked = await it.told.until("client:blocked_workflow")
        await it.pool.wait(job_id, timeout=60)
        unblocked = await it.told.until("client:unblocked_workflow")
        assert (unblocked.client_id, unblocked.workflow_hash) == (blocked.client_id, blocked.workflow_hash)
        assert blocked.blocked_until is not None
        second = it.told.of("job:started", job_id)[-1]
        assert second.at >= blocked.blocked_until
        assert await it.pool.blocks() == []


async def test_a_block_can_be_lifted_by_hand() -> None:
    async with fleet(cooldown=600) as it:
        it.servers[0].faults.fail_nodes = [NodeFault(class_type="KSampler", times=1)]
        job_id = await it.pool.enqueue(text_to_image())
        await it.told.until("client:blocked_workflow")
        assert await it.pool.unblock(it.id_of(0), hash_workflow(text_to_image()))
        await it.pool.wait(job_id, timeout=60)
        assert not await it.pool.unblock(it.id_of(0), hash_workflow(text_to_image()))


async def test_a_prompt_accepted_and_never_started_moves_on_at_the_start_timeout() -> None:
    async with fleet(quick(), quick(), execution_start_timeout=0.4) as it:
        it.servers[0].faults.never_start = True
        job_id = await it.pool.enqueue(
            text_to_image(), preferred_client_ids=[it.id_of(0)], affinity_mode="prefer"
        )
        await it.pool.wait(job_id, timeout=60)
        failed = it.told.of("job:failed", job_id)[0]
        assert failed.failure is not None
        assert failed.failure.kind == "start_timeout"
        assert (await it.pool.get_job(job_id)).client_id == it.id_of(1)
        it.servers[0].faults.never_start = False
        await eventually(lambda: it.starts()[1] == 1)
        assert it.starts()[0] == 0, "the prompt that never started was taken back"


async def test_a_node_that_stalls_moves_on_at_the_stall_timeout() -> None:
    async with fleet(quick(), quick(), node_execution_timeout=0.4) as it:
        it.servers[0].faults.stall = "KSampler"
        job_id = await it.pool.enqueue(
            text_to_image(), preferred_client_ids=[it.id_of(0)], affinity_mode="prefer"
        )
        await it.pool.wait(job_id, timeout=60)
        failed = it.told.of("job:failed", job_id)[0]
        assert failed.failure is not None
        assert failed.failure.kind == "stall_timeout"
        assert (await it.pool.get_job(job_id)).client_id == it.id_of(1)


async def test_no_job_is_left_waiting_behind_a_prompt_that_does_not_stop() -> None:
    async with fleet(quick(), quick(), node_execution_timeout=0.4, cooldown=0.1) as it:
        it.servers[0].faults.stall = "KSampler"
        jobs = [await it.pool.enqueue(text_to_image(text=f"cat {number}")) for number in range(8)]
        for job in jobs:
            await it.pool.wait(job, timeout=60)
        stuck = (await it.pool.stats()).servers[0]
        assert (stuck.state, stuck.completed) == ("offline", 0)
        it.servers[0].faults.stall = None
        only_there = await it.pool.enqueue(text_to_image(), preferred_client_ids=[it.id_of(0)])
        await it.pool.wait(only_there, timeout=60)


async def test_a_server_that_reconnects_takes_waiting_work_after_its_grace_without_any_new_job() -> None:
    async with fleet(reconnection_grace=0.3) as it:
        await it.servers[0].crash()
        await it.told.until("client:state")
        while (await it.pool.stats()).servers[0].state != "offline":
            await it.told.until("client:state", count=len(it.told.of("client:state")) + 1)
        job_id = await it.pool.enqueue(text_to_image())
        await it.servers[0].restart()
        await it.pool.wait(job_id, timeout=60)
        states = [(event.state, event.at) for event in it.told.of("client:state")]
        names = [state for state, _ in states]
        assert names[names.index("offline") :] == ["offline", "reconnecting", "online"]
        back_at, online_at = states[-2][1], states[-1][1]
        assert online_at - back_at >= 0.3
        assert (await it.pool.stats()).servers[0].disconnects == 1


async def test_a_server_that_dies_mid_run_loses_its_job_to_another() -> None:
    async with fleet(quick(), quick()) as it:
        it.servers[0].faults.crash_after_nodes = 4
        job_id = await it.pool.enqueue(
            text_to_image(), preferred_client_ids=[it.id_of(0)], affinity_mode="prefer"
        )
        await it.pool.wait(job_id, timeout=60)
        assert (await it.pool.get_job(job_id)).client_id == it.id_of(1)
        assert it.starts() == [1, 1]


async def test_a_dead_worker_thread_is_noticed_although_http_answers() -> None:
    async with fleet(quick(), quick()) as it:
        it.servers[0].faults.dead_worker = True
        job_id = await it.pool.enqueue(
            text_to_image(), preferred_client_ids=[it.id_of(0)], affinity_mode="prefer"
        )
        await it.pool.wait(job_id, timeout=60)
        failed = it.told.of("job:failed", job_id)[0]
        assert failed.failure is not None
        assert failed.failure.kind == "dead_worker"


async def test_a_lost_socket_does_not_run_a_job_twice() -> None:
    async with fleet(quick(), quick()) as it:
        for server in it.servers:
            server.faults.drop_sockets_after_nodes = 3
        job_id = await it.pool.enqueue(text_to_image(steps=20))
        await it.pool.wait(job_id, timeout=60)
        record = await it.pool.get_job(job_id)
        assert record.attempts == 1
        assert sum(it.starts()) == 1


async def test_a_job_that_finished_while_nobody_listened_is_recovered_from_history() -> None:
    async with fleet(quick(), quick()) as it:
        for server in it.servers:
            server.faults.deaf_sockets = True
        job_id = await it.pool.enqueue(text_to_image())
        result = await it.pool.wait(job_id, timeout=60)
        assert [file.filename for file in result.files] == ["cat_00001_.png"]
        assert sum(it.starts()) == 1


async def test_a_submit_whose_answer_was_lost_runs_once() -> None:
    async with fleet(quick(), quick()) as it:
        for server in it.servers:
            server.faults.lose_submit_answers = 1
        job_id = await it.pool.enqueue(text_to_image())
        await it.pool.wait(job_id, timeout=60)
        assert sum(it.starts()) == 1
        assert (await it.pool.get_job(job_id)).attempts == 1


async def test_a_missing_model_blocks_the_pair_until_the_model_appears() -> None:
    async with fleet(cooldown=0.1) as it:
        # The pool's inventory is older than the loss: the server is asked and cannot.
        it.servers[0].faults.missing_models = ["sd15.safetensors"]
        job_id = await it.pool.enqueue(text_to_image(), max_attempts=1)
        failed = await it.told.until("job:failed", job_id)
        assert failed.failure is not None
        assert failed.failure.kind == "missing_model"
        assert failed.will_retry
        why = await it.pool.explain(job_id)
        assert any("sd15.safetensors" in reason for miss in why.workers for reason in miss.reasons)
        it.servers[0].faults.missing_models = []
        await it.pool.refresh()
        await it.pool.wait(job_id, timeout=60)


async def test_out_of_memory_goes_to_a_bigger_card_and_is_remembered() -> None:
    small, big = quick(vram_gb=8.0, speed=10.0), quick(vram_gb=48.0)
    async with fleet(small, big, cooldown=0.2) as it:
        big_model = text_to_image("flux-dev-fp8.safetensors")
        only_small: dict[str, Any] = {"preferred_client_ids": [it.id_of(0)], "affinity_mode": "prefer"}
        job_id = await it.pool.enqueue(big_model, **only_small)
        await it.pool.wait(job_id, timeout=60)
        assert [event.failure.kind for event in it.told.of("job:failed") if event.failure] == [
            "out_of_memory"
        ]
        assert (await it.pool.get_job(job_id)).client_id == it.id_of(1)
        await it.told.until("client:unblocked_workflow")
        second = await it.pool.enqueue(big_model, **only_small)
        await it.pool.wait(second, timeout=60)
        record = await it.pool.get_job(second)
        assert (record.client_id, record.attempts) == (it.id_of(1), 1)


async def test_a_job_that_fails_everywhere_ends_with_every_attempts_error() -> None:
    async with fleet(quick(), quick(), cooldown=0.1) as it:
        for server in it.servers:
            server.faults.fail_nodes = [SAMPLER_FAILS]
        job_id = await it.pool.enqueue(text_to_image(), max_attempts=3)
        with pytest.raises(JobFailed, match="the card is unwell") as caught:
            await it.pool.wait(job_id, timeout=60)
        record = caught.value.record
        assert [attempt.outcome for attempt in record.history] == ["failed"] * 3
        assert all(attempt.failure and attempt.failure.traceback for attempt in record.history)
        assert {attempt.worker_id for attempt in record.history} == {it.id_of(0), it.id_of(1)}
        assert [event.will_retry for event in it.told.of("job:failed", job_id)] == [True, True, False]


async def test_an_invalid_workflow_fails_at_once_and_blocks_nobody() -> None:
    async with fleet() as it:
        wrong = text_to_image()
        wrong["3"]["inputs"]["sampler_name"] = "no such sampler"
        job_id = await it.pool.enqueue(wrong)
        with pytest.raises(JobFailed, match="sampler_name"):
            await it.pool.wait(job_id, timeout=60)
        record = await it.pool.get_job(job_id)
        assert record.attempts == 1
        assert record.last_error is not None
        assert record.last_error.kind == "invalid_workflow"
        assert await it.pool.blocks() == []


async def test_server_errors_are_retried_where_they_pass() -> None:
    async with fleet(cooldown=0.05) as it:
        it.servers[0].faults.fail_request_paths = ["/prompt"]
        it.servers[0].faults.fail_requests = 1
        job_id = await it.pool.enqueue(text_to_image())
        await it.pool.wait(job_id, timeout=60)
        assert sum(it.starts()) == 1


async def test_jobs_go_on_while_a_server_dies_and_comes_back() -> None:
    async with fleet(quick(), quick(), quick(), cooldown=0.1) as it:
        jobs = [await it.pool.enqueue(text_to_image(text=f"cat {number}")) for number in range(12)]
        await it.told.until("job:completed", count=2)
        await it.servers[1].crash()
        await it.told.until("job:completed", count=6)
        await it.servers[1].restart()
        await asyncio.gather(*(it.pool.wait(job, timeout=60) for job in jobs))
        stats = await it.pool.stats()
        assert (stats.completed, stats.failed, stats.queued, stats.running) == (12, 0, 0, 0)


async def test_a_workflow_that_two_servers_died_of_kills_no_third_and_is_refused_until_it_is_lifted() -> None:
    async with fleet(quick(), quick(), quick()) as it:
        for server in it.servers:
            server.faults.crash_after_nodes = 4
        job_id = await it.pool.enqueue(text_to_image())
        with pytest.raises(
            JobFailed, match=r"crashed: .*servers died while they ran this workflow, so it is refused until"
        ):
            await it.pool.wait(job_id, timeout=60)
        (spared,) = [server for server in it.servers if not sum(server.stats.prompts_run.values())]
        workflow_hash = hash_workflow(text_to_image())
        with pytest.raises(Refusal, match=rf'pool\.unblock\("\*", "{workflow_hash}"\)'):
            await it.pool.enqueue(text_to_image(text="another prompt, the same graph"))
        spared.faults.crash_after_nodes = None
        assert await it.pool.unblock("*", workflow_hash)
        await it.pool.wait(await it.pool.enqueue(text_to_image()), timeout=60)
        assert sum(spared.stats.prompts_run.values()) == 1
