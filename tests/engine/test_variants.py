"""A workflow of the editor on servers of several releases: each runs its own graph of it, and it is one workflow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.engine._rig import Rig
from tests.policy._editor import Editor

from comfyfleet.model.calls import FailureReport, LeasedJob, Release
from comfyfleet.model.dispatch import AtRevision, Change, Phase, Write
from comfyfleet.model.errors import Refusal
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import Attachment, Submission
from comfyfleet.model.node_classes import NodeCatalog, read_catalog
from comfyfleet.model.payload_digest import leased_sha256
from comfyfleet.model.workflow_hash import hash_workflow

SPEC: dict[str, dict[str, Any]] = {
    "old": {"seed": ["INT", {"default": 0}], "name": ["STRING", {"default": "x"}]},
    "new": {
        "seed": ["INT", {"default": 0}],
        "steps": ["INT", {"default": 20}],
        "name": ["STRING", {"default": "x"}],
    },
    "strict": {
        "seed": ["INT", {"default": 0}],
        "name": ["STRING", {"default": "x"}],
        "mask": ["MASK", {}],
    },
    **{f"v{number}": {f"input{number}": ["INT", {"default": number}]} for number in range(6)},
}


def catalog(version: str) -> NodeCatalog:
    return read_catalog(
        {
            "Painter": {
                "input": {"required": SPEC[version]},
                "output": ["IMAGE"],
                "python_module": "nodes",
            },
            "SaveImage": {
                "input": {"required": {"images": ["IMAGE"], "filename_prefix": ["STRING", {}]}},
                "output": [],
                "output_node": True,
                "python_module": "nodes",
            },
        }
    )


def workflow(*values: Any) -> dict[str, Any]:
    editor = Editor()
    painter, saver = editor.node("Painter", list(values)), editor.node("SaveImage", ["picture"])
    editor.wire(painter, 0, saver, "images", "IMAGE")
    return editor.saved()


async def worker(rig: Rig, name: str, version: str) -> WorkerId:
    nodes = catalog(version)
    worker_id = await rig.worker(name, "Painter", signature=nodes.signature())
    await rig.engine.describe(worker_id, nodes)
    return worker_id


def painted(leased: LeasedJob) -> dict[str, Any]:
    inputs: dict[str, Any] = leased.workflow["1"]["inputs"]
    return inputs


def is_what_it_says(leased: LeasedJob) -> bool:
    return leased_sha256(leased).hex() == leased.payload_sha256


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
async def test_a_lease_carries_the_graph_of_the_release_that_runs_it(order: tuple[str, str]) -> None:
    async with Rig() as rig:
        old, new = order
        await worker(rig, old, "old")
        await worker(rig, new, "new")
        for _ in range(2):
            await rig.submit(workflow(7, "mine"))
        on_old, on_new = await rig.take(old), await rig.take(new)
        assert painted(on_old) == {"seed": 7, "name": "mine"}
        assert painted(on_new) == {"seed": 7, "steps": "mine", "name": "x"}
        assert is_what_it_says(on_old) and is_what_it_says(on_new)
        assert on_old.workflow_hash == on_new.workflow_hash


async def test_the_hash_is_the_same_whoever_comes_first_and_that_of_the_graph_where_there_is_one() -> None:
    hashes = set()
    for versions in (("old", "new"), ("new", "old"), ("new", "new", "old")):
        async with Rig() as rig:
            for number, version in enumerate(versions):
                await worker(rig, f"w{number}", version)
            hashes.add((await rig.engine.submit(Submission(workflow(7, 4, "mine")))).workflow_hash)
    assert len(hashes) == 1
    async with Rig() as rig:
        await worker(rig, "a", "old")
        submitted = await rig.engine.submit(Submission(workflow(7, "mine")))
        assert submitted.workflow_hash == hash_workflow((await rig.take("a")).workflow)
        assert submitted.workflow_hash in hashes, "what both releases have is what the older one has"


async def test_seeds_are_drawn_once_for_every_graph() -> None:
    async with Rig() as rig:
        await worker(rig, "a", "old")
        await worker(rig, "b", "new")
        submitted = await rig.engine.submit(Submission(workflow(-1, 4, "mine")))
        assert submitted.seeds is not None
        leased = await rig.take("a")
        assert painted(leased)["seed"] == submitted.seeds["1"] != -1
        await rig.fail(leased, FailureKind.TRANSIENT)
        await rig.clock.advance(1)
        again = await rig.take("b")
        assert painted(again)["seed"] == submitted.seeds["1"]
        assert is_what_it_says(leased) and is_what_it_says(again)


async def test_a_release_that_refuses_its_own_graph_is_passed() -> None:
    async with Rig() as rig:
        await worker(rig, "a", "strict")
        await worker(rig, "b", "old")
        job_id = await rig.submit(workflow(7, "mine"), max_attempts=1)
        assert await rig.poll("a") is None, "its mask is not wired"
        assert (await rig.take("b")).job_id == job_id


async def test_a_refusal_of_one_graph_does_not_keep_the_workflow_off_the_server() -> None:
    async with Rig() as rig:
        await worker(rig, "a", "old")
        await worker(rig, "b", "new")
        first, second = [await rig.submit(workflow(7, "mine")) for _ in range(2)]
        error = {"type": "required_input_missing", "message": "", "details": "", "extra_info": {}}
        errors = {"1": {"errors": [error], "dependent_outputs": ["2"], "class_type": "Painter"}}
        leased = await rig.take("a")
        assert leased.job_id == first
        refusal = Failure(FailureKind.INVALID_WORKFLOW, "no", node_errors=errors)
        assert (await rig.engine.fail(FailureReport(leased.ref, refusal))).phase is Phase.QUEUED
        assert (await rig.take("a")).job_id == second
        assert (await rig.take("b")).job_id == first


async def test_no_more_than_four_graphs_are_made() -> None:
    async with Rig() as rig:
        for number in range(6):
            await worker(rig, f"w{number}", f"v{number}")
        job_id = await rig.submit(workflow(7))
        payload = (await rig.engine.get(job_id)).job.payload
        assert len(payload.variants) == 3


async def test_equal_releases_make_one_graph_and_nothing_more_is_kept() -> None:
    async with Rig() as rig:
        for name in "ab":
            await worker(rig, name, "old")
        job_id = await rig.submit(workflow(7, "mine"))
        assert (await rig.engine.get(job_id)).job.payload.variants == ()


async def test_the_same_workflow_again_is_the_same_job() -> None:
    async with Rig() as rig:
        await worker(rig, "a", "old")
        await worker(rig, "b", "new")
        first = await rig.submit(workflow(7, "mine"), reference="mine")
        assert await rig.submit(workflow(7, "mine"), reference="mine") == first
        with pytest.raises(Refusal, match="another job already has the reference"):
            await rig.submit(workflow(8, "mine"), reference="mine")


async def test_a_retry_by_hand_runs_the_graph_of_whoever_takes_it() -> None:
    async with Rig() as rig:
        await worker(rig, "a", "old")
        await worker(rig, "b", "new")
        job_id = await rig.submit(workflow(7, "mine"))
        await rig.fail(await rig.take("a"), FailureKind.INVALID_WORKFLOW)
        await rig.engine.retry(job_id)
        leased = await rig.take("b")
        assert painted(leased)["name"] == "x"
        assert is_what_it_says(leased)


async def test_files_reach_the_same_node_in_every_graph() -> None:
    async with Rig() as rig:
        await worker(rig, "a", "old")
        await worker(rig, "b", "new")
        attached = (Attachment("a.png", b"png", "1", "name"),)
        for _ in range(2):
            await rig.submit(workflow(7, "mine"), attachments=attached, include_outputs=("2",))
        for name in "ab":
            leased = await rig.take(name)
            assert leased.attachments == attached and leased.include_outputs == ("2",)
            assert is_what_it_says(leased)


async def test_a_record_that_is_not_the_dispatchs_own_is_found_out_whichever_graph_it_gives() -> None:
    async with Rig() as rig:
        await worker(rig, "a", "old")
        await worker(rig, "b", "new")
        job_id = await rig.submit(workflow(7, "mine"))
        job = (await rig.engine.get(job_id)).job
        (variant,) = job.payload.variants
        nodes = {"1": {**variant.nodes["1"], "inputs": {"seed": 1, "steps": 1, "name": "anothers"}}}
        forged = msgspec.structs.replace(
            job.payload, variants=(msgspec.structs.replace(variant, nodes=nodes),)
        )
        dispatch = await rig.store.load(job_id)
        assert dispatch is not None
        guard = AtRevision(dispatch.revision)
        assert await rig.store.write(Write(job_id, guard, Change(), job={"payload": forged}))
        for name in "ab":
            leased = await rig.poll(name)
            assert leased is not None and not is_what_it_says(leased)
            await rig.engine.release(Release(leased.ref, "drain"))
