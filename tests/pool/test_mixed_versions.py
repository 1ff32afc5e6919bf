"""A pool of servers of several ComfyUI releases: what one of them can run is run, whichever is asked first."""

from __future__ import annotations

import asyncio
import io
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from PIL import Image
from tests.policy._editor import Editor
from tests.pool._fleet import Fleet, fleet, quick, text_to_image

from comfyfleet import JobFailed

OLD, MIDDLE, NEW = "0.3.64", "0.7.0", "0.33.0"


def releases_of(*versions: str) -> AbstractAsyncContextManager[Fleet]:
    return fleet(*(quick(version=version) for version in versions))


def scaled(width: int, **inputs: Any) -> dict[str, Any]:
    """A picture that is as wide as no other of the test. Releases from 0.6 on require `resolution_steps`."""
    return {
        "1": {
            "class_type": "EmptyImage",
            "inputs": {"width": width, "height": 256, "batch_size": 1, "color": width},
        },
        "2": {
            "class_type": "ImageScaleToTotalPixels",
            "inputs": {
                "image": ["1", 0],
                "upscale_method": "area",
                "megapixels": width * 256 / 1024 / 1024,
                **inputs,
            },
        },
        "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "scaled"}},
    }


def newer_sampler(width: int) -> dict[str, Any]:
    graph = text_to_image()
    graph["3"]["inputs"]["sampler_name"] = "exp_heun_2_x0"
    graph["5"]["inputs"]["width"] = width
    return graph


async def width_of(it: Fleet, job_id: str) -> int:
    result = await it.pool.wait(job_id, timeout=60)
    (file,) = result.files
    return Image.open(io.BytesIO(await it.pool.fetch(file))).width


@pytest.mark.parametrize("releases", [(OLD, MIDDLE), (NEW, OLD), (MIDDLE, OLD, NEW)])
async def test_every_job_that_some_server_can_run_completes_with_its_own_picture(
    releases: tuple[str, ...],
) -> None:
    async with releases_of(*releases) as it:
        widths = [64 + 8 * number for number in range(8)]
        for_old = [await it.pool.enqueue(scaled(width), max_attempts=1) for width in widths]
        for_new = [await it.pool.enqueue(newer_sampler(width), max_attempts=1) for width in widths]
        found = await asyncio.gather(*(width_of(it, job_id) for job_id in (*for_old, *for_new)))
        assert found == widths * 2


async def test_a_workflow_that_every_release_refuses_fails_with_the_node_errors() -> None:
    async with releases_of(OLD, MIDDLE) as it:
        graph = text_to_image()
        graph["3"]["inputs"]["sampler_name"] = "no such sampler"
        job_id = await it.pool.enqueue(graph)
        with pytest.raises(JobFailed, match="no such sampler") as caught:
            await it.pool.wait(job_id, timeout=60)
        failure = caught.value.record.last_error
        assert failure is not None and failure.kind == "invalid_workflow"
        assert failure.node_errors is not None and "3" in failure.node_errors
        assert {attempt.worker_id for attempt in caught.value.record.history} == {it.id_of(0), it.id_of(1)}


async def test_equal_servers_are_not_asked_twice() -> None:
    async with releases_of(MIDDLE, MIDDLE, MIDDLE) as it:
        job_id = await it.pool.enqueue(scaled(64))
        with pytest.raises(JobFailed, match="resolution_steps"):
            await it.pool.wait(job_id, timeout=60)
        assert (await it.pool.get_job(job_id)).attempts == 1


def saved_by_editor(width: int, *more: Any) -> dict[str, Any]:
    """A workflow as the editor saves it: values by their place, which is not the same in every release."""
    editor = Editor()
    empty = editor.node("EmptyImage", [width, 256, 1, width])
    scaler = editor.node("ImageScaleToTotalPixels", ["area", width * 256 / 1024 / 1024, *more])
    saver = editor.node("SaveImage", ["scaled"])
    editor.wire(empty, 0, scaler, "image", "IMAGE")
    editor.wire(scaler, 0, saver, "images", "IMAGE")
    return editor.saved()


@pytest.mark.parametrize("releases", [(OLD, MIDDLE), (NEW, OLD)])
@pytest.mark.parametrize("more", [(), (1,)])
async def test_workflows_of_the_editor_run_on_every_release(
    releases: tuple[str, ...], more: tuple[int, ...]
) -> None:
    """Saved by a release that had the value or by one that had not."""
    async with releases_of(*releases) as it:
        widths = [64 + 8 * number for number in range(6)]
        jobs = [await it.pool.enqueue(saved_by_editor(width, *more), max_attempts=1) for width in widths]
        assert await asyncio.gather(*(width_of(it, job_id) for job_id in jobs)) == widths
        records = [await it.pool.get_job(job_id) for job_id in jobs]
        assert {record.attempts for record in records} == {1}
        assert len({record.workflow_hash for record in records}) == 1
