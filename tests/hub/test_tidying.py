"""What an attempt left on its server is removed once the hub has it, where the worker may; and nothing of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hub._hub import HubRig, running_hub, submission
from tests.hub.test_inputs import brings, ended, submitted, uploaded
from tests.worker._comfyui import QUICK, picture
from tests.worker._scripted import quick

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, ReportReply
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, WorkerId, prompt_id_of
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI, connector
from comfyfleet.worker.connectors.comfyui.submission import remove_own
from comfyfleet.worker.transports.http import HttpWorkerApi

PNG = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde\0\0\0\x0cIDATx\x9cc\xf8\xcf\xc0\0\0\3\1\1\0"
    b"\xc9\xfe\x92\xef\0\0\0\0IEND\xaeB`\x82"
)


class Stage:
    def __init__(self, rig: HubRig, fake: FakeComfyUI, base: Path) -> None:
        self.rig = rig
        self.fake = fake
        self.base = base

    async def run(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """How it ended, and the id of its prompt."""
        job_id = await submitted(self.rig, body)
        answer = await ended(self.rig, job_id)
        attempts = (await self.rig.engine.get(JobId(job_id))).attempts
        return answer, prompt_id_of(attempts[-1].attempt_id)

    def left(self) -> set[str]:
        return {path.relative_to(self.base).as_posix() for path in self.base.rglob("*") if path.is_file()}


@asynccontextmanager
async def a_stage(tmp_path: Path, keeps_files: bool = True, **settings: Any) -> AsyncIterator[Stage]:
    base = tmp_path / "ComfyUI"
    folder = tmp_path / "files" if keeps_files else None
    async with (
        running_hub(folder=folder) as rig,
        FakeComfyUI(FakeSettings(base_folder=str(base))) as fake,
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
        Agent(
            api,
            WorkerId("gpu-a"),
            [ComfyUI(fake.url, msgspec.structs.replace(QUICK, **({"folder": base} | settings)))],
            quick(),
        ),
    ):
        yield Stage(rig, fake, base)


async def test_what_an_attempt_brought_and_left_goes_once_the_hub_has_it_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    async with a_stage(tmp_path) as stage:
        others = {
            "output/holiday.png",
            "output/comfyfleet/notes.txt",
            "output/comfyfleet/0f0f0f0f-0000-5000-8000-000000000000/other.png",
            "input/comfyfleet/0f0f0f0f-0000-5000-8000-000000000000/other.png",
            "temp/x.png",
        }
        for name in others:
            await asyncio.to_thread(_write, stage.base / name)
        answer, prompt_id = await stage.run(brings(await uploaded(stage.rig, PNG)))
        assert answer["status"] == "completed", answer
        assert stage.fake.stats.uploads == 1
        async with asyncio.timeout(60):
            while stage.left() != others:
                await asyncio.sleep(0.01)
        assert not (stage.base / "output/comfyfleet" / prompt_id).exists()
        (file,) = answer["result"]["files"]
        assert (await stage.rig.get(file["url"], role=None)).content.startswith(b"\x89PNG")


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"somebody's")


async def test_outputs_that_are_on_their_server_alone_stay_there(tmp_path: Path) -> None:
    async with a_stage(tmp_path, keeps_files=False) as stage:
        answer, prompt_id = await stage.run(submission(workflow=picture()))
        (file,) = answer["result"]["files"]
        assert "file_id" not in file
        second, _ = await stage.run(submission(workflow=picture()))
        assert second["status"] == "completed", "whatever the first had to remove is removed by now"
        assert f"output/comfyfleet/{prompt_id}/{file['filename']}" in stage.left()


async def test_a_completion_that_was_not_taken_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Completion] = []

    async def late(_: HttpWorkerApi, call: Completion) -> ReportReply:
        asked.append(call)
        raise Refusal(RefusalCode.LEASE_LOST, "another has it")

    monkeypatch.setattr(HttpWorkerApi, "complete", late)
    async with a_stage(tmp_path, clears_history=True) as stage:
        for _ in range(2):
            await submitted(stage.rig, submission(workflow=picture()))
        async with asyncio.timeout(60):
            # There is one slot: when the second is reported, all is over with the first.
            while len(asked) < 2:
                await asyncio.sleep(0.01)
        prompt_id = prompt_id_of(asked[0].ref.attempt_id)
        assert any(name.startswith(f"output/comfyfleet/{prompt_id}/") for name in stage.left())
        assert await is_remembered(stage, prompt_id)


async def is_remembered(stage: Stage, prompt_id: str) -> bool:
    api = ComfyUI(stage.fake.url, QUICK)
    await api.open()
    answer = await api._api.history(prompt_id)
    await api.close()
    return prompt_id in answer.body


@pytest.mark.parametrize("clears", [False, True])
async def test_the_history_is_cleared_of_what_completed_only_where_it_was_asked_for(
    tmp_path: Path, clears: bool
) -> None:
    async with a_stage(tmp_path, folder=None, clears_history=clears) as stage:
        answer, first = await stage.run(submission(workflow=picture()))
        assert answer["status"] == "completed"
        # The slot is free again once the first is tidied up.
        await stage.run(submission(workflow=picture()))
        assert await is_remembered(stage, first) is not clears
        assert any(name.startswith(f"output/comfyfleet/{first}/") for name in stage.left())


async def test_what_cannot_be_removed_is_told_and_the_job_has_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(connector, "remove_own", refused)
    async with a_stage(tmp_path) as stage:
        for _ in range(2):
            answer, _ = await stage.run(submission(workflow=picture()))
            assert answer["status"] == "completed"
    assert "cannot remove the files" in caplog.text and "not yours" in caplog.text


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    prompt_id = "0f0f0f0f-0000-5000-8000-000000000000"
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").touch()
    for kind in ("input", "output"):
        (tmp_path / kind / "comfyfleet").mkdir(parents=True)
    (tmp_path / "output" / "comfyfleet" / prompt_id).symlink_to(treasure)
    remove_own(tmp_path, "comfyfleet", prompt_id, with_outputs=True)
    assert (treasure / "gold").exists()
    for name in ("..", "../..", "", "notes"):
        with pytest.raises((AssertionError, ValueError)):
            remove_own(tmp_path, "comfyfleet", name, with_outputs=True)
