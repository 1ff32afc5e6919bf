"""A workflow is taken in every usual shape, at every door: the pool, the client, REST, the WebSocket, the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.cli._hub import Run, hub_with_a_worker, runner
from tests.hub._hub import graph, hub_in_process, running_hub
from tests.pool._fleet import fleet, text_to_image

from comfyfleet import hash_workflow
from comfyfleet.client.client import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal
from comfyfleet.testing.fake_comfyui import pictures
from comfyfleet.testing.fake_comfyui.values import FakeImage

GRAPH = graph()
SHAPES: dict[str, dict[str, Any]] = {
    "bare": GRAPH,
    "workflow": {"workflow": GRAPH},
    "prompt": {"prompt": GRAPH},
}
NEXT_STEP = (
    "Pass the file as ComfyUI saved it, or a JSON file saved with 'Export (API)' "
    "(in older releases 'Save (API Format)')."
)
EMPTY_WORDS = "plain.png carries no workflow: it was saved without metadata"


def picture(path: Path, **texts: Any) -> Path:
    drawn = pictures.draw(FakeImage(width=8, height=8), 0, 64)
    path.write_bytes(pictures.png(drawn, {name: json.dumps(text) for name, text in texts.items()}))
    return path


async def test_a_picture_that_the_fleet_made_is_a_workflow_for_it(tmp_path: Path) -> None:
    async with fleet() as it:
        result = await it.pool.run(text_to_image())
        (made,) = await it.pool.save(result, tmp_path)
        job_id = await it.pool.enqueue(made)
        again = await it.pool.wait(job_id, 60)
        # The same kind of job, and in no folder of the first one.
        assert (await it.pool.get_job(job_id)).workflow_hash == hash_workflow(text_to_image())
        assert again.files[0].subfolder.count("comfyfleet/") == 1
        with pytest.raises(Refusal, match=EMPTY_WORDS):
            await it.pool.enqueue(picture(tmp_path / "plain.png"))


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_pool_and_the_client_take_every_shape(shape: str, tmp_path: Path) -> None:
    file = tmp_path / "flow.json"
    file.write_text(json.dumps(SHAPES[shape]))
    async with running_hub() as rig, FleetClient(rig.url, rig.keys[Role.ADMIN]) as client:
        for given in (SHAPES[shape], file, picture(tmp_path / "cat.png", prompt=GRAPH)):
            job = await client.submit(given)
            assert job.workflow_hash == hash_workflow(GRAPH)
        with pytest.raises(Refusal, match=EMPTY_WORDS):
            await client.submit(picture(tmp_path / "plain.png"))
    async with fleet() as it:
        job_id = await it.pool.enqueue(SHAPES[shape])
        assert (await it.pool.get_job(job_id)).workflow_hash == hash_workflow(GRAPH)


async def test_rest_and_the_websocket_take_every_shape() -> None:
    async with running_hub() as rig:
        for body in (*SHAPES.values(), *({"payload": each} for each in SHAPES.values())):
            answer = await rig.post("/api/jobs", body)
            assert answer.status == 201, (body, answer.body)
            assert answer.body["workflow_hash"] == hash_workflow(GRAPH)
            answer = await rig.post("/api/jobs/batch", {"jobs": [body]})
            assert answer.body["accepted"] == 1, (body, answer.body)
        # Options stand beside the workflow.
        answer = await rig.post("/api/jobs", {"workflow": GRAPH, "priority": 5})
        assert (await rig.get(f"/api/jobs/{answer.body['id']}")).body["priority"] == 5
        headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{rig.url}/hub", headers=headers) as socket,
        ):
            for body in (
                SHAPES["workflow"],
                SHAPES["prompt"],
                *({"payload": each} for each in SHAPES.values()),
            ):
                await socket.send_json({"type": "submit_job", **body})
                while (told := await socket.receive_json())["type"] != "job_submitted":
                    assert told["type"] != "error", (body, told)


@pytest.mark.parametrize(
    "body",
    [{}, {"priority": 5}, {"workflow": GRAPH, "prompt": GRAPH}, {"workflow": GRAPH, "payload": GRAPH}],
)
async def test_a_submission_with_no_workflow_or_with_two_is_told_the_right_shape(
    body: dict[str, Any],
) -> None:
    async with running_hub() as rig:
        answer = await rig.post("/api/jobs", body)
        assert answer.code == "invalid_request"
        assert 'send {"payload": {"workflow": …}}, {"workflow": …} or {"prompt": …}' in answer.body["detail"]


async def test_a_slip_in_a_submission_is_told_as_one() -> None:
    async with running_hub() as rig:
        answer = await rig.post("/api/jobs", {"payload": {"workflow": GRAPH}, "priorty": 5})
        assert answer.code == "invalid_request" and "priorty" in answer.body["detail"]
        answer = await rig.post("/api/jobs", {"payloda": {"workflow": GRAPH}})
        assert answer.code == "invalid_request" and "payloda" in answer.body["detail"]


NODE = {"class_type": "A", "inputs": {}}
EDITOR: dict[str, Any] = {"nodes": [], "links": []}


@pytest.mark.parametrize(
    "body",
    [
        # What is said beside a workflow is heard or refused, and never left out without a word.
        {"workflow": GRAPH, "metadata": {"class_type": "x"}, "priorty": 5, "tenant": "acme"},
        {"payload": GRAPH, "tenant": "acme", "webhook": NODE},
        {"workflow": GRAPH, "1": NODE},
        {"prompt": GRAPH, "1": NODE},
        {"tenant": "acme", "1": NODE},
        {**EDITOR, "workflow": GRAPH},
        {**EDITOR, "tenant": "acme"},
        {**EDITOR, "priority": 5},
    ],
)
async def test_a_body_is_a_workflow_alone_only_where_it_says_nothing_else(body: dict[str, Any]) -> None:
    async with hub_in_process() as rig:
        answer = await rig.post("/api/jobs", body)
        assert (answer.status, answer.code) == (400, "invalid_request"), answer.body
        (item,) = (await rig.post("/api/jobs/batch", {"jobs": [body]})).body["items"]
        assert item["status"] == 400
        assert (await rig.get("/api/jobs")).body["jobs"] == []


@pytest.mark.parametrize(
    "payload",
    [{"workflow": GRAPH, "1": NODE}, {"prompt": GRAPH, "1": NODE}, {"workflow": NODE, "prompt": GRAPH}],
)
async def test_a_payload_that_could_mean_two_workflows_is_refused(payload: dict[str, Any]) -> None:
    async with hub_in_process() as rig:
        for body in ({"payload": payload}, {"workflow": payload}):
            answer = await rig.post("/api/jobs", body)
            assert (answer.status, answer.code) == (400, "invalid_request"), answer.body
            assert "send one workflow" in answer.body["detail"]


async def test_nodes_may_have_the_names_of_fields() -> None:
    named = {"workflow": NODE, "tenant": NODE, "id": NODE}
    async with hub_in_process() as rig:
        for body in (named, {"payload": named}, {"workflow": named}):
            answer = await rig.post("/api/jobs", body)
            assert answer.status == 201, answer.body
            told = (await rig.get(f"/api/jobs/{answer.body['id']}/payload")).body
            assert (told["payload"]["workflow"], told["tenant"]) == (named, "default")


def test_the_commands_take_every_shape_and_pictures(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [picture(tmp_path / "cat.png", prompt=GRAPH)]
    for shape, content in SHAPES.items():
        files.append(tmp_path / f"{shape}.json")
        files[-1].write_text(json.dumps(content))
    plain = picture(tmp_path / "plain.png")
    with hub_with_a_worker() as address:
        run: Run = runner(capfd, monkeypatch, address, str(tmp_path))
        for file in files:
            assert run("hash", file, "--json").json["workflow_hash"] == hash_workflow(GRAPH)
            assert run("submit", file, "--json").json[0]["workflow_hash"] == hash_workflow(GRAPH)
        for command in ("hash", "submit", "convert"):
            ended = run(command, plain)
            assert ended.code == 3 and ended.errors == f"Error: {tmp_path}/{EMPTY_WORDS}. {NEXT_STEP}\n"
        ended = run("run", plain, "--server", "http://127.0.0.1:9")
        assert ended.code == 3 and ended.errors == f"Error: {tmp_path}/{EMPTY_WORDS}. {NEXT_STEP}\n"
