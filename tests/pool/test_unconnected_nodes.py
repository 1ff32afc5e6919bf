"""ComfyUI runs what its output nodes depend on: what is not connected to one is no need, but its class has to exist."""

from __future__ import annotations

from typing import Any

import pytest
from tests.policy._editor import Editor
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI, QUICK_RULES, fleet, quick, text_to_image

from comfyfleet import Refusal, WorkflowPool

LEFT_OVER = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "left-over.safetensors"}}


def with_nodes(**nodes: Any) -> dict[str, Any]:
    return {**text_to_image(), **nodes}


@pytest.mark.parametrize("version", ["0.3.64", "0.7.0", "0.33.0"])
async def test_a_model_that_no_output_depends_on_is_not_waited_for(version: str) -> None:
    graph = with_nodes(
        left=LEFT_OVER,
        lora={
            "class_type": "LoraLoaderModelOnly",
            "inputs": {"model": ["left", 0], "lora_name": "gone.safetensors", "strength_model": 1.0},
        },
    )
    async with fleet(quick(version=version)) as it:
        job_id = await it.pool.enqueue(graph)
        result = await it.pool.wait(job_id, timeout=60)
        assert [file.node_id for file in result.files] == ["9"]


async def test_a_model_that_a_second_output_depends_on_is_a_need() -> None:
    graph = with_nodes(
        left=LEFT_OVER,
        decoded={"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["left", 2]}},
        saved={"class_type": "SaveImage", "inputs": {"images": ["decoded", 0], "filename_prefix": "b"}},
    )
    async with fleet() as it:
        with pytest.raises(Refusal, match=r"left-over\.safetensors"):
            await it.pool.enqueue(graph, require_workable=True)


async def test_a_class_that_is_missing_is_a_need_wherever_it_stands() -> None:
    """A server refuses a prompt with an unknown class, connected or not."""
    async with fleet() as it:
        with pytest.raises(Refusal, match="NobodyHasThis"):
            graph = with_nodes(alone={"class_type": "NobodyHasThis", "inputs": {}})
            await it.pool.enqueue(graph, require_workable=True)


async def test_a_workflow_of_the_editor_with_a_loader_left_over_runs() -> None:
    editor = Editor()
    picture = editor.node("EmptyImage", [64, 64, 1, 7])
    saver = editor.node("SaveImage", ["kept"])
    editor.wire(picture, 0, saver, "images", "IMAGE")
    editor.node("CheckpointLoaderSimple", ["left-over.safetensors"])
    async with fleet() as it:
        job_id = await it.pool.enqueue(editor.saved())
        result = await it.pool.wait(job_id, timeout=60)
        assert [file.node_id for file in result.files] == [str(saver)]


async def test_what_is_not_connected_is_known_also_while_the_server_is_away() -> None:
    async with fleet() as it:
        await it.pool.wait(await it.pool.enqueue(text_to_image()), timeout=60)
        await it.servers[0].crash()
        await it.told.until("client:state")
        job_id = await it.pool.enqueue(with_nodes(left=LEFT_OVER))
        await it.servers[0].restart()
        assert (await it.pool.wait(job_id, timeout=60)).files


async def test_a_job_from_before_the_first_server_waits_for_nothing_that_is_not_connected() -> None:
    """What an output is only servers say, and there is none yet."""
    async with (
        fleet() as it,
        WorkflowPool([], rules=QUICK_RULES, agent=QUICK_AGENT, comfyui=QUICK_COMFYUI) as pool,
    ):
        early = [await pool.enqueue(with_nodes(left=LEFT_OVER)) for _ in range(2)]
        needed = await pool.enqueue(
            with_nodes(
                left=LEFT_OVER,
                decoded={"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["left", 2]}},
                saved={
                    "class_type": "SaveImage",
                    "inputs": {"images": ["decoded", 0], "filename_prefix": "b"},
                },
            )
        )
        await pool.add_server(it.servers[0].url)
        for job_id in early:
            assert (await pool.wait(job_id, timeout=60)).files
        assert (await pool.get_job(needed)).status == "queued", "an output depends on it there"
