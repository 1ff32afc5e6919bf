"""Jobs that came before any server told what its nodes are, looked at once more when one does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.engine.placement import narrowed
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.node_classes import InputSignature, NodeCatalog, NodeSignature
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.model.workflow import read_needs

NODES = NodeCatalog(
    {},
    {
        "KSampler": NodeSignature({}, ("IMAGE",)),
        "SaveImage": NodeSignature({"images": InputSignature("IMAGE")}, is_output=True),
        "Loader": NodeSignature({"ckpt_name": InputSignature("COMBO")}, ("MODEL",)),
    },
)


def with_a_loader_left_over() -> dict[str, Any]:
    return {**graph(), "9": {"class_type": "Loader", "inputs": {"ckpt_name": "left-over.safetensors"}}}


async def needs(rig: Rig, job_id: JobId) -> Requirements:
    return rig.engine._context.fleet.classes[(await rig.engine.get(job_id)).dispatch.class_key].requirements


async def test_what_no_server_would_run_is_needed_no_more_once_one_has_told_of_its_nodes() -> None:
    async with Rig() as rig:
        early = await rig.submit(with_a_loader_left_over())
        declared = Requirements(models=("left-over.safetensors",))
        asked_for = await rig.submit(with_a_loader_left_over(), requirements=declared)
        await rig.worker("a", "KSampler", "Loader", signature=NODES.signature())
        parked = rig.park("a")
        await rig.settle()
        assert not parked.done()
        await rig.engine.describe(WorkerId("a"), NODES)
        leased = await parked
        assert leased is not None and leased.job_id == early
        assert (await needs(rig, asked_for)).models == ("left-over.safetensors",), "its caller said so"


async def test_a_job_whose_graph_lies_elsewhere_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In its tenant's database, which an engine without a hub does not reach."""
    async with Rig() as rig:
        job_id = await rig.submit(with_a_loader_left_over())
        before, get = await needs(rig, job_id), rig.store.records.get

        async def stub(asked: JobId) -> Job | None:
            job = await get(asked)
            return job and msgspec.structs.replace(job, payload=Submission({}))

        monkeypatch.setattr(rig.store.records, "get", stub)
        await rig.worker("a", "KSampler", "Loader", signature=NODES.signature())
        await rig.engine.describe(WorkerId("a"), NODES)
        await rig.settle()
        assert await rig.poll("a") is None and await needs(rig, job_id) == before
        assert caplog.records == [], "it is nothing to complain of"


def test_nothing_is_added_to_what_a_job_needs() -> None:
    """Whoever placed it may have known more of the nodes."""
    submission = Submission(with_a_loader_left_over())
    placed = RequirementClass(Requirements(node_classes=("KSampler", "SaveImage"), needs_hub=True))
    assert narrowed(placed, submission, read_needs(submission.workflow)) == placed
