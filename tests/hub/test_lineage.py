"""Original and processed: what a job left names the files it brought, and a file tells what was made from it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process
from tests.hub.test_inputs import OFFERS, brings, submitted, uploaded

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Poll, RegisterWorker
from comfyfleet.model.ids import PollId, WorkerId


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(folder=tmp_path) as rig:
        yield rig


async def test_what_a_job_left_names_what_it_brought_and_what_it_brought_tells_what_came_of_it(
    rig: HubRig,
) -> None:
    photo, mask = await uploaded(rig), await uploaded(rig, name="mask.png")
    body = brings(photo)
    body["payload"]["workflow"]["12"] = {"class_type": "LoadImageMask", "inputs": {"image": "x.png"}}
    body["inputs"].append({"file": mask, "node": "12", "input": "image"})
    job_id = await submitted(rig, body)
    await rig.engine.register(RegisterWorker(WorkerId("gpu"), OFFERS))
    job = await rig.engine.poll(Poll(WorkerId("gpu"), PollId("1"), 0))
    assert job is not None
    said = {"name": "out.png", "size": 3, "sha256": hashlib.sha256(b"png").hexdigest()}
    asked = {"lease": msgspec.to_builtins(job.ref), "files": [said]}
    (granted,) = (await rig.post("/api/worker/grants", asked, role=Role.WORKER)).body["files"]
    before = (await rig.get(f"/api/files/{photo}", role=Role.TENANT)).body
    assert "derived" not in before, "nothing has come yet"
    assert (await rig.ask("PUT", granted["link"]["url"], raw=b"png", role=None)).status == 200
    made = (await rig.get(f"/api/files/{granted['id']}", role=Role.TENANT)).body
    assert (made["job_id"], made["attempt_id"]) == (job_id, job.attempt_id)
    assert made["derived_from"] == [photo, mask] and "source" not in made
    for origin in (photo, mask):
        assert (await rig.get(f"/api/files/{origin}", role=Role.TENANT)).body["derived"] == [made["id"]]
    listed = (await rig.get(f"/api/files/{photo}/derived?limit=1", role=Role.TENANT)).body
    assert [each["id"] for each in listed["files"]] == [made["id"]] and listed["cursor"] == made["id"]
    rest = await rig.get(f"/api/files/{photo}/derived?cursor={made['id']}", role=Role.TENANT)
    assert rest.body == {"files": []}


async def test_whoever_uploads_names_one_of_his_own_files_as_its_source(rig: HubRig) -> None:
    other = (await rig.post("/api/keys", {"role": "tenant", "tenant": "other"})).body["key"]
    photo = await uploaded(rig)
    said = (await rig.post("/api/files", {"source": photo}, role=Role.TENANT)).body
    assert (said["source"], said["derived_from"]) == (photo, [photo])
    words = []
    for source, key in ((photo, other), ("f_" + "0" * 32, other), ("../..", other)):
        refused = await rig.post("/api/files", {"source": source}, key=key)
        assert refused.code == "invalid_request"
        words.append(refused.body["detail"].replace(source, "X"))
    assert len(set(words)) == 1
