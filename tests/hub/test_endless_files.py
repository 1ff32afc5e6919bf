"""A server whose files never end: the job completes, and the disk of its worker stays as it is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.hub._hub import running_hub
from tests.pool._fleet import QUICK_AGENT, QUICK_COMFYUI
from tests.worker._comfyui import picture

from comfyfleet import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.ids import WorkerId
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

SMALL = msgspec.structs.replace(QUICK_COMFYUI, max_file_bytes=1 << 20)


@pytest.mark.parametrize("is_endless", [False, True])
async def test_a_file_that_never_ends_stays_on_its_server(tmp_path: Path, is_endless: bool) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    async with (
        running_hub(folder=tmp_path / "hub") as rig,
        FakeComfyUI() as fake,
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER], spool=spool) as api,
        Agent(api, WorkerId("gpu"), [ComfyUI(fake.url, SMALL)], QUICK_AGENT) as agent,
    ):
        await agent.wait_for_first_check()
        fake.faults.endless_paths = ["/view"] if is_endless else []
        async with FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
            job = await client.wait((await client.submit(picture())).id, timeout=60)
        assert job.status == "completed" and job.result is not None
        (file,) = job.result.files
        assert (file.file_id is None) is is_endless
        assert fake.stats.bytes_without_end < 24 << 20
    assert _left(spool) == []


def _left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
