"""A server that refuses a workflow speaks for itself and its equals; only when nobody is left does the job fail."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine._rig import Rig, graph, offers
from tests.engine.test_several_engines import Engines, register, take

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.node_catalogs import SHARED_COLLECTION
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.block import BlockReason
from comfyfleet.model.calls import FailureReport, LeasedJob, Poll, RegisterWorker, ReportReply
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.node_classes import NodeCatalog, read_catalog
from comfyfleet.policy.acceptance import Differences, Graph
from comfyfleet.stores.sqlite.store import SqliteStore


def refusal(kind: str = "value_not_in_list", input_name: str = "sampler_name") -> Failure:
    error = {"type": kind, "message": "no", "details": "", "extra_info": {"input_name": input_name}}
    errors = {"1": {"errors": [error], "dependent_outputs": ["2"], "class_type": "KSampler"}}
    return Failure(FailureKind.INVALID_WORKFLOW, f"{input_name} is refused", node_errors=errors)


async def refuse(rig: Rig, leased: LeasedJob, *error: str) -> ReportReply:
    """For want of an input, unless said: such a refusal speaks for all equal servers."""
    failure = refusal(*(error or ("required_input_missing", "steps")))
    return await rig.engine.fail(FailureReport(leased.ref, failure))


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


async def test_a_job_waits_for_the_only_server_that_may_accept_it_while_that_drains() -> None:
    """It may be let back. So it is where the catalogs said before that the other one would refuse it."""
    async with Rig() as rig:
        await rig.worker("a", signature="old")
        await rig.worker("b", signature="new")
        await rig.engine.drain_worker(WorkerId("b"))
        job_id = await rig.submit()
        assert (await refuse(rig, await rig.take("a"))).will_retry
        assert await rig.poll("a") is None
        assert (await rig.engine.get(job_id)).dispatch.phase is Phase.QUEUED
        await rig.engine.resume_worker(WorkerId("b"))
        assert (await rig.take("b")).job_id == job_id


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


async def test_a_fake_that_is_held_back_is_not_waited_for() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        pretends = msgspec.structs.replace(offers("KSampler"), is_fake=True)
        await rig.engine.register(RegisterWorker(WorkerId("fake"), pretends, 1))
        await rig.submit()
        assert (await refuse(rig, await rig.take("a"))).phase is Phase.FAILED


async def test_three_equal_servers_that_refuse_for_reasons_of_their_own_speak_for_the_fourth() -> None:
    async with Rig() as rig:
        for name in "abcd":
            await rig.worker(name, signature="one")
        job_id = await rig.submit()
        for name in "ab":
            assert (await refuse(rig, await rig.take(name), "custom_validation_failed")).will_retry
        assert (await refuse(rig, await rig.take("c"), "custom_validation_failed")).phase is Phase.FAILED
        assert (await rig.engine.get(job_id)).dispatch.attempts == 3


async def test_a_choice_of_a_custom_class_is_refused_by_one_machine_alone() -> None:
    async with Rig() as rig:
        custom = read_catalog(
            {
                "KSampler": {
                    "input": {"required": {"sampler_name": [["a style of this machine"]]}},
                    "output": ["IMAGE"],
                    "python_module": "custom_nodes.styles",
                }
            }
        )
        for name in "ab":
            await rig.engine.describe(await rig.worker(name, signature=custom.signature()), custom)
        job_id = await rig.submit(graph(sampler_name="a style of the other"))
        assert (await refuse(rig, await rig.take("a"), "value_not_in_list")).will_retry
        assert await rig.poll("a") is None
        assert (await rig.take("b")).job_id == job_id


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


SAMPLERS = {"old": ("euler",), "new": ("euler", "newer"), "newest": ("newer",)}


def nodes(version: str) -> NodeCatalog:
    """What servers of a release accept: each release has samplers of its own."""
    return read_catalog(
        {
            "KSampler": {
                "input": {"required": {"sampler_name": [list(SAMPLERS[version])]}},
                "output": ["IMAGE"],
                "python_module": "nodes",
            },
            "SaveImage": {
                "input": {"required": {"images": ["IMAGE"], "filename_prefix": ["STRING"]}},
                "output": [],
                "output_node": True,
                "python_module": "nodes",
            },
        }
    )


async def described(rig: Rig, name: str, version: str) -> WorkerId:
    worker_id = await rig.worker(name, signature=nodes(version).signature())
    await rig.engine.describe(worker_id, nodes(version))
    return worker_id


async def test_a_server_that_would_refuse_a_job_is_never_offered_it() -> None:
    async with Rig() as rig:
        await described(rig, "a", "old")
        await described(rig, "b", "new")
        newer = [await rig.submit(graph(sampler_name="newer")) for _ in range(3)]
        common = await rig.submit(graph(sampler_name="euler"))
        assert (await rig.take("a")).job_id == common
        assert await rig.poll("a") is None
        for job_id in newer:
            leased = await rig.take("b")
            assert leased.job_id == job_id
            await rig.complete(leased)


async def test_few_nodes_with_many_inputs_are_compared_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = set()

    def refusing(self: Differences, graph: Graph) -> frozenset[str]:
        threads.add(threading.current_thread())
        return known(self, graph)

    known = Differences.refusing
    monkeypatch.setattr(Differences, "refusing", refusing)
    async with Rig() as rig:
        await described(rig, "a", "old")
        await described(rig, "b", "new")
        wide = graph(sampler_name="newer")
        wide["1"]["inputs"] |= {f"input{number}": 1 for number in range(2000)}
        await rig.submit(wide)
    assert threads and threading.main_thread() not in threads


async def test_what_every_live_server_would_refuse_is_refused_by_them_and_does_not_wait() -> None:
    async with Rig() as rig:
        await described(rig, "a", "old")
        await described(rig, "b", "new")
        job_id = await rig.submit(graph(sampler_name="nobodys"), require_workable=True)
        assert (await refuse(rig, await rig.take("a"))).will_retry
        assert (await refuse(rig, await rig.take("b"))).phase is Phase.FAILED
        assert (await rig.engine.get(job_id)).dispatch.attempts == 2


async def test_the_only_server_that_accepts_is_waited_for_and_not_the_others_tried() -> None:
    async with Rig() as rig:
        await described(rig, "a", "old")
        busy = await described(rig, "b", "new")
        await rig.engine.pause_worker(busy)
        job_id = await rig.submit(graph(sampler_name="newer"))
        assert await rig.poll("a") is None
        await rig.engine.pause_worker(busy, False)
        assert (await rig.take("b")).job_id == job_id


async def test_servers_that_differ_in_what_nobody_uses_share_a_profile() -> None:
    async with Rig() as rig:
        workers = [await described(rig, name, version) for name, version in zip("ab", SAMPLERS, strict=False)]
        await rig.submit(graph(sampler_name="euler"))
        known = [rig.engine.known_worker(worker_id) for worker_id in workers]
        assert len({worker.profile for worker in known if worker}) == 1
        await rig.submit(graph(sampler_name="newer"))
        known = [rig.engine.known_worker(worker_id) for worker_id in workers]
        assert len({worker.profile for worker in known if worker}) == 2


async def test_a_job_tried_again_by_hand_is_placed_by_who_is_there_now() -> None:
    async with Rig() as rig:
        await described(rig, "a", "old")
        job_id = await rig.submit(graph(sampler_name="newer"))
        assert (await refuse(rig, await rig.take("a"))).phase is Phase.FAILED
        await described(rig, "b", "new")
        await rig.engine.retry(job_id)
        assert await rig.poll("a") is None
        assert (await rig.take("b")).job_id == job_id


async def test_equal_nodes_are_kept_once_and_go_with_their_last_worker() -> None:
    async with Rig() as rig:
        workers = [await described(rig, name, "old") for name in "ab"]
        kept = await rig.store.documents.listing(SHARED_COLLECTION)
        assert len(kept) == 1
        await rig.engine.remove_worker(workers[0])
        assert await rig.store.documents.listing(SHARED_COLLECTION) == kept
        await rig.engine.remove_worker(workers[1])
        assert await rig.store.documents.listing(SHARED_COLLECTION) == []


async def test_nodes_that_a_server_no_longer_has_are_kept_for_nobody() -> None:
    """A server whose nodes read otherwise at each look leaves nothing behind."""
    async with Rig() as rig:
        await described(rig, "a", "old")
        await described(rig, "b", "old")
        await described(rig, "a", "new")
        assert len(await rig.store.documents.listing(SHARED_COLLECTION)) == 2, (
            "the other one has the old nodes still"
        )
        await described(rig, "b", "new")
        assert len(await rig.store.documents.listing(SHARED_COLLECTION)) == 1
        await described(rig, "a", "old")
        await described(rig, "b", "old")
        assert len(await rig.store.documents.listing(SHARED_COLLECTION)) == 1


async def test_no_worker_says_what_anothers_nodes_are() -> None:
    async with Rig() as rig:
        await described(rig, "a", "old")
        liar = await rig.worker("b", signature=nodes("new").signature())
        with pytest.raises(Refusal, match="the worker declared"):
            await rig.engine.describe(liar, nodes("newest"))
        assert len(await rig.store.documents.listing(SHARED_COLLECTION)) == 1


async def test_what_nodes_accept_is_known_after_a_restart_without_being_told_again(tmp_path: Path) -> None:
    def engine() -> Engine:
        return Engine(SqliteStore(tmp_path / "fleet.db", SystemClock()))

    workers = {WorkerId("a"): nodes("old"), WorkerId("b"): nodes("new")}
    calls = [
        RegisterWorker(name, offers("KSampler", signature=each.signature())) for name, each in workers.items()
    ]
    async with engine() as first:
        for call in calls:
            record = await first.register(call)
            assert await first.knows_nodes(record) is False
            await first.describe(call.worker_id, workers[call.worker_id])
            assert await first.knows_nodes(record) is True
    async with engine() as second:
        for call in calls:
            assert await second.knows_nodes(await second.register(call)) is True
        submitted = await second.submit(Submission(graph(sampler_name="newer")))
        assert await second.poll(Poll(WorkerId("a"), PollId("1"), 0)) is None
        leased = await second.poll(Poll(WorkerId("b"), PollId("2"), 0))
        assert leased is not None and leased.job_id == submitted.job_id


async def test_an_engine_uses_what_workers_told_another_one() -> None:
    async with Engines() as it:
        for name, version in (("a", "old"), ("b", "new")):
            await register(it.second, name, "KSampler", signature=nodes(version).signature())
            await it.second.describe(WorkerId(name), nodes(version))
        await it.first.workers()
        job_id = (await it.first.submit(Submission(graph(sampler_name="newer")))).job_id
        assert await take(it.second, "a", "1") is None
        assert await take(it.second, "b", "2") == job_id
        explained = await it.first.explain(
            (await it.first.submit(Submission(graph(sampler_name="newer")))).job_id
        )
        reasons = {str(each.worker_id): each.reason for each in explained.workers}
        assert "its KSampler (node 1) does not list 'newer' for 'sampler_name'" in reasons["a"]


async def test_nodes_that_were_forgotten_are_asked_for_again_by_an_engine_that_remembers_them() -> None:
    """A worker is removed at one hub and comes back at the other, which still has what it told at hand."""
    async with Engines() as it:
        told = nodes("old")
        await register(it.first, "a", "KSampler", signature=told.signature())
        await it.first.describe(WorkerId("a"), told)
        (worker,) = await it.second.workers()
        assert await it.second.knows_nodes(worker) is True
        await it.first.remove_worker(WorkerId("a"))
        await register(it.second, "a", "KSampler", signature=told.signature())
        (worker,) = await it.second.workers()
        assert await it.second.knows_nodes(worker) is False
        await it.second.describe(WorkerId("a"), told)
        assert len(await it.store.documents.listing(SHARED_COLLECTION)) == 1
