"""A pool of A1111 servers, without a hub: jobs are routed, run and saved like those of ComfyUI."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.worker._a1111 import FAST, QUICK, payload

from comfyfleet import Server, WorkflowPool
from comfyfleet.testing.fake_a1111 import FakeA1111, FakeSubject, drawn_pixels, pixels_of
from comfyfleet.worker.connectors.a1111 import A1111


async def test_a_pool_runs_payloads_of_the_service_and_saves_what_was_made_from_them(tmp_path: Path) -> None:
    async with FakeA1111(FAST) as one, FakeA1111(FAST) as two, asyncio.timeout(60):
        servers = [
            Server(id=name, connector=A1111(fake.url, QUICK)) for name, fake in (("one", one), ("two", two))
        ]
        async with WorkflowPool(servers) as pool:
            prompts = [f"picture {number}" for number in range(6)]
            ids = [await pool.enqueue(payload(prompt=prompt, seed=5), service="a1111") for prompt in prompts]
            for prompt, job_id in zip(prompts, ids, strict=True):
                result = await pool.wait(job_id)
                client_id = (await pool.get_job(job_id)).client_id
                (path,) = await pool.save(result, tmp_path / job_id, client_id)
                content = await asyncio.to_thread(path.read_bytes)
                assert pixels_of(content) == drawn_pixels(FakeSubject(prompt=prompt, seed=5, steps=3))
        assert one.runs and two.runs and len(one.runs) + len(two.runs) == 6
