"""A pool on a file: what was taken in is run, whatever becomes of the process in between."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI, QUICK_RULES, quick, text_to_image

from comfyfleet import Fault, WorkflowPool
from comfyfleet.testing.fake_comfyui import FakeComfyUI

ROOT = Path(__file__).resolve().parents[2]
TAKES_JOBS_AND_WAITS = """
import asyncio, sys
from comfyfleet import WorkflowPool
from tests.pool._fleet import text_to_image

async def main() -> None:
    async with WorkflowPool([], store=sys.argv[1]) as pool:
        for number in range(5):
            print(await pool.enqueue(text_to_image(), job_id=f"mine-{number}", metadata={"n": number}), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def pool_on(path: Path, *servers: str) -> WorkflowPool:
    return WorkflowPool(
        servers,
        store=f"sqlite:///{path}",
        comfyui=QUICK_COMFYUI,
        agent=QUICK_AGENT,
        rules=QUICK_RULES,
        reconnection_grace=0.05,
    )


async def test_jobs_that_waited_when_the_pool_was_closed_run_in_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    async with pool_on(path) as pool:
        job_id = await pool.enqueue(text_to_image(), priority=3, metadata={"user": "42"})
    async with FakeComfyUI(quick()) as server, pool_on(path, server.url) as pool:
        result = await pool.wait(job_id, timeout=60)
        record = await pool.get_job(job_id)
        assert (record.priority, record.metadata, record.attempts) == (3, {"user": "42"}, 1)
        assert await pool.fetch(result.files[0])
    async with pool_on(path) as pool:
        assert (await pool.get_job(job_id)).status == "completed"
        assert (await pool.wait(job_id)).files == result.files


async def test_a_second_pool_on_the_same_file_is_refused_in_words_and_harms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    async with pool_on(path) as first:
        second = pool_on(path)
        with pytest.raises(Fault, match="is in use by process"):
            await second.start()
        await second.close()
        assert await first.enqueue(text_to_image())
    with pytest.raises(Fault, match=r"fleet\.db"):
        await pool_on(tmp_path / "no such folder" / "fleet.db").start()


async def test_jobs_acknowledged_to_a_process_that_was_killed_are_run(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        TAKES_JOBS_AND_WAITS,
        f"sqlite:///{path}",
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    acknowledged = [(await process.stdout.readline()).decode().strip() for _ in range(5)]
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert acknowledged == [f"mine-{number}" for number in range(5)]
    async with FakeComfyUI(quick()) as server, pool_on(path, server.url) as pool:
        for job_id in acknowledged:
            await pool.wait(job_id, timeout=60)
        assert sum(server.stats.prompts_run.values()) == 5
