"""The A1111 connector keeps the contract of connectors against the fake server, also that of SD.Next."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from PIL import Image
from tests.worker._a1111 import QUICK

from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import JobResult
from comfyfleet.ports import Connector, OutputSource
from comfyfleet.testing.contract.connector import ConnectorContract, MakeScene
from comfyfleet.testing.contract.connector_scene import (
    ConnectorAbility,
    ConnectorFault,
    ConnectorScene,
    DeliveryPromise,
    RunState,
)
from comfyfleet.testing.fake_a1111 import (
    FakeA1111,
    FakeA1111Settings,
    FakeSubject,
    drawn_pixels,
    pixels_of,
)
from comfyfleet.testing.faulty_proxy import FaultyProxy, ProxyMode
from comfyfleet.worker.connectors.a1111 import A1111, PLUGIN

MODEL = "other.safetensors"
STEPS = 12
_STATES: Mapping[str, RunState] = {"interrupted": "stopped", "died": "failed"}
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
CANNOT: dict[Any, str] = {
    ConnectorFault.OUT_OF_CREDITS: "the web UI asks for no money",
    ConnectorFault.NEVER_STARTS: "a request that waits for the lock of the server cannot be taken back",
    ConnectorFault.ENDLESS_OUTPUT: "pictures come inside the answer to the run, which is bounded",
    ConnectorAbility.CONTINUES: "the server sends a result once, to the request that is open",
    ConnectorAbility.KEEPS_RESULTS: "the server keeps no result",
}
SD_NEXT_CANNOT: dict[Any, str] = {
    **CANNOT,
    ConnectorAbility.CANCEL_RUNNING: "SD.Next knows no task ids, so a run cannot be told from that of a stranger",
    ConnectorAbility.TELLS_BOOT: "without task ids a restart that refused no connection leaves no sign",
}


class A1111Scene(ConnectorScene):
    service = "a1111"
    promise = DeliveryPromise.AT_LEAST_ONCE
    secret = "the-secret-password"
    cannot = CANNOT
    payload_format = PLUGIN.payload
    settings = FakeA1111Settings(step_seconds=0.01, load_seconds=0.01)

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeA1111(self.settings)
        self.proxy: FaultyProxy
        self._strangers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.fake.start()
        paths = ("/sdapi/v1/txt2img",)
        self.proxy = FaultyProxy(self.fake.port, lambda it: it.method == "POST" and it.path in paths)
        await self.proxy.__aenter__()

    async def stop(self) -> None:
        await self.proxy.__aexit__(None, None, None)
        await self.fake.stop()
        for stranger in self._strangers:
            stranger.cancel()
        await asyncio.gather(*self._strangers, return_exceptions=True)

    def connect(self) -> Connector:
        small = {"max_answer_bytes": 2 << 20, "max_message_bytes": 2 << 20, "max_file_bytes": 2 << 20}
        settings = msgspec.structs.replace(QUICK, user="me", password=self.secret, broken_s=0.5, **small)
        return A1111(self.proxy.url, settings)

    def payload(self, mark: int) -> dict[str, Any]:
        options = {"sd_model_checkpoint": MODEL}
        body = {"prompt": f"number {mark}", "seed": 7, "steps": STEPS, "sampler_name": "Euler"}
        return {"route": "txt2img", "body": {**body, "override_settings": options}}

    async def made_from(self, result: JobResult, connector: Connector, folder: Path) -> int:
        (file,) = result.files
        assert isinstance(connector, OutputSource)
        path = folder / "picture.png"
        await connector.save(file, path)
        content = await asyncio.to_thread(path.read_bytes)
        with Image.open(io.BytesIO(content)) as picture:
            found = re.match(r"number (\d+)\n", picture.info["parameters"])
        assert found is not None
        subject = FakeSubject(prompt=found[0].strip(), seed=7, model="other", steps=STEPS)
        assert pixels_of(content) == drawn_pixels(subject)
        return int(found[1])

    async def hold(self) -> None:
        self.fake.faults.stall_at_step = STEPS // 2

    async def release(self) -> None:
        self.fake.faults.stall_at_step = None
        self.fake.recheck_faults()

    def runs(self, mark: int) -> Sequence[RunState]:
        begun = [
            _STATES.get(run.outcome, run.outcome)
            for run in self.fake.runs
            if run.body["prompt"] == f"number {mark}"
        ]
        ids = {prompt_id_of(job.attempt_id) for job in self.jobs.get(mark, ())}
        waiting = ids & self.fake.process.tasks.pending.keys() if self.fake.is_up else set()
        return [*begun, *["waiting"] * len(waiting)]  # type: ignore[list-item]

    async def start_stranger(self, mark: int) -> None:
        async def run() -> None:
            async with aiohttp.ClientSession() as session:
                url = f"{self.fake.url}/sdapi/v1/txt2img"
                async with session.post(url, json=self.payload(mark)["body"]) as response:
                    await response.read()

        count = self.fake.requests.get("/sdapi/v1/txt2img", 0)
        self._strangers.add(asyncio.create_task(run()))
        async with asyncio.timeout(60):
            while self.fake.requests.get("/sdapi/v1/txt2img", 0) == count:
                await asyncio.sleep(0.001)

    async def cause(self, fault: ConnectorFault) -> None:
        faults = self.fake.faults
        match fault:
            case ConnectorFault.RUN_FAILS:
                faults.fail_runs = 1
            case ConnectorFault.OUT_OF_MEMORY:
                faults.out_of_memory = 1
            case ConnectorFault.MISSING_MODEL:
                faults.missing_checkpoints = [MODEL]
            case ConnectorFault.STALLS:
                await self.hold()
            case ConnectorFault.CRASH:
                await self.fake.crash()
                await self.proxy.__aexit__(None, None, None)
            case ConnectorFault.RESTART:
                await self.fake.restart()
                await self.proxy.cut()
            case ConnectorFault.LOST_IN_RUN:
                await self.proxy.cut()
            case _:
                self.proxy.redirect_to = self.elsewhere
                if fault in _OF_A_SUBMIT:
                    self.proxy.next_submit = _MODES[fault]
                else:
                    self.proxy.everything = _MODES[fault]

    async def repair(self) -> None:
        self.proxy.pass_all()
        self.fake.faults.missing_checkpoints = []
        self.fake.faults.fail_runs = self.fake.faults.out_of_memory = 0
        if not self.fake.is_up:
            await self.fake.start(port=self.fake.port)
            await self.proxy.__aenter__()


class SdNextScene(A1111Scene):
    settings = FakeA1111Settings(
        flavour="sdnext", step_seconds=0.01, load_seconds=0.01, requests_per_minute=100_000
    )
    cannot = SD_NEXT_CANNOT


class TestA1111Connector(ConnectorContract):
    @pytest.fixture
    def make_scene(self) -> MakeScene:
        return A1111Scene


class TestSdNextConnector(ConnectorContract):
    @pytest.fixture
    def make_scene(self) -> MakeScene:
        return SdNextScene
