"""The pool in fifteen lines: one workflow on whichever server is free.

python examples/pool_quickstart.py http://gpu-a:8188 http://gpu-b:8188

The workflow needs no model, so every ComfyUI can run it. Without addresses one fake server is started.
"""

import asyncio
import sys

from comfyfleet import WorkflowPool

WORKFLOW = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0x3377AA},
    },
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "quickstart"}},
}


async def run(servers: list[str]) -> None:
    async with WorkflowPool(servers, cooldown=60) as pool:
        pool.on(
            "client:blocked_workflow", lambda event: print(f"{event.client_id} is blocked: {event.reason}")
        )
        pool.on("job:started", lambda event: print(f"job {event.job_id} runs on {event.client_id}"))
        job_id = await pool.enqueue(WORKFLOW, priority=10, metadata={"tenant": "a"}, include_outputs=["2"])
        result = await pool.wait(job_id, timeout=120)
        for path in await pool.save(result, "."):
            print(f"saved {path}")


async def main(servers: list[str]) -> None:
    if servers:
        await run(servers)
        return
    from comfyfleet.testing.fake_comfyui import FakeComfyUI

    async with FakeComfyUI() as fake:
        await run([fake.url])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
