"""The ComfyUI connector keeps the contract of connectors, with the fake ComfyUI behind a proxy that loses things."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from PIL import Image
from tests.worker._comfyui import QUICK

from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import JobResult
from comfyfleet.ports import Connector, OutputSource
from comfyfleet.testing.contract.connector import ConnectorContract, MakeScene
from comfyfleet.testing.contract.connector_plugin import ConnectorPluginContract
from comfyfleet.testing.contract.connector_scene import (
    ConnectorFault,
    ConnectorScene,
    DeliveryPromise,
    RunState,
)
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings, NodeFault
from comfyfleet.testing.faulty_proxy import FaultyProxy, ProxyMode
from comfyfleet.worker.connectors.comfyui import PLUGIN, ComfyUI
from comfyfleet.worker.connectors.comfyui.payload import ComfyUIFormat

MODEL = "sd15.safetensors"
_STATES: dict[str | None, RunState] = {"success": "completed", "error": "failed", "interrupted": "stopped"}
_MODES = {
    ConnectorFault.NEVER_ACCEPTS: ProxyMode.SILENT,
    ConnectorFault.LOST_BEFORE_ACCEPTANCE: ProxyMode.CUT_BEFORE,
    ConnectorFault.LOST_AFTER_ACCEPTANCE: ProxyMode.CUT_AFTER,
    ConnectorFault.WRONG_KEY: ProxyMode.REFUSE,
    ConnectorFault.ENDLESS_ANSWER: ProxyMode.ENDLESS,
    ConnectorFault.GARBAGE_ANSWER: ProxyMode.GARBAGE,
    ConnectorFault.REDIRECT: ProxyMode.REDIRECT,
}
_OF_A_SUBMIT = (
    ConnectorFault.NEVER_ACCEPTS,
    ConnectorFault.LOST_BEFORE_ACCEPTANCE,
    ConnectorFault.LOST_AFTER_ACCEPTANCE,
)
CANNOT = {ConnectorFault.OUT_OF_CREDITS: "a ComfyUI server asks for no money"}


class ComfyUIScene(ConnectorScene):
    service = "comfyui"
    promise = DeliveryPromise.EXACTLY_ONCE
    payload_format = ComfyUIFormat()
    secret = "the-secret-key"
    cannot = CANNOT

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeComfyUI(FakeSettings(version="0.33.0", load_seconds_per_gb=0.0, step_seconds=0.01))
        self.proxy: FaultyProxy
        self._strangers: dict[int, str] = {}

    async def start(self) -> None:
        await self.fake.start()
        self.proxy = FaultyProxy(self.fake.port, lambda it: it.method == "POST" and it.path == "/prompt")
        await self.proxy.__aenter__()

    async def stop(self) -> None:
        await self.proxy.__aexit__(None, None, None)
        await self.fake.stop()

    def connect(self) -> Connector:
        headers = {"Authorization": f"Bearer {self.secret}"}
        small = {"max_answer_bytes": 2 << 20, "max_message_bytes": 2 << 20, "max_file_bytes": 2 << 20}
        settings = msgspec.structs.replace(QUICK, headers=headers, broken_s=0.5, dead_worker_s=0.5, **small)
        return ComfyUI(self.proxy.url, settings)

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
        pixel = Image.open(folder / "picture.png").convert("RGB").getpixel((3, 3))
        assert isinstance(pixel, tuple)
        return int(pixel[0]) << 16 | int(pixel[1]) << 8 | int(pixel[2])

    async def hold(self) -> None:
        self.fake.faults.hold = "LabSlow"

    async def release(self) -> None:
        self.fake.faults.hold = None

    def runs(self, mark: int) -> Sequence[RunState]:
        ids = {prompt_id_of(job.attempt_id) for job in self.jobs.get(mark, ())}
        ids |= {self._strangers[mark]} if mark in self._strangers else set()
        machine = self.fake._machine
        waiting = {item[1] for item in machine.queue.pending} if machine else set()
        running = {item[1] for item in machine.queue.running.values()} if machine else set()
        begun = [
            "running"
            if run.outcome is None and run.prompt_id in running
            else _STATES.get(run.outcome, "failed")
            for run in self.fake.stats.prompt_log
            if run.prompt_id in ids
        ]
        left: list[RunState] = ["waiting"] * len(ids & waiting)
        return [*begun, *left]

    async def start_stranger(self, mark: int) -> None:
        async with aiohttp.ClientSession() as session:
            body = {"prompt": self.payload(mark), "client_id": "stranger"}
            async with session.post(f"{self.fake.url}/prompt", json=body) as response:
                assert response.status == 200
                self._strangers[mark] = (await response.json())["prompt_id"]

    async def cause(self, fault: ConnectorFault) -> None:
        faults = self.fake.faults
        match fault:
            case ConnectorFault.RUN_FAILS:
                faults.fail_nodes = [NodeFault(class_type="EmptyImage", message="no paint")]
            case ConnectorFault.OUT_OF_MEMORY:
                faults.out_of_memory = 1
            case ConnectorFault.MISSING_MODEL:
                faults.missing_models = [MODEL]
            case ConnectorFault.NEVER_STARTS:
                faults.never_start = True
            case ConnectorFault.CRASH:
                await self.fake.crash()
                await self.proxy.__aexit__(None, None, None)
            case ConnectorFault.STALLS:
                await self.hold()
            case ConnectorFault.RESTART:
                await self.fake.restart()
                await self.proxy.cut()
            case ConnectorFault.LOST_IN_RUN:
                await self.proxy.cut()
            case ConnectorFault.ENDLESS_OUTPUT:
                faults.endless_paths = ["/view"]
            case _:
                self.proxy.redirect_to = self.elsewhere
                if fault in _OF_A_SUBMIT:
                    self.proxy.next_submit = _MODES[fault]
                else:
                    self.proxy.everything = _MODES[fault]

    async def repair(self) -> None:
        self.proxy.pass_all()
        for name in ("fail_nodes", "missing_models", "endless_paths"):
            setattr(self.fake.faults, name, [])
        self.fake.faults.out_of_memory = 0
        self.fake.faults.never_start = False
        if not self.fake.is_up:
            await self.fake.restart()
            await self.proxy.__aenter__()


class TestComfyUIConnector(ConnectorContract):
    @pytest.fixture
    def make_scene(self) -> MakeScene:
        return ComfyUIScene


def _picture(color: int, seed: int = 7) -> dict[str, Any]:
    graph = ComfyUIScene().payload(color)
    graph["3"]["inputs"]["seed"] = seed
    return graph


class TestComfyUIPlugin(ConnectorPluginContract):
    plugin = PLUGIN
    address = "http://127.0.0.1:9"
    wrong_addresses = ("", "ftp://host", "http://")
    same = (_picture(1), _picture(2, seed=8))
    other = (
        {"1": _picture(1)["1"], "2": _picture(1)["2"]},
        {**_picture(1), "8": {"class_type": "PreviewImage", "inputs": {"images": ["7", 0]}}},
        {**_picture(1), "5": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "other.ckpt"}}},
    )
    wrong = (
        ("class_type", {"1": {"inputs": {}}}),
        ("inputs", {"1": {"class_type": "EmptyImage", "inputs": 7}}),
        ("2", {"2": {"class_type": "SaveImage", "inputs": {"images": ["9", 0]}}}),
    )
