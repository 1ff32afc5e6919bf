"""Jobs that take what earlier ones left: found when those completed, refused or failed where it is not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.engine._rig import Rig, graph, offers
from tests.engine.test_dependencies import engine_on, is_tidy, phase_of, redis_url, store_url

from comfyfleet.engine.dependencies import COLLECTION
from comfyfleet.engine.input_files import COLLECTION as USES
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import JobInput, JobResult, OutputFile, Submission
from comfyfleet.model.requirement import Requirements

__all__ = ["redis_url", "store_url"]

SECOND = graph(image="")


def result(*files: str | None) -> JobResult:
    return JobResult(files=tuple(OutputFile("2", "images", f"{name}.png", file_id=name) for name in files))


def takes(job: str, **more: Any) -> tuple[JobInput, ...]:
    return (JobInput("1", "image", job=JobId(job), **more),)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        await rig.engine.register(
            RegisterWorker(
                WorkerId("a"), msgspec.structs.replace(offers("KSampler"), moves_files=True), slots=3
            )
        )
        yield rig


async def completes(rig: Rig, leased: LeasedJob, *files: str | None) -> None:
    await rig.engine.complete(Completion(leased.ref, result(*files), 1.0))
    await rig.settle()


async def failure_of(rig: Rig, job_id: JobId) -> Any:
    return (await rig.engine.get(job_id)).job.failure


async def test_a_second_stage_gets_what_the_first_left(rig: Rig) -> None:
    first = await rig.submit()
    second = await rig.submit(SECOND, inputs=takes(first, output="2", index=1))
    assert (await rig.engine.get(second)).job.payload.after == (first,), "to name it is to wait for it"
    leased = await rig.take("a")
    assert await rig.poll("a") is None
    await completes(rig, leased, "f_1", "f_2")
    taken = await rig.take("a")
    assert taken.job_id == second
    (file,) = taken.inputs
    assert (file.node, file.input, file.file_id) == ("1", "image", "f_2")
    assert await rig.engine.uses_file("f_2") and not await rig.engine.uses_file("f_1")
    assert await is_tidy(rig)


async def test_no_lease_is_burnt_for_an_output_that_is_not_there(rig: Rig) -> None:
    first, other = await rig.submit(), await rig.submit()
    second = await rig.submit(SECOND, inputs=takes(first, output="*.mp4"), after=(other,))
    third = await rig.submit(after=(second,))
    await completes(rig, await rig.take("a"), "f_1")
    failure = await failure_of(rig, second)
    assert failure.kind is FailureKind.MISSING_INPUT and "f_1.png" in failure.message
    assert (await rig.engine.get(second)).attempts == (), "told at once, though it waited for another too"
    assert (await failure_of(rig, third)).kind is FailureKind.DEPENDENCY_FAILED
    assert await phase_of(rig, other) is Phase.QUEUED


@pytest.mark.parametrize("name", ["", "f\n1", "f" * 600])
async def test_an_id_that_no_hub_would_give_is_not_waited_for(rig: Rig, name: str) -> None:
    second = await rig.submit(SECOND, inputs=takes(await rig.submit()))
    await completes(rig, await rig.take("a"), name)
    failure = await failure_of(rig, second)
    assert failure.kind is FailureKind.MISSING_INPUT and "only on its server" in failure.message


async def test_what_completed_before_is_taken_at_once_or_refused_at_once(rig: Rig) -> None:
    first = await rig.submit()
    await completes(rig, await rig.take("a"), "f_1")
    second = await rig.submit(SECOND, inputs=takes(first))
    assert [file.file_id for file in (await rig.take("a")).inputs] == ["f_1"]
    assert await rig.engine.uses_file("f_1")
    with pytest.raises(Refusal) as refused:
        await rig.submit(SECOND, inputs=takes(first, index=1))
    assert refused.value.code is RefusalCode.INVALID_REQUEST and "no output 1" in refused.value.message
    assert await rig.store.documents.listing(USES, "f_1/") != [] and second


async def test_what_was_found_stays_known_when_the_first_is_kept_no_longer(rig: Rig) -> None:
    first, slow = await rig.submit(), await rig.submit()
    last = await rig.submit(SECOND, inputs=takes(first), after=(slow,))
    leased, running = await rig.take("a"), await rig.take("a")
    await completes(rig, leased, "f_1")
    assert await rig.engine.uses_file("f_1"), "though it is not written with the job yet"
    assert await rig.store.purge(Phase.COMPLETED, 1e12, 10) == 1
    await completes(rig, running)
    taken = await rig.take("a")
    assert taken.job_id == last and taken.inputs[0].file_id == "f_1"


async def test_a_retry_by_hand_looks_again(rig: Rig) -> None:
    first = await rig.submit()
    second = await rig.submit(SECOND, inputs=takes(first))
    await rig.engine.cancel(first)
    await rig.settle()
    await rig.engine.retry(first)
    await rig.engine.retry(second)
    await completes(rig, await rig.take("a"), "f_9")
    assert (await rig.take("a")).inputs[0].file_id == "f_9"


async def test_a_retry_by_hand_does_not_need_again_what_it_has_got(rig: Rig) -> None:
    first = await rig.submit()
    second = await rig.submit(SECOND, inputs=takes(first))
    await completes(rig, await rig.take("a"), "f_1")
    await rig.fail(await rig.take("a"), FailureKind.INVALID_WORKFLOW)
    assert await rig.store.purge(Phase.COMPLETED, 1e12, 10) == 1
    await rig.engine.retry(second)
    taken = await rig.take("a")
    assert taken.job_id == second and taken.inputs[0].file_id == "f_1"


async def test_a_job_is_named_by_its_reference_too_but_only_by_its_own_tenant(rig: Rig) -> None:
    first = await rig.submit(reference="stage one")
    second = await rig.submit(SECOND, inputs=takes("stage one"))
    third = await rig.submit(after=(JobId("stage one"),))
    for job_id in (second, third):
        assert (await rig.engine.get(job_id)).job.payload.after == (first,)
    for theirs in ({"inputs": takes("stage one")}, {"after": (first,)}, {"inputs": takes(first)}):
        with pytest.raises(Refusal) as refused:
            await rig.submit(SECOND, tenant=TenantId("other"), **theirs)
        assert "there is no job" in refused.value.message


async def test_a_repeat_is_the_same_job_also_after_its_file_was_found(rig: Rig) -> None:
    first = await rig.submit(reference="one")
    asked = {"inputs": takes("one"), "reference": "two"}
    second = await rig.submit(SECOND, **asked)
    await completes(rig, await rig.take("a"), "f_1")
    assert await rig.submit(SECOND, **asked) == second
    with pytest.raises(Refusal) as refused:
        await rig.submit(SECOND, inputs=takes(first, index=1), reference="two")
    assert refused.value.code is RefusalCode.DUPLICATE_DIFFERS


async def test_only_workers_that_have_a_hub_are_given_files(rig: Rig) -> None:
    await rig.worker("direct")
    job_id = await rig.submit(SECOND, inputs=(JobInput("1", "image", "f_1"),))
    assert await rig.poll("direct") is None
    told = await rig.engine.explain(job_id)
    assert any(
        miss.worker_id == "direct" and "does not exchange files" in miss.reason for miss in told.workers
    )
    assert (await rig.take("a")).job_id == job_id
    kept = await rig.submit(requirements=Requirements(needs_files=True))
    assert await rig.poll("direct") is None
    assert (await rig.take("a")).job_id == kept


async def test_a_file_is_in_use_until_the_last_job_that_brings_it_has_ended(rig: Rig) -> None:
    brings = (JobInput("1", "image", "f_1"),)
    for _ in range(2):
        await rig.submit(SECOND, inputs=brings)
    first, second = await rig.take("a"), await rig.take("a")
    await rig.complete(first)
    with pytest.raises(Refusal):
        await rig.engine.retry(first.job_id)
    (note,) = await rig.store.documents.listing(USES)
    assert note.name == f"f_1/{second.job_id}", "a file that very many jobs bring is not noted for ever"
    assert await rig.engine.uses_file("f_1")
    await rig.fail(second, FailureKind.INVALID_WORKFLOW)
    assert not await rig.engine.uses_file("f_1")
    assert await rig.store.documents.listing(USES) == []
    await rig.engine.retry(second.job_id)
    assert await rig.engine.uses_file("f_1")
    await rig.engine._inputs.use(["f_2"], JobId("being-written"))
    assert await rig.engine.uses_file("f_2")
    await rig.clock.advance(4000)
    assert not await rig.engine.uses_file("f_2")


async def test_stages_hand_files_on_with_every_store(store_url: str) -> None:
    async with engine_on(store_url) as engine:
        capabilities = msgspec.structs.replace(offers("KSampler"), moves_files=True)
        await engine.register(RegisterWorker(WorkerId("a"), capabilities))
        first = (await engine.submit(Submission(graph()))).job_id
        second = (await engine.submit(Submission(SECOND, inputs=takes(first)))).job_id
        for number, files in enumerate((("f_1",), ())):
            leased = await engine.poll(Poll(WorkerId("a"), PollId(f"poll-{number}"), 10.0))
            assert leased is not None
            await engine.heartbeat(leased.worker_id, [leased.ref])
            if not files:
                assert leased.job_id == second and leased.inputs[0].file_id == "f_1"
                assert await engine.uses_file("f_1")
            await engine.complete(Completion(leased.ref, result(*files)))
        assert not await engine.uses_file("f_1")
        kept = (await engine.get(second)).job.payload.inputs
        assert kept[0].file == "f_1" and kept[0].job == first
        assert await engine.store.documents.listing(COLLECTION) == []
