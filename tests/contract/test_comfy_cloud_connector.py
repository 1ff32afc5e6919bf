"""The Comfy Cloud connector keeps the contract of connectors at the fake account. It promises to run at most once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.worker._comfy_cloud import KEY, color_of, tuned

from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import JobResult
from comfyfleet.ports import Connector, OutputSource
from comfyfleet.testing.contract.connector import ConnectorContract, MakeScene
from comfyfleet.testing.contract.connector_plugin import ConnectorPluginContract
from comfyfleet.testing.contract.connector_scene import (
    ConnectorAbility,
    ConnectorFault,
    ConnectorScene,
    DeliveryPromise,
    RunState,
)
from comfyfleet.testing.fake_comfy_cloud import FakeCloudSettings, FakeComfyCloud
from comfyfleet.testing.fake_comfy_cloud.jobs import CloudJob
from comfyfleet.testing.fake_comfyui import NodeFault
from comfyfleet.testing.faulty_proxy import FaultyProxy, ProxyMode
from comfyfleet.worker.connectors.comfy_cloud import PLUGIN, ComfyCloud

SETTINGS = {"key": KEY}
MODEL = "sd15.safetensors"
CANNOT = {
    ConnectorFault.NEVER_ACCEPTS: "a submission without an answer is repeated under its key until it is cleared up",
    ConnectorFault.CRASH: "a hosted service keeps its jobs while it is away",
    ConnectorFault.RESTART: "a hosted service keeps its jobs while it is away",
    ConnectorAbility.TELLS_BOOT: "a hosted service does not tell when it restarts",
}
_STATES: dict[str, RunState] = {
    "queued": "waiting",
    "running": "running",
    "canceling": "running",
    "succeeded": "completed",
    "failed": "failed",
}


class ComfyCloudScene(ConnectorScene):
    service = "comfyui"
    promise = DeliveryPromise.AT_MOST_ONCE
    secret = KEY
    cannot = CANNOT
    payload_format = PLUGIN.payload

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeComfyCloud(FakeCloudSettings(plan="standard"))
        self.proxy: FaultyProxy
        self._strangers: dict[int, CloudJob] = {}

    async def start(self) -> None:
        await self.fake.start()
        self.proxy = FaultyProxy(self.fake.port, lambda it: it.method == "POST" and it.path == "/api/v2/jobs")
        await self.proxy.__aenter__()

    async def stop(self) -> None:
        await self.proxy.__aexit__(None, None, None)
        await self.fake.stop()

    def connect(self) -> Connector:
        small = {"max_answer_bytes": 2 << 20, "max_file_bytes": 2 << 20}
        settings = tuned(broken_s=0.5, unreachable_s=2.0, request_s=2.0, **small)
        return ComfyCloud(self.proxy.url, settings)

    def payload(self, mark: int) -> dict[str, Any]:
        picture = {"width": 8, "height": 8, "batch_size": 1, "color": mark}
        slow = {"steps": 2, "step_seconds": 0.01, "preview": True, "seed": mark}
        return {
            "1": {"class_type": "EmptyImage", "inputs": picture},
            "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "made"}},
            "3": {"class_type": "LabSlow", "inputs": slow},
            "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "slow"}},
            "5": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MODEL}},
            "6": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
            "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["5", 2]}},
            "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": "model"}},
        }

    async def made_from(self, result: JobResult, connector: Connector, folder: Path) -> int:
        (file,) = (file for file in result.files if file.node_id == "2")
        assert isinstance(connector, OutputSource)
        await connector.save(file, folder / "picture.png")
        return color_of((folder / "picture.png").read_bytes())

    async def hold(self) -> None:
        self.fake.card_faults.hold = "LabSlow"

    async def release(self) -> None:
        self.fake.card_faults.hold = None

    def runs(self, mark: int) -> Sequence[RunState]:
        marks = {prompt_id_of(job.attempt_id) for job in self.jobs.get(mark, ())}
        stranger = self._strangers.get(mark)
        return [
            self._state(job)
            for job in self.fake.jobs.values()
            if job is stranger or job.graph["1"].get("_meta", {}).get("comfyfleet") in marks
        ]

    def _state(self, job: CloudJob) -> RunState:
        stopped: RunState = "removed" if job.started_at is None else "stopped"
        return _STATES.get(job.status, stopped)

    async def start_stranger(self, mark: int) -> None:
        self._strangers[mark] = self.fake.submit_as_other(self.payload(mark))

    async def cause(self, fault: ConnectorFault) -> None:
        faults, cards = self.fake.faults, self.fake.card_faults
        self.proxy.redirect_to = self.elsewhere
        match fault:
            case ConnectorFault.RUN_FAILS:
                cards.fail_nodes = [NodeFault(class_type="EmptyImage", message="no paint")]
            case ConnectorFault.OUT_OF_MEMORY:
                cards.out_of_memory = 1
            case ConnectorFault.MISSING_MODEL:
                cards.missing_models = [MODEL]
            case ConnectorFault.WRONG_KEY:
                faults.is_key_refused = faults.echoes_key = True
            case ConnectorFault.OUT_OF_CREDITS:
                self.fake.give_credits(-self.fake.credits)
            case ConnectorFault.NEVER_STARTS:
                faults.never_starts = True
            case ConnectorFault.STALLS:
                await self.hold()
            case ConnectorFault.LOST_BEFORE_ACCEPTANCE:
                faults.lose_before = 1
            case ConnectorFault.LOST_AFTER_ACCEPTANCE:
                faults.lose_after = 1
            case ConnectorFault.LOST_IN_RUN:
                await self.proxy.cut()
            case ConnectorFault.ENDLESS_ANSWER:
                self.proxy.everything = ProxyMode.ENDLESS
            case ConnectorFault.GARBAGE_ANSWER:
                self.proxy.everything = ProxyMode.GARBAGE
            case ConnectorFault.REDIRECT:
                self.proxy.everything = ProxyMode.REDIRECT
            case ConnectorFault.ENDLESS_OUTPUT:
                faults.are_outputs_endless = True
            case _:
                raise AssertionError(f"{fault} cannot be caused here")

    async def repair(self) -> None:
        self.proxy.pass_all()
        faults, cards = self.fake.faults, self.fake.card_faults
        faults.lose_before = faults.lose_after = cards.out_of_memory = 0
        faults.is_key_refused = faults.echoes_key = faults.are_outputs_endless = False
        cards.fail_nodes, cards.missing_models = [], []
        self.fake.give_credits(max(0.0, 100.0 - self.fake.credits))
        self.fake.let_start()


def graph(mark: int, checkpoint: str = MODEL) -> dict[str, Any]:
    return {
        **ComfyCloudScene().payload(mark),
        "5": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
    }


class TestComfyCloudPlugin(ConnectorPluginContract):
    plugin = PLUGIN
    address = "https://cloud.comfy.org"
    settings = SETTINGS
    wrong_addresses = (
        "ftp://host",
        "https://",
        "http://cloud.comfy.org",
        "https://me:secret@cloud.comfy.org",
    )
    same = (graph(1), graph(2))
    other = ({"1": graph(1)["1"], "2": graph(1)["2"]}, graph(1, checkpoint="other.ckpt"))
    wrong = (
        ("class_type", {"1": {"inputs": {}}}),
        ("inputs", {"1": {"class_type": "EmptyImage", "inputs": 7}}),
    )


class TestComfyCloudConnector(ConnectorContract):
    @pytest.fixture
    def make_scene(self) -> MakeScene:
        return ComfyCloudScene
