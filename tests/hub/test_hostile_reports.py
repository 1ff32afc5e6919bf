"""A worker that reports what should reach no caller: it does not, by result, stream, job, webhook or WebSocket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, running_hub
from tests.hub._watching import GPU, lease, register, watching
from tests.hub.test_socket import connected

from comfyfleet.hub.webhooks.sender import _made_safe
from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.policy.rules import Rules

EVIL = ("javascript", "..", "10.0.0.5", "gpu-inside", "\x1b")
FILE = {
    "node_id": "2",
    "kind": "images",
    "filename": "../../evil\x1b.png",
    "subfolder": "../..",
    "url": "javascript:alert(1)",
}
RESULT = {
    "outputs": {"2": {"images": [{"filename": "..\\x.png", "url": "http://10.0.0.5:8188/view"}]}},
    "files": [FILE, {**FILE, "url": "http://gpu-inside:8188/view?filename=x.png"}],
}
FAILURE = {
    "kind": "invalid_workflow",
    "message": "Cannot connect to host gpu-inside:8188",
    "traceback": ["File x", "OSError: ('10.0.0.5', 8188)"],
    "node_errors": {"2": {"errors": [{"details": "http://10.0.0.5:8188/prompt"}]}},
}


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub(rules=Rules(max_attempts=1)) as rig:
        await register(rig)
        yield rig


async def seen(rig: HubRig, job_id: str) -> str:
    """All that its caller can look at."""
    pages = [
        await rig.get(f"/api/jobs/{job_id}{more}", role=Role.TENANT) for more in ("", "/result", "/explain")
    ]
    assert [page.status for page in pages] == [200, 200, 200]
    async with watching(rig, f"/api/jobs/{job_id}/progress", role=Role.TENANT) as stream:
        await stream.rest()
    return "".join([page.content.decode() for page in pages] + [repr(each.data) for each in stream.seen])


def told(text: str) -> list[str]:
    return [word for word in EVIL if word in text or repr(word)[1:-1] in text]


@pytest.mark.parametrize("report", ["complete", "fail"])
async def test_over_http(rig: HubRig, report: str) -> None:
    job_id = await rig.submit(role=Role.TENANT)
    job = await lease(rig)
    held = job.ref
    evil = {"message": f"{FAILURE['message']}\x1b[2J", "files": [FILE], "text": ["http://10.0.0.5:8188/"]}
    progress = {"kind": "output", "lease": held, "data": {**evil, "within": [evil], "url": "javascript:x"}}
    async with watching(rig, f"/api/jobs/{job_id}/progress", role=Role.TENANT) as stream:
        answer = await rig.post("/api/worker/progress", {"reports": [progress]}, role=Role.WORKER)
        assert answer.status == 200, answer.content
        assert told(repr((await stream.until("output")).data)) == []
        body: dict[str, Any] = {"result": RESULT} if report == "complete" else {"failure": FAILURE}
        answer = await rig.post(f"/api/worker/{report}", {"lease": held, **body}, role=Role.WORKER)
        assert answer.status == 200, answer.content
        assert told(repr([each.data for each in await stream.rest()])) == []
    text = await seen(rig, job_id)
    assert told(text) == []
    assert ("evil_.png" if report == "complete" else "an address inside the fleet") in text


@pytest.mark.parametrize("report", ["complete_job", "fail_job"])
async def test_over_the_websocket(rig: HubRig, report: str) -> None:
    async with connected(rig) as line:
        job_id = await rig.submit(role=Role.TENANT)
        job = await lease(rig)
        held = {"lease": job.ref, "job_id": job_id}
        await line.say("subscribe_progress", job_id=job_id)
        body: dict[str, Any] = {"result": RESULT} if report == "complete_job" else {"error": FAILURE}
        async with connected(rig, Role.WORKER) as workers:
            await workers.say(report, **held, **body)
            await workers.until("job_completed" if report == "complete_job" else "job_failed")
        end = await line.until("job_completed" if report == "complete_job" else "job_failed")
        assert told(repr(end)) == []
    assert told(await seen(rig, job_id)) == []


async def test_what_a_worker_wrote_into_the_store_itself(rig: HubRig) -> None:
    """As one without a hub does: it is made safe when it is shown."""
    job_id = await rig.submit(role=Role.TENANT)
    job = await lease(rig, GPU)
    files = (OutputFile("2", "images", "../evil.png", url="javascript:alert(1)"),)
    await rig.engine.complete(Completion(job.ref, JobResult({}, files)))
    assert told(await seen(rig, job_id)) == []
    record = await rig.engine.store.records.get(job.ref.job_id)
    assert record is not None
    assert told(repr((await _made_safe(record)).result)) == []
