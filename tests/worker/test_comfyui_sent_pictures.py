"""What SaveImageWebsocket sends is output: files of the job like any other, or the job did not complete."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.hub._hub import running_hub, submission
from tests.pool._fleet import fleet
from tests.worker._comfyui import (
    QUICK,
    Attempt,
    leased,
    server_and_connector,
    slow,
    trace,
    tuned,
)
from tests.worker._scripted import quick

from comfyfleet.model.access import Role
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.comfyui.listener import parse_binary, parse_text
from comfyfleet.worker.connectors.comfyui.tracker import RunTracker
from comfyfleet.worker.transports.http import HttpWorkerApi

PNG = b"\x89PNG\r\n\x1a\n"


def sending(batch: int = 2, color: int = 0x336699) -> dict[str, Any]:
    inputs = {"width": 8, "height": 8, "batch_size": batch, "color": color}
    return {
        "1": {"class_type": "EmptyImage", "inputs": inputs},
        "2": {"class_type": "SaveImageWebsocket", "inputs": {"images": ["1", 0]}},
    }


def pixel(content: bytes) -> Any:
    with Image.open(io.BytesIO(content)) as picture:
        return picture.convert("RGB").getpixel((0, 0))


# Previews that say where they belong, and those of older releases, which do not.
@pytest.mark.parametrize("version", ["0.7.0", "0.3.45"])
async def test_what_the_node_sends_are_files_of_the_result_and_no_previews(version: str) -> None:
    async with server_and_connector(version=version) as (_, connector):
        # A second time too: the node runs again though nothing has changed.
        for _ in range(2):
            attempt = Attempt(connector, leased(sending()))
            result = await attempt.result()
            assert [(file.node_id, file.kind) for file in result.files] == [("2", "images")] * 2
            assert [file.filename for file in result.files] == [
                "websocket_2_00001_.png",
                "websocket_2_00002_.png",
            ]
            contents = [await connector.fetch(file) for file in result.files]
            assert all(content.startswith(PNG) for content in contents)
            assert [pixel(content) for content in contents] == [(0x33, 0x66, 0x99)] * 2
            assert [each["filename"] for each in result.outputs["2"]["images"]] == [
                file.filename for file in result.files
            ]
            assert attempt.of(ProgressKind.PREVIEW) == []
            (told,) = attempt.of(ProgressKind.OUTPUT)
            assert (told.data["node"], len(told.data["files"])) == ("2", 2)


async def test_outputs_that_were_not_asked_for_are_not_delivered() -> None:
    async with server_and_connector() as (_, connector):
        graph = sending() | {
            "3": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}}
        }
        attempt = Attempt(connector, leased(graph, include=("3",)))
        result = await attempt.result()
        assert {file.node_id for file in result.files} == {"3"}
        assert attempt.of(ProgressKind.PREVIEW) == []


async def test_pictures_sent_while_the_websocket_was_lost_are_missed_and_the_run_has_failed() -> None:
    # Nobody waits for what cannot come any more.
    async with server_and_connector(tuned(unresponsive_s=600.0)) as (fake, connector):
        graph = slow(steps=8) | {
            "3": {"class_type": "SaveImageWebsocket", "inputs": {"images": ["1", 0]}},
        }
        fake.faults.slow_paths = ["/ws"]
        fake.faults.slow_answer_s = 1.5
        fake.faults.drop_sockets_after_nodes = 1
        attempt = Attempt(connector, leased(graph))
        failure = await attempt.failure()
        assert (failure.kind, failure.node_id) == (FailureKind.TRANSIENT, "3")
        assert "SaveImageWebsocket" in failure.message
        found = await connector.reconcile(attempt.job)
        assert (found.state, found.result) == ("failed", None), "the history does not have them"


async def test_a_websocket_lost_before_the_node_begins_loses_nothing() -> None:
    async with server_and_connector() as (fake, connector):
        graph = {
            "1": {
                "class_type": "LabSlow",
                "inputs": {"steps": 60, "step_seconds": 0.02, "preview": False, "seed": 1},
            },
            "3": {"class_type": "SaveImageWebsocket", "inputs": {"images": ["1", 0]}},
        }
        attempt = Attempt(connector, leased(graph))
        await attempt.heard(ProgressKind.PROGRESS, 5)
        fake.faults.drop_sockets = True
        result = await attempt.result()
        assert [file.node_id for file in result.files] == ["3"]


async def test_more_than_may_be_held_is_a_failure_that_says_what_to_do() -> None:
    async with server_and_connector(tuned(max_message_bytes=2000)) as (_, connector):
        failure = await Attempt(connector, leased(sending(batch=60))).failure()
    assert failure.kind is FailureKind.NODE_ERROR
    assert "SaveImage" in failure.message and "max_message_bytes" in failure.message


def test_the_recorded_frames_of_a_real_server_are_two_pictures_of_the_node() -> None:
    lines = trace("14")
    (start,) = (
        index
        for index, line in enumerate(lines)
        if line["dir"] == "send" and (line.get("body") or {}).get("prompt_id") == "o-ws"
    )
    tracker = RunTracker(lines[start]["body"]["prompt"], "http://server")
    for line in lines[start:]:
        if line.get("channel") != "ws":
            continue
        if "binary" in line:
            message = parse_binary(base64.b64decode(line["binary"]["base64"]))
        else:
            message = parse_text(json.dumps(line["json"]))
        assert message is not None
        assert all(
            progress.kind is not ProgressKind.PREVIEW for progress in tracker.on_message(message, 0.0, 0.0)
        )
        if message.is_end_of_run:
            break
    assert list(tracker.sent.by_node) == ["2"]
    pictures = tracker.sent.by_node["2"]
    assert [kind for kind, _ in pictures] == ["image/png"] * 2
    assert all(content.startswith(PNG) and len(content) == 79 for _, content in pictures)


async def test_a_pool_hands_them_out_like_any_other_output(tmp_path: Path) -> None:
    async with fleet() as it:
        result = await it.pool.run(sending(), timeout=60)
        saved = await it.pool.save(result, tmp_path / "out")
        assert [pixel(path.read_bytes()) for path in saved] == [(0x33, 0x66, 0x99)] * 2


async def test_a_hub_keeps_them_for_the_caller(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeComfyUI() as fake:
        async with (
            HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
            Agent(api, WorkerId("gpu-a"), [ComfyUI(fake.url, QUICK)], quick()),
        ):
            job = await rig.post("/api/jobs", submission(workflow=sending()), role=Role.TENANT)
            assert job.status == 201, job.content
            path = f"/api/jobs/{job.body['id']}/result"
            async with asyncio.timeout(60):
                while (answer := await rig.get(path, role=Role.TENANT)).status == 202:
                    await asyncio.sleep(0.02)
        assert answer.body["status"] == "completed", answer.body
        await fake.stop()
        for file in answer.body["result"]["files"]:
            got = await rig.get(file["url"], role=None)
            assert (got.status, got.headers["content-type"]) == (200, "image/png")
            assert pixel(got.content) == (0x33, 0x66, 0x99)
        assert len(answer.body["result"]["files"]) == 2
