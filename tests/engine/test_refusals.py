"""A server that refuses a workflow speaks for itself and its equals; only when nobody is left does the job fail."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.model.block import BlockReason
from comfyfleet.model.calls import FailureReport, LeasedJob, Settled
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.failure import Failure, FailureKind


def refusal(kind: str = "value_not_in_list", input_name: str = "sampler_name") -> Failure:
    error = {"type": kind, "message": "no", "details": "", "extra_info": {"input_name": input_name}}
    errors = {"1": {"errors": [error], "dependent_outputs": ["2"], "class_type": "KSampler"}}
    return Failure(FailureKind.INVALID_WORKFLOW, f"{input_name} is refused", node_errors=errors)


async def refuse(rig: Rig, leased: LeasedJob, *error: str) -> Settled:
    return await rig.engine.fail(FailureReport(leased.ref, refusal(*error)))


@pytest.mark.parametrize("signatures", [(None, None), ("old", "new")])
@pytest.mark.parametrize("error", ["value_not_in_list", "required_input_missing", "return_type_mismatch"])
async def test_what_one_server_refuses_is_tried_on_another_and_charged_to_nobody(
    error: str, signatures: tuple[Any, Any]
) -> None:
    async with Rig() as rig:
        await rig.worker("a", signature=signatures[0])
        await rig.worker("b", signature=signatures[1])
        job_id = await rig.submit(max_attempts=1)
        settled = await refuse(rig, await rig.take("a"), error)
        assert settled.will_retry
        assert await rig.poll("a") is None, "the server that refused it does not get it again"
        leased = await rig.take("b")
        assert leased.job_id == job_id
        await rig.complete(leased)
        view = await rig.engine.get(job_id)
        assert view.dispatch.phase is Phase.COMPLETED
        assert (view.dispatch.charged, view.dispatch.worker_faults) == (0, 0)
        assert view.attempts[0].charged_to == "nothing"


async def test_a_workflow_that_every_server_refuses_fails_with_what_the_last_one_said() -> None:
    async with Rig() as rig:
        await rig.worker("a", signature="old")
        await rig.worker("b", signature="new")
        job_id = await rig.submit()
        assert (await refuse(rig, await rig.take("a"), "value_not_in_list", "sampler_name")).will_retry
        settled = await refuse(rig, await rig.take("b"), "required_input_missing", "steps")
        assert settled.phase is Phase.FAILED
        view = await rig.engine.get(job_id)
        assert view.job.failure is not None
        assert view.job.failure.kind is FailureKind.INVALID_WORKFLOW
        assert view.job.failure.message == "steps is refused"
        assert view.job.failure.node_errors is not None
        said = [attempt.failure.message for attempt in view.attempts if attempt.failure]
        assert said == ["sampler_name is refused", "steps is refused"]


async def test_one_refusal_speaks_for_all_servers_with_the_same_signature() -> None:
    async with Rig() as rig:
        for name in "abc":
            await rig.worker(name, signature="one")
        job_id = await rig.submit()
        assert (await refuse(rig, await rig.take("a"))).phase is Phase.FAILED
        assert (await rig.engine.get(job_id)).dispatch.attempts == 1
        assert await rig.engine.blocks() == [], "the next wrong workflow fails as fast"


async def test_a_job_that_a_kind_of_servers_refused_goes_past_all_of_them() -> None:
    async with Rig() as rig:
        for name in "abc":
            await rig.worker(name, signature="old")
        await rig.worker("z", signature="new")
        job_id = await rig.submit()
        assert (await refuse(rig, await rig.take("a"))).will_retry
        assert [await rig.poll(name) for name in "abc"] == [None] * 3
        assert (await rig.take("z")).job_id == job_id


async def test_a_refused_value_leaves_the_workflow_with_other_values_to_the_server() -> None:
    async with Rig() as rig:
        await rig.worker("a", signature="old")
        await rig.worker("b", signature="new")
        refused = await rig.submit(graph(sampler_name="new_one"))
        await refuse(rig, await rig.take("a"), "value_not_in_list")
        accepted = await rig.submit(graph(sampler_name="euler"))
        assert (await rig.take("a")).job_id == accepted
        assert (await rig.take("b")).job_id == refused


async def test_a_structure_that_is_refused_is_refused_for_every_job_of_the_workflow() -> None:
    async with Rig() as rig:
        await rig.worker("a", signature="new")
        await rig.worker("b", signature="old")
        jobs = [await rig.submit(), await rig.submit()]
        await refuse(rig, await rig.take("a"), "required_input_missing")
        assert await rig.poll("a") is None, "the second would only be refused again"
        (block,) = await rig.engine.blocks()
        assert block.reason is BlockReason.REFUSED
        first = await rig.take("b")
        await rig.complete(first)
        assert [first.job_id, (await rig.take("b")).job_id] == jobs


async def test_a_new_inventory_is_a_new_chance() -> None:
    async with Rig() as rig:
        await rig.worker("a", signature="old")
        await rig.worker("b", "Another", signature="other")
        await rig.worker("c", signature="third")
        await rig.engine.pause_worker(await rig.worker("c", signature="third"))
        job_id = await rig.submit()
        assert (await refuse(rig, await rig.take("a"))).will_retry, "a paused server has not refused it"
        assert await rig.poll("a") is None
        await rig.worker("a", signature="updated")
        assert (await rig.take("a")).job_id == job_id


async def test_a_server_that_is_away_is_not_waited_for() -> None:
    async with Rig() as rig:
        await rig.worker("a", signature="old")
        away = await rig.worker("b", signature="new")
        await rig.engine.unregister(away, "stopped")
        await rig.submit()
        assert (await refuse(rig, await rig.take("a"))).phase is Phase.FAILED


async def test_what_a_server_checks_on_its_own_disk_does_not_speak_for_its_equals() -> None:
    async with Rig() as rig:
        await rig.worker("a", signature="one")
        await rig.worker("b", signature="one")
        job_id = await rig.submit()
        assert (await refuse(rig, await rig.take("a"), "custom_validation_failed")).will_retry
        assert await rig.poll("a") is None
        assert (await rig.take("b")).job_id == job_id


async def test_a_graph_that_is_wrong_by_itself_is_tried_nowhere_else() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        await rig.submit()
        assert (await refuse(rig, await rig.take("a"), "dependency_cycle")).phase is Phase.FAILED


async def test_the_caller_reads_why_a_server_does_not_get_the_job() -> None:
    async with Rig() as rig:
        await rig.worker("a", signature="old")
        await rig.engine.pause_worker(await rig.worker("b", signature="new"))
        job_id = await rig.submit()
        await refuse(rig, await rig.take("a"))
        explained = await rig.engine.explain(job_id)
        reasons = {str(missing.worker_id): missing.reason for missing in explained.workers}
        assert "do not accept this workflow" in reasons["a"]
        assert "paused" in reasons["b"]
