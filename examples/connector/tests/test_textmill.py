"""TextMill's connector keeps the contract of connectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from textmill.connector import PLUGIN, TextMillFormat
from textmill.service import TextMill

from comfyfleet.model.job import JobResult
from comfyfleet.ports import Connector
from comfyfleet.testing.contract.connector import ConnectorContract, MakeScene
from comfyfleet.testing.contract.connector_plugin import ConnectorPluginContract
from comfyfleet.testing.contract.connector_scene import (
    ConnectorAbility,
    ConnectorFault,
    ConnectorScene,
    DeliveryPromise,
    RunState,
)
from comfyfleet.testing.faulty_proxy import FaultyProxy, ProxyMode

STATES: dict[str, RunState] = {
    "done": "completed",
    "failed": "failed",
    "running": "running",
    "waiting": "waiting",
}
MODES = {
    ConnectorFault.LOST_BEFORE_ACCEPTANCE: ProxyMode.CUT_BEFORE,
    ConnectorFault.LOST_AFTER_ACCEPTANCE: ProxyMode.CUT_AFTER,
    ConnectorFault.NEVER_ACCEPTS: ProxyMode.SILENT,
    ConnectorFault.ENDLESS_ANSWER: ProxyMode.ENDLESS,
    ConnectorFault.GARBAGE_ANSWER: ProxyMode.GARBAGE,
    ConnectorFault.REDIRECT: ProxyMode.REDIRECT,
    ConnectorFault.WRONG_KEY: ProxyMode.REFUSE,
}
OF_A_SUBMIT = list(MODES)[:3]
CANNOT = {
    ConnectorAbility.MAKES_FILES: "its results are texts",
    ConnectorFault.ENDLESS_OUTPUT: "its results are texts",
    ConnectorFault.OUT_OF_MEMORY: "a text needs no memory to speak of",
    ConnectorFault.OUT_OF_CREDITS: "it costs nothing",
}


class TextMillScene(ConnectorScene):
    service = "textmill"
    promise = DeliveryPromise.EXACTLY_ONCE
    payload_format = TextMillFormat()
    secret = "the-secret-key"
    cannot = CANNOT

    async def start(self) -> None:
        self.lost: list[TextMill] = []
        self.port = 0
        await self._boot()
        self.proxy = FaultyProxy(self.port, lambda request: request.method == "PUT")
        await self.proxy.__aenter__()

    async def _boot(self) -> None:
        self.mill = TextMill(step_seconds=0.005)
        self.runner = web.AppRunner(self.mill.app(), shutdown_timeout=0.01)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        await self.proxy.__aexit__(None, None, None)
        await self.runner.cleanup()

    def connect(self) -> Connector:
        settings = {"key": self.secret, "request_s": 1.0, "poll_s": 0.01, "gone_s": 1.0}
        return PLUGIN.connect(self.proxy.url, settings)

    def payload(self, mark: int) -> dict[str, Any]:
        return {"style": "mirror", "text": f"mark {mark}"}

    async def made_from(self, result: JobResult, _connector: Connector, _folder: Path) -> int:
        return int(result.outputs["text"]["text"][0][::-1].removeprefix("mark "))

    async def hold(self) -> None:
        self.mill.may_run.clear()

    async def release(self) -> None:
        self.mill.may_run.set()

    def runs(self, mark: int) -> Sequence[RunState]:
        def state(job: Any, is_lost: bool) -> RunState:
            if job.state == "stopped":
                return "stopped" if job.done else "removed"
            return "failed" if is_lost and job.state != "done" else STATES[job.state]

        return [
            state(job, mill is not self.mill)
            for mill in (*self.lost, self.mill)
            for job in mill.jobs.values()
            if job.text == f"mark {mark}"
        ]

    async def start_stranger(self, mark: int) -> None:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{self.port}/jobs/stranger-{mark}"
            async with session.put(url, json=self.payload(mark)) as response:
                assert response.status == 200

    async def cause(self, fault: ConnectorFault) -> None:
        if fault is ConnectorFault.RUN_FAILS:
            self.mill.styles["mirror"] = _breaks
        elif fault is ConnectorFault.MISSING_MODEL:
            del self.mill.styles["mirror"]
        elif fault is ConnectorFault.NEVER_STARTS:
            self.mill.may_start.clear()
        elif fault is ConnectorFault.STALLS:
            await self.hold()
        elif fault in (ConnectorFault.CRASH, ConnectorFault.RESTART):
            await self.runner.cleanup()
            await self.proxy.__aexit__(None, None, None)
            self.lost.append(self.mill)
            if fault is ConnectorFault.RESTART:
                await self.repair()
        elif fault is ConnectorFault.LOST_IN_RUN:
            await self.proxy.cut()
        elif fault in OF_A_SUBMIT:
            # aiohttp repeats a PUT by itself.
            self.proxy.next_submit, self.proxy.submits = MODES[fault], 2
        else:
            self.proxy.redirect_to = self.elsewhere
            self.proxy.everything = MODES[fault]

    async def repair(self) -> None:
        self.proxy.pass_all()
        if self.mill in self.lost:
            await self._boot()
            await self.proxy.__aenter__()
        self.mill.styles.update(TextMill().styles)
        self.mill.may_start.set()


def _breaks(_text: str) -> str:
    raise ValueError("the mirror is broken")


class TestTextMill(ConnectorContract):
    @pytest.fixture
    def make_scene(self) -> MakeScene:
        return TextMillScene


class TestTextMillPlugin(ConnectorPluginContract):
    plugin = PLUGIN
    address = "http://127.0.0.1:9"
    wrong_addresses = ("", "somewhere", "ftp://host")
    same = ({"style": "shout", "text": "one"}, {"style": "shout", "text": "two"})
    other = ({"style": "whisper", "text": "one"},)
    wrong = (
        ("style", {"text": "one"}),
        ("text", {"style": "shout", "text": 1}),
        ("colour", {"style": "shout", "text": "one", "colour": "red"}),
    )
