"""What a tenant may ask for, judged by what the graph says; and what its terms add to what its jobs ask for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.editor_conversion import WorkflowVariant
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.job import Submission
from comfyfleet.model.requirement import Isolation, LocationNeed, Requirements
from comfyfleet.model.tenant import Tenant, TenantCaps, TenantState
from comfyfleet.policy.admission import TokenBucket, take_tokens
from comfyfleet.policy.terms import check_graph, check_state, check_waiting, under_terms, with_terms

ACME = TenantId("acme")
STRICTNESS: tuple[Isolation, ...] = ("none", "loose", "strict")


def tenant(**terms: Any) -> Tenant:
    return Tenant(ACME, "first", 1.0, **{"allows_direct": True, **terms})


def capped(**caps: Any) -> Tenant:
    return tenant(caps=TenantCaps(**caps))


def node(kind: str = "KSampler", **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def loads(model: str) -> dict[str, Any]:
    return {"4": node("CheckpointLoaderSimple", ckpt_name=model)}


def refusal(its: Tenant, graph: dict[str, Any]) -> Refusal | None:
    try:
        check_graph(its, graph)
    except Refusal as refused:
        return refused
    return None


# state


@pytest.mark.parametrize(
    ("state", "code", "says"),
    [
        (TenantState.SUSPENDED, RefusalCode.NOT_ALLOWED, "an operator resumes it"),
        (TenantState.MOVING, RefusalCode.UNAVAILABLE, "try again"),
        (TenantState.LEAVING, RefusalCode.NOT_ALLOWED, "being deleted"),
    ],
)
def test_nothing_new_is_taken_of_a_tenant_that_is_not_active(
    state: TenantState, code: RefusalCode, says: str
) -> None:
    with pytest.raises(Refusal, match=says) as refused:
        under_terms(Submission({"1": node()}), tenant(state=state))
    assert refused.value.code is code


def test_every_state_is_judged() -> None:
    for state in TenantState:
        try:
            check_state(tenant(state=state))
        except Refusal:
            assert state is not TenantState.ACTIVE


# lists


@pytest.mark.parametrize(
    ("terms", "kind", "is_allowed"),
    [
        ({}, "Anything", True),
        ({"node_classes": ("KSampler*", "Save?mage")}, "KSamplerAdvanced", True),
        ({"node_classes": ("KSampler*", "Save?mage")}, "SaveImage", True),
        ({"node_classes": ("KSampler*",)}, "ksampler", False),
        ({"node_classes": ()}, "KSampler", False),
        ({"denied_node_classes": ("Exec*",)}, "ExecuteShell", False),
        ({"denied_node_classes": ("Exec*",)}, "KSampler", True),
        ({"node_classes": ("*",), "denied_node_classes": ("KSampler",)}, "KSampler", False),
    ],
)
def test_node_classes_are_listed_as_patterns(terms: dict[str, Any], kind: str, is_allowed: bool) -> None:
    found = refusal(tenant(**terms), {"17": node(kind)})
    assert (found is None) is is_allowed
    if found is not None:
        assert found.code is RefusalCode.NOT_ALLOWED
        assert f"node 17 ({kind})" in found.message and found.details["node"] == "17"


@pytest.mark.parametrize(
    ("terms", "model", "is_allowed"),
    [
        ({"models": ("sdxl/*",)}, "sdxl/base.safetensors", True),
        ({"models": ("sdxl/*",)}, "sdxl\\base.safetensors", True),
        ({"models": ("sdxl\\*",)}, "sdxl/base.safetensors", True),
        ({"models": ("sdxl/*",)}, "base.safetensors", False),
        ({"models": ("base.safetensors",)}, "private/base.safetensors", False),
        ({"models": ()}, "base.safetensors", False),
        ({"denied_models": ("secret.*",)}, "secret.safetensors", False),
        ({"denied_models": ("secret.*",)}, "some/folder/secret.safetensors", False),
        ({"denied_models": ("secret.*",)}, "open.safetensors", True),
        ({"models": ("*",), "denied_models": ("sdxl/*",)}, "sdxl/base.safetensors", False),
    ],
)
def test_models_are_listed_as_patterns_of_their_paths(
    terms: dict[str, Any], model: str, is_allowed: bool
) -> None:
    found = refusal(tenant(**terms), loads(model))
    assert (found is None) is is_allowed
    if found is not None:
        assert found.code is RefusalCode.NOT_ALLOWED
        assert "node 4" in found.message and model.replace("\\", "/") in found.message


def test_a_graph_without_models_needs_none_to_be_allowed() -> None:
    assert refusal(tenant(models=()), {"1": node()}) is None


# amounts


@pytest.mark.parametrize(
    ("caps", "graph", "code"),
    [
        ({"max_nodes": 1}, {"1": node(), "2": node()}, RefusalCode.TOO_LARGE),
        ({"max_nodes": 2}, {"1": node(), "2": node()}, None),
        ({"max_steps": 30}, {"1": node(steps=30)}, None),
        ({"max_steps": 30}, {"1": node(steps=31)}, RefusalCode.TOO_LARGE),
        ({"max_steps": 30}, {"1": node(steps=30.5)}, RefusalCode.TOO_LARGE),
        ({"max_steps": 30}, {"1": node(steps="31")}, RefusalCode.TOO_LARGE),
        ({"max_steps": 30}, {"1": node(steps=" 1_000 ")}, RefusalCode.TOO_LARGE),
        ({"max_steps": 30}, {"1": node(steps="nan")}, RefusalCode.TOO_LARGE),
        ({"max_steps": 30}, {"1": node(steps="9" * 400)}, RefusalCode.TOO_LARGE),
        ({"max_steps": 30}, {"1": node(steps="many")}, RefusalCode.NOT_ALLOWED),
        ({"max_steps": 30}, {"1": node(steps={"__value__": 1000})}, RefusalCode.NOT_ALLOWED),
        ({"max_steps": 30}, {"1": node(steps=[31])}, RefusalCode.NOT_ALLOWED),
        ({"max_steps": 0}, {"1": node(cfg=7)}, None),
        ({"max_pixels": 1_000_000}, {"1": node(width=1000, height=1000)}, None),
        ({"max_pixels": 1_000_000}, {"1": node(width=1001, height=1000)}, RefusalCode.TOO_LARGE),
        ({"max_pixels": 1_000_000}, {"1": node(width=2000, height=0)}, RefusalCode.TOO_LARGE),
        ({"max_pixels": 1_000_000}, {"1": node(width=-2000, height=2000)}, RefusalCode.TOO_LARGE),
        ({"max_pixels": 1_000_000}, {"1": node(width=5000)}, None),
        ({"max_pixels": 1_000_000}, {"1": node("ImageScaleToTotalPixels", megapixels=0.9)}, None),
        (
            {"max_pixels": 1_000_000},
            {"1": node("ImageScaleToTotalPixels", megapixels=1)},
            RefusalCode.TOO_LARGE,
        ),
        ({"max_batch": 4}, {"1": node("EmptyLatentImage", batch_size=4)}, None),
        ({"max_batch": 4}, {"1": node("EmptyLatentImage", batch_size=5)}, RefusalCode.TOO_LARGE),
        ({"max_batch": 4}, {"1": node("RepeatLatentBatch", amount=64)}, RefusalCode.TOO_LARGE),
        ({"max_batch": 4}, {"1": node("PayPal", amount=64)}, None),
    ],
)
def test_a_graph_asks_for_no_more_than_the_caps(
    caps: dict[str, int], graph: dict[str, Any], code: RefusalCode | None
) -> None:
    found = refusal(capped(**caps), graph)
    assert (found and found.code) is code
    if code is RefusalCode.TOO_LARGE and found is not None:
        assert str(*caps.values()) in found.message


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (node("PrimitiveInt", value=30), None),
        (node("PrimitiveInt", value=30, control_after_generate="fixed"), None),
        (node("INTConstant", value="30"), None),
        (node("PrimitiveInt", value=31), RefusalCode.TOO_LARGE),
        (node("PrimitiveInt", value=["3", 0]), RefusalCode.NOT_ALLOWED),
        (node("Multiply", value=30), RefusalCode.NOT_ALLOWED),
        (node("PrimitiveInt", a=10, b=10), RefusalCode.NOT_ALLOWED),
    ],
)
def test_what_comes_over_a_wire_is_told_only_where_a_node_just_holds_it(
    source: dict[str, Any], code: RefusalCode | None
) -> None:
    graph = {"1": node(steps=["2", 0]), "2": source, "3": node("PrimitiveInt", value=1)}
    found = refusal(capped(max_steps=30), graph)
    assert (found and found.code) is code
    if code is RefusalCode.NOT_ALLOWED and found is not None:
        assert "set it to a number" in found.message


@pytest.mark.parametrize(("waiting", "is_taken"), [(0, True), (4, True), (5, False), (6, False)])
def test_the_queue_of_a_tenant_has_a_length(waiting: int, is_taken: bool) -> None:
    check_waiting(tenant(), waiting)
    if is_taken:
        check_waiting(capped(max_waiting=5), waiting)
        return
    with pytest.raises(Refusal, match="may have 5") as refused:
        check_waiting(capped(max_waiting=5), waiting)
    assert refused.value.code is RefusalCode.QUEUE_FULL


# what its terms add


@pytest.mark.parametrize("asked", STRICTNESS)
@pytest.mark.parametrize("least", STRICTNESS)
def test_a_job_may_ask_for_more_isolation_and_never_for_less(asked: Isolation, least: Isolation) -> None:
    submission = Submission({"1": node()}, requirements=Requirements(isolation=asked))
    placed = with_terms(submission, tenant(isolation=least)).requirements.isolation
    assert STRICTNESS.index(placed) == max(STRICTNESS.index(asked), STRICTNESS.index(least))


def test_where_jobs_run_is_what_they_ask_for_and_what_their_tenant_must() -> None:
    its = tenant(location=LocationNeed("eu", ("gdpr",)))
    asked = LocationNeed("EU", ("HIPAA", "GDPR"))
    placed = with_terms(Submission({}, requirements=Requirements(location=asked)), its)
    assert placed.requirements.location == LocationNeed("EU", ("gdpr", "HIPAA"))
    assert with_terms(Submission({}), its).requirements.location == LocationNeed("eu", ("gdpr",))
    elsewhere = Submission({}, requirements=Requirements(location=LocationNeed("us")))
    with pytest.raises(Refusal, match=r"'eu' only.*'us'") as refused:
        under_terms(elsewhere, its)
    assert refused.value.code is RefusalCode.NOT_ALLOWED
    assert with_terms(elsewhere, its).requirements.location.region == "us and eu", "for nobody"
    assert with_terms(elsewhere, tenant()).requirements.location == LocationNeed("us")


def test_jobs_whose_payload_may_not_lie_in_the_store_are_for_workers_of_a_hub() -> None:
    assert with_terms(Submission({}), tenant(allows_direct=False)).requirements.needs_hub
    assert not with_terms(Submission({}), tenant()).requirements.needs_hub
    own = Submission({}, requirements=Requirements(needs_hub=True))
    assert with_terms(own, tenant()).requirements.needs_hub


def test_the_tier_is_added_and_nothing_else_is_changed() -> None:
    submission = Submission({"1": node()}, tenant=ACME, priority=3, reference="mine", tier=1)
    placed = with_terms(submission, tenant(tier=10))
    assert placed.tier == 11
    assert (placed.priority, placed.reference, placed.workflow) == (3, "mine", submission.workflow)
    assert with_terms(submission, tenant()) == submission


# turns


def test_a_minutes_turns_come_at_once_after_a_quiet_minute_and_then_evenly() -> None:
    bucket, turns, wait_s = take_tokens(None, 6, 100, 0.0)
    assert (turns, wait_s) == (6, 0.0)
    _, turns, wait_s = take_tokens(bucket, 6, 1, 4.0)
    assert turns == 0 and wait_s == pytest.approx(6.0)
    assert take_tokens(bucket, 6, 1, 10.0).tokens == 1
    assert take_tokens(bucket, 6, 100, 1e6).tokens == 6, "no more are saved up than a minute brings"
    assert take_tokens(TokenBucket(3.0, 50.0), 6, 9, 10.0) == (TokenBucket(0.0, 50.0), 3, 0.0), (
        "a clock that went back"
    )
    assert take_tokens(None, 0, 1, 0.0)[1:] == (0, 60.0)


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20)), max_size=40),
)
def test_nobody_gets_more_turns_than_time_brings(per_minute: int, asks: list[tuple[float, int]]) -> None:
    bucket, now, had = None, 0.0, 0
    for pause_s, wanted in asks:
        now += pause_s
        bucket, turns, wait_s = take_tokens(bucket, per_minute, wanted, now)
        had += turns
        assert 0 <= turns <= wanted
        assert had <= per_minute + now * per_minute / 60 + 1e-6
        if not turns:
            assert take_tokens(bucket, per_minute, 1, now + wait_s + 1e-6).tokens == 1, "as was said"


def test_every_graph_that_a_workflow_of_the_editor_may_run_as_is_judged() -> None:
    small, large = node("EmptyImage", width=64, height=64), node("EmptyImage", width=640, height=640)
    submission = Submission({"1": small}, tenant=ACME, variants=(WorkflowVariant(("new",), {"1": large}),))
    with pytest.raises(Refusal) as refused:
        under_terms(submission, capped(max_pixels=64 * 64))
    assert refused.value.code is RefusalCode.TOO_LARGE
