"""What a job waits for is noticed soon after it appears on a server, without reading all of it again and again."""

from __future__ import annotations

import asyncio

import msgspec
from tests.pool._fleet import QUICK_AGENT, Fleet, eventually, fleet, quick, text_to_image

# So long that nothing is found by the usual looks.
RARELY = msgspec.structs.replace(
    QUICK_AGENT, inventory_interval_s=3600, missing_interval_s=3600, seek_interval_s=0.05
)
NEW = "new.safetensors"


def asked(it: Fleet, path: str) -> int:
    return it.servers[0].stats.requests.get(path, 0)


async def test_a_model_that_a_job_waits_for_is_noticed_when_it_appears() -> None:
    async with fleet(agent=RARELY) as it:
        job_id = await it.pool.enqueue(text_to_image(NEW))
        whole = asked(it, "/object_info")
        # It is looked for, a few small lists at a time.
        await eventually(lambda: asked(it, "/models/checkpoints") >= 5)
        assert asked(it, "/object_info") == whole
        it.servers[0].faults.added_models = {"checkpoints": {NEW: 1.0}}
        result = await it.pool.wait(job_id, timeout=60)
        assert [file.node_id for file in result.files] == ["9"]
        assert asked(it, "/object_info") == whole + 1


async def test_a_model_in_a_folder_of_its_own_is_noticed_too() -> None:
    async with fleet(agent=RARELY) as it:
        job_id = await it.pool.enqueue(text_to_image("sd/new.safetensors"))
        await eventually(lambda: asked(it, "/models/checkpoints") >= 2)
        it.servers[0].faults.added_models = {"checkpoints": {"sd/new.safetensors": 1.0}}
        assert (await it.pool.wait(job_id, timeout=60)).files


async def test_a_node_class_that_a_job_waits_for_is_noticed_when_it_appears() -> None:
    without = tuple(sorted({node["class_type"] for node in text_to_image().values()} - {"VAEDecode"}))
    async with fleet(quick(node_classes=without), agent=RARELY) as it:
        job_id = await it.pool.enqueue(text_to_image())
        await eventually(lambda: asked(it, "/object_info/VAEDecode") >= 2)
        whole = asked(it, "/object_info")
        it.servers[0].install("VAEDecode")
        assert (await it.pool.wait(job_id, timeout=60)).files
        assert asked(it, "/object_info") == whole + 1


async def test_nothing_is_looked_for_once_nobody_waits_for_it() -> None:
    async with fleet(agent=msgspec.structs.replace(RARELY, heartbeat_s=0.1)) as it:
        job_id = await it.pool.enqueue(text_to_image(NEW))
        await eventually(lambda: asked(it, "/models/checkpoints") >= 3)
        await it.pool.cancel(job_id)
        before = -1
        async with asyncio.timeout(60):
            while before != (before := asked(it, "/models/checkpoints")):
                # Many times what lies between two looks, and between two heartbeats.
                await asyncio.sleep(2.5)


async def test_a_job_that_others_can_take_makes_nobody_look() -> None:
    with_it = quick(models={"checkpoints": {NEW: 1.0}})
    async with fleet(quick(), with_it, agent=msgspec.structs.replace(RARELY, heartbeat_s=0.05)) as it:
        for _ in range(3):
            await it.pool.wait(await it.pool.enqueue(text_to_image(NEW)), timeout=60)
        assert asked(it, "/models/checkpoints") <= 2
