"""Jobs of other services than ComfyUI: read by their format, matched, leased with their seeds, retried."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from tests.engine._rig import Rig, graph, offers

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.encrypted import NAME
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Attachment, Job, JobInput, Submission
from comfyfleet.model.payload import PayloadAmounts, PayloadReading
from comfyfleet.model.payload_digest import job_sha256, lease_sha256, runnable_workflow
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.tenant import Tenant, TenantCaps
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.terms import under_terms
from comfyfleet.worker.connectors.simulated_payload import SimulatedFormat

SIMULATED, OTHER = Requirements(service="simulated"), Requirements(service="other")


def asks(payload: dict[str, Any], needs: Requirements = SIMULATED, **more: Any) -> Submission:
    return Submission(payload, requirements=needs, **more)


async def add_worker(rig: Rig, name: str, service: str, *models: str) -> None:
    offered = Service(service, models=frozenset(models) if models else None)
    await rig.engine.register(RegisterWorker(WorkerId(name), Capabilities((offered,))))


@pytest.fixture
async def rig() -> Any:
    async with Rig() as rig:
        yield rig


async def test_each_job_goes_to_a_worker_of_its_service_with_its_own_payload(rig: Rig) -> None:
    await rig.worker("comfy")
    await add_worker(rig, "sim", "simulated")
    await add_worker(rig, "own", "other")
    payload = {"seconds": 1, "outputs": {"out": {"texts": ["a"]}}}
    made = {
        "comfy": (await rig.engine.submit(Submission(graph()))).job_id,
        "sim": (await rig.engine.submit(asks(payload))).job_id,
        "own": (await rig.engine.submit(asks({"anything": [1, None]}, OTHER))).job_id,
    }
    taken = {name: await rig.take(name) for name in made}
    assert {name: each.job_id for name, each in taken.items()} == made
    assert taken["sim"].workflow == payload and taken["sim"].service == "simulated"
    assert taken["own"].workflow == {"anything": [1, None]}
    assert len({each.workflow_hash for each in taken.values()}) == 3


async def test_a_job_waits_for_a_worker_with_its_models_and_says_what_is_missing(rig: Rig) -> None:
    await add_worker(rig, "small", "simulated", "a")
    submitted = await rig.engine.submit(asks({"models": ["a", "b"]}))
    assert submitted.unworkable == ("small does not have the model 'b'",)
    assert await rig.poll("small") is None
    explained = await rig.engine.explain(submitted.job_id)
    assert [each.reason for each in explained.workers] == ["does not have the model 'b'"]
    await add_worker(rig, "large", "simulated", "a", "b")
    assert (await rig.take("large")).job_id == submitted.job_id


async def test_a_job_of_a_service_that_nobody_offers_is_accepted_and_says_so(rig: Rig) -> None:
    await rig.worker("comfy")
    submitted = await rig.engine.submit(asks({"x": 1}, OTHER))
    assert submitted.phase is Phase.QUEUED
    assert submitted.unworkable == ("comfy does not offer the service 'other'",)


async def test_a_seed_is_drawn_once_and_the_digest_covers_what_is_leased(rig: Rig) -> None:
    await add_worker(rig, "sim", "simulated")
    submitted = await rig.engine.submit(asks({"seed": -1, "outputs": {}}, retry_delay_s=0))
    assert submitted.seeds is not None and 0 <= submitted.seeds["seed"] < 2**32
    first = await rig.take("sim")
    assert first.workflow == {"seed": submitted.seeds["seed"], "outputs": {}}
    await rig.fail(first)
    await add_worker(rig, "another", "simulated")
    again = await rig.take("another")
    assert again.workflow == first.workflow, "a retry makes the same picture"
    kept = await rig.engine.get(submitted.job_id)
    assert kept.job.payload.workflow == {"seed": -1, "outputs": {}}, "a resubmission draws again"


async def test_a_job_that_was_retried_by_hand_has_the_same_needs(rig: Rig) -> None:
    await add_worker(rig, "sim", "simulated", "a")
    job_id = (await rig.engine.submit(asks({"models": ["a"]}))).job_id
    await rig.engine.cancel(job_id)
    await rig.engine.retry(job_id)
    await add_worker(rig, "none", "simulated", "other model")
    assert await rig.poll("none") is None
    assert (await rig.take("sim")).workflow == {"models": ["a"]}


async def test_a_large_payload_is_read_again_for_a_retry(rig: Rig) -> None:
    await add_worker(rig, "sim", "simulated", "a")
    large = {"models": ["a"], "outputs": {"out": {"text": "x" * 100_000}}}
    job_id = (await rig.engine.submit(asks(large))).job_id
    await rig.engine.cancel(job_id)
    await rig.engine.retry(job_id)
    await add_worker(rig, "none", "simulated", "other model")
    assert await rig.poll("none") is None
    assert (await rig.take("sim")).workflow == large


async def test_a_payload_that_the_present_format_refuses_can_still_be_retried() -> None:
    async with Rig() as rig:
        older = Engine(rig.store, clock=rig.clock)
        job_id = (await older.submit(asks({"of": "an older version"}))).job_id
        await rig.engine.cancel(job_id)
        await rig.engine.retry(job_id)
        await add_worker(rig, "sim", "simulated")
        assert (await rig.take("sim")).workflow == {"of": "an older version"}


async def test_a_wrong_payload_is_refused_with_the_field(rig: Rig) -> None:
    with pytest.raises(InvalidWorkflow, match=r"'payload\.seconds'") as refused:
        await rig.engine.submit(asks({"seconds": "long"}))
    assert refused.value.code is RefusalCode.INVALID_WORKFLOW
    with pytest.raises(InvalidWorkflow, match="unknown field `nodes`"):
        await rig.engine.quote(asks({"nodes": [], "links": []}))


async def test_a_repeat_is_recognised_even_if_the_format_changes_what_it_stores() -> None:
    class Completing(SimulatedFormat, frozen=True):
        def read(self, payload: Mapping[str, Any]) -> PayloadReading:
            return super().read({"steps": 9, **payload})

    async with Rig() as rig:
        engine = Engine(rig.store, clock=rig.clock, formats={"simulated": Completing()})
        first = await engine.submit(asks({"seconds": 1}, reference="mine"))
        again = await engine.submit(asks({"seconds": 1}, reference="mine"))
        assert again.is_repeat and again.job_id == first.job_id
        with pytest.raises(Refusal) as refused:
            await engine.submit(asks({"seconds": 2}, reference="mine"))
        assert refused.value.code is RefusalCode.DUPLICATE_DIFFERS
        with pytest.raises(Refusal):
            await engine.submit(asks({"seconds": 1}, OTHER, reference="mine"))


async def test_the_callers_payload_is_copied(rig: Rig) -> None:
    await add_worker(rig, "own", "other")
    mine: dict[str, Any] = {"list": [1]}
    await rig.engine.submit(asks(mine, OTHER))
    mine["list"].append(2)
    assert (await rig.take("own")).workflow == {"list": [1]}


@pytest.mark.parametrize(
    ("place", "is_taken"), [(("inputs", "image"), True), (("inputs", "mask"), False), (("6", "text"), False)]
)
async def test_a_file_goes_only_to_a_place_of_the_payload(
    rig: Rig, place: tuple[str, str], is_taken: bool
) -> None:
    wanted = asks({"inputs": {"image": None}}, inputs=(JobInput(*place, file="f1", sha256="0", size=1),))
    if is_taken:
        await rig.engine.submit(wanted)
        return
    with pytest.raises(Refusal, match=r"takes no file at .*; it takes: inputs\.image") as refused:
        await rig.engine.submit(wanted)
    assert refused.value.details["field"] == "inputs"


async def test_a_payload_that_nobody_reads_takes_files_anywhere(rig: Rig) -> None:
    await rig.engine.submit(asks({}, OTHER, inputs=(JobInput("a", "b", file="f1", sha256="0", size=1),)))


@pytest.mark.parametrize("name", ["", " comfyui", "a\nb", "a\0b", "x" * 257, "\u202ea"])
async def test_a_hostile_name_of_a_service_is_refused(rig: Rig, name: str) -> None:
    with pytest.raises(Refusal, match="is not the name of a service") as refused:
        await rig.engine.submit(asks({}, Requirements(service=name)))
    assert (refused.value.code, refused.value.details["field"]) == (RefusalCode.INVALID_REQUEST, "service")


async def test_a_payload_cannot_pretend_to_be_an_encrypted_one(rig: Rig) -> None:
    with pytest.raises(InvalidWorkflow, match="has the form of an encrypted one"):
        await rig.engine.submit(asks({NAME: {"value": "aGVsbG8="}}, OTHER))


@pytest.mark.parametrize(
    ("models", "told"),
    [(("m" * 5_000,), "5000 characters"), (tuple(map(str, range(101))), "101 models")],
)
async def test_what_a_format_reads_is_bounded(models: tuple[str, ...], told: str) -> None:
    class Endless(SimulatedFormat, frozen=True):
        def read(self, payload: Mapping[str, Any]) -> PayloadReading:
            return msgspec.structs.replace(super().read({}), models=frozenset(models))

    async with Rig() as rig:
        formats = {"simulated": Endless()}
        engine = Engine(rig.store, clock=rig.clock, rules=Rules(max_nodes=100), formats=formats)
        with pytest.raises(InvalidWorkflow, match=told):
            await engine.submit(asks({}))


async def test_the_durations_of_a_service_are_learned_by_its_identity(rig: Rig) -> None:
    await add_worker(rig, "sim", "simulated")
    payload: dict[str, Any] = {"outputs": {"out": {}}}
    for seed in (1, 2, 3, 4, 5):
        await rig.engine.submit(asks({**payload, "seed": seed}))
        await rig.complete(await rig.take("sim"), seconds=20.0)
    quote = await rig.engine.quote(asks({**payload, "seed": 6}))
    assert (quote.runs, quote.run_s.expected) == (5, 20.0)
    assert (await rig.engine.quote(asks({**payload, "steps": 7}))).runs == 0


async def test_a_comfyui_signature_does_not_judge_the_payload_of_another_service(rig: Rig) -> None:
    both = offers("KSampler", signature="s").services[0], Service("other")
    await rig.engine.register(RegisterWorker(WorkerId("both"), Capabilities(both)))
    job_id = (await rig.engine.submit(asks({"9": {"class_type": "Nothing"}}, OTHER))).job_id
    assert (await rig.engine.explain(job_id)).able == (WorkerId("both"),)
    assert (await rig.take("both")).job_id == job_id


# jobs of older versions


def _old_job(service: str, workflow: dict[str, Any], seeds: dict[str, int]) -> Job:
    payload = Submission(workflow, requirements=Requirements(service=service))
    return Job(JobId("1"), TenantId("default"), WorkflowHash("h"), 0.0, payload, seeds=seeds)


def test_a_graph_that_an_older_version_stored_for_a_service_still_gets_its_seeds() -> None:
    job = _old_job("other", graph(seed=-1), {"1": 7})
    ran = runnable_workflow(job)
    assert ran == graph(seed=7)
    assert lease_sha256(job, ran, job_sha256(job)) == job_sha256(job)


# terms

ANN = TenantId("ann")


def _tenant(**terms: Any) -> Tenant:
    return Tenant(ANN, "default", 0.0, **terms)


def _reading(**read: Any) -> PayloadReading:
    return PayloadReading({}, WorkflowHash("h"), **read)


@pytest.mark.parametrize(
    ("terms", "read", "told"),
    [
        ({"models": ("sdxl/*",)}, {"models": frozenset({"sd15"})}, "names the model 'sd15'"),
        ({"denied_models": ("sd15",)}, {"models": frozenset({"a/sd15"})}, "names the model 'a/sd15'"),
        (
            {"models": ("*",)},
            {"unread": ("body.styles",)},
            "the field 'body.styles' of the payload may name others",
        ),
        ({"denied_models": ("x",)}, {"unread": ("a",)}, "the field 'a' of the payload may name others"),
        ({"node_classes": ("Euler",)}, {"node_classes": frozenset({"DDIM"})}, "uses 'DDIM'"),
        ({"denied_node_classes": ("D*",)}, {"node_classes": frozenset({"DDIM"})}, "uses 'DDIM'"),
        ({"caps": TenantCaps(max_steps=5)}, {}, "do not show how many"),
        ({"caps": TenantCaps(max_steps=5)}, {"amounts": PayloadAmounts(steps=6)}, "asks for 6 steps"),
        ({"caps": TenantCaps(max_pixels=5)}, {"amounts": PayloadAmounts(pixels=float("nan"))}, "pixels"),
        ({"caps": TenantCaps(max_batch=5)}, {"amounts": PayloadAmounts(batch=6)}, "6 pictures at once"),
    ],
)
def test_the_terms_of_a_tenant_hold_for_what_the_format_reads(
    terms: dict[str, Any], read: dict[str, Any], told: str
) -> None:
    with pytest.raises(Refusal, match=told):
        under_terms(asks({}, tenant=ANN), _tenant(**terms), _reading(**read))


@pytest.mark.parametrize(
    ("terms", "read"),
    [
        ({"models": ("sd*",), "node_classes": ("E*",)}, {"models": frozenset({"sd15"})}),
        ({"caps": TenantCaps(max_steps=5, max_pixels=5)}, {"amounts": PayloadAmounts(5, 5)}),
        ({"caps": TenantCaps(max_nodes=1)}, {}),
        ({"node_classes": ("script/txt2img/x",)}, {"unread": ("body.script_name",)}),
    ],
)
def test_what_is_within_the_terms_is_accepted(terms: dict[str, Any], read: dict[str, Any]) -> None:
    placed = under_terms(asks({}, tenant=ANN), _tenant(tier=3, **terms), _reading(**read))
    assert placed.tier == 3


class _Terms:
    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant

    async def terms(self, tenant_id: TenantId, /) -> Tenant | None:
        return self.tenant

    def admit(self, tenant: Tenant, /) -> Any:
        return nullcontext()


async def test_a_waiting_job_fails_when_new_terms_forbid_its_model(rig: Rig) -> None:
    rig.engine.set_admission_control(_Terms(_tenant()))
    job_id = (await rig.engine.submit(asks({"models": ["a"]}, tenant=ANN))).job_id
    allowed = (await rig.engine.submit(asks({"models": ["b"]}, tenant=ANN))).job_id
    changed = _tenant(denied_models=("a",))
    for each in (job_id, allowed):
        await rig.engine.waiting_job_review.reapply_terms(each, changed)
    assert [(await rig.engine.get(each)).dispatch.phase for each in (job_id, allowed)] == [
        Phase.FAILED,
        Phase.QUEUED,
    ]
    rig.engine.set_admission_control(_Terms(changed))
    with pytest.raises(Refusal, match="names the model 'a'"):
        await rig.engine.retry(job_id)


async def test_attachments_reach_the_lease(rig: Rig) -> None:
    await add_worker(rig, "own", "other")
    file = Attachment("a.png", b"content", "body", "init_images")
    await rig.engine.submit(asks({}, OTHER, attachments=(file,)))
    assert (await rig.take("own")).attachments == (file,)
