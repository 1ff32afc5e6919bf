"""The LangFlow connector keeps the contract of connectors, with the fake LangFlow behind a proxy that loses things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.worker._langflow import tuned

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
from comfyfleet.testing.contract.payload_format import PayloadFormatContract
from comfyfleet.testing.fake_langflow import FakeLangFlow, FakeLangFlowSettings
from comfyfleet.testing.fake_langflow.run import RunRequest
from comfyfleet.testing.faulty_proxy import FaultyProxy, ProxyMode
from comfyfleet.worker.connectors.langflow import LangFlow, LangFlowPayload

FLOW = "lab-picture"
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
_STATES: dict[str, RunState] = {
    "queued": "waiting",
    "in_progress": "running",
    "completed": "completed",
    "failed": "failed",
}
_OLDER = "LangFlow before 1.11 has no background jobs: a run lives as long as its request"


class LangFlowScene(ConnectorScene):
    service = "langflow"
    promise = DeliveryPromise.EXACTLY_ONCE
    secret = "the-secret-key"
    payload_format = LangFlowPayload()
    cannot: Mapping[Any, str] = {ConnectorFault.OUT_OF_CREDITS: "a LangFlow server asks for no money"}
    version = "1.13.0"

    def __init__(self) -> None:
        super().__init__()
        # One job at a time, so that others wait.
        self.fake = FakeLangFlow(
            FakeLangFlowSettings(version=self.version, key=self.secret, max_concurrency=1)
        )
        self.proxy: FaultyProxy

    async def start(self) -> None:
        await self.fake.start()
        paths = ("/api/v2/workflows", "/api/v1/run")
        port = int(self.fake.url.rpartition(":")[2])
        self.proxy = FaultyProxy(
            port, lambda it: it.method == "POST" and it.path.startswith(paths) and "stop" not in it.path
        )
        await self.proxy.__aenter__()

    async def stop(self) -> None:
        await self.proxy.__aexit__(None, None, None)
        await self.fake.kill()

    def connect(self) -> Connector:
        small = {"max_answer_bytes": 2 << 20, "max_message_bytes": 2 << 20, "max_file_bytes": 2 << 20}
        return LangFlow(self.proxy.url, tuned(key=self.secret, **small))

    def payload(self, mark: int) -> dict[str, Any]:
        return {"flow": FLOW, "input_value": str(mark), "tweaks": {"ChatOutput-z": {"sender_name": "Ada"}}}

    async def made_from(self, result: JobResult, connector: Connector, folder: Path) -> int:
        (file,) = result.files
        assert isinstance(connector, OutputSource)
        await connector.save(file, folder / "output.txt")
        saved = (folder / "output.txt").read_text().removeprefix("made from: ")
        content = result.outputs["ChatOutput-z"]["content"]
        assert content == f"drew {saved}"
        return int(saved)

    async def hold(self) -> None:
        self.fake.faults.holds = True

    async def release(self) -> None:
        self.fake.faults.holds = False

    def runs(self, mark: int) -> Sequence[RunState]:
        jobs = [job for job in self.fake.jobs.by_id.values() if job.request.input_value == str(mark)]
        return [_STATES.get(job.state) or ("stopped" if job.has_begun else "removed") for job in jobs]

    async def start_stranger(self, mark: int) -> None:
        flow = self.fake.find_flow(FLOW)
        assert flow is not None
        body = {"flow_id": flow.flow_id, "input_value": str(mark), "mode": "background"}
        url, headers = f"{self.fake.url}/api/v2/workflows", {"x-api-key": str(self.secret)}
        async with aiohttp.request("POST", url, json=body, headers=headers) as response:
            assert response.status == 200

    async def cause(self, fault: ConnectorFault) -> None:
        faults = self.fake.faults
        match fault:
            case ConnectorFault.RUN_FAILS:
                faults.fail_runs = 1
            case ConnectorFault.OUT_OF_MEMORY:
                faults.out_of_memory = 1
            case ConnectorFault.MISSING_MODEL:
                faults.missing_flows = frozenset({FLOW})
            case ConnectorFault.NEVER_STARTS:
                faults.forgets_submits = -1
            case ConnectorFault.CRASH:
                await self.fake.kill()
                await self.proxy.__aexit__(None, None, None)
            case ConnectorFault.STALLS:
                await self.hold()
            case ConnectorFault.RESTART:
                await self.fake.restart()
                await self.proxy.cut()
            case ConnectorFault.LOST_IN_RUN:
                await self.proxy.cut()
            case ConnectorFault.ENDLESS_OUTPUT:
                faults.endless_answers = "/files/download"
            case _:
                self.proxy.redirect_to = self.elsewhere
                if fault in _OF_A_SUBMIT:
                    self.proxy.next_submit = _MODES[fault]
                else:
                    self.proxy.everything = _MODES[fault]

    async def repair(self) -> None:
        self.proxy.pass_all()
        faults = self.fake.faults
        faults.fail_runs = faults.out_of_memory = faults.forgets_submits = 0
        faults.missing_flows, faults.endless_answers = frozenset(), None
        if not self.fake.is_up:
            await self.fake.start()
            await self.proxy.__aenter__()


class TestLangFlowConnector(ConnectorContract):
    @pytest.fixture
    def make_scene(self) -> MakeScene:
        return LangFlowScene


class OlderLangFlowScene(LangFlowScene):
    version = "1.10.0"
    promise = DeliveryPromise.AT_LEAST_ONCE
    cannot: Mapping[Any, str] = {
        **LangFlowScene.cannot,
        ConnectorFault.NEVER_STARTS: _OLDER,
        ConnectorAbility.WAITING: _OLDER,
        ConnectorAbility.CANCEL_WAITING: _OLDER,
        ConnectorAbility.CONTINUES: _OLDER,
        ConnectorAbility.SURVIVES_AGENT: _OLDER,
        ConnectorAbility.KEEPS_RESULTS: _OLDER,
    }

    def runs(self, mark: int) -> Sequence[RunState]:
        return [run.state for run in self.fake.direct_runs.all if run.text == str(mark)]

    async def start_stranger(self, mark: int) -> None:
        flow = self.fake.find_flow(FLOW)
        assert flow is not None
        asked = RunRequest(input_value=str(mark), session="stranger")
        self.fake.direct_runs.start(flow, asked, lambda *_: None)


class TestOlderLangFlowConnector(ConnectorContract):
    @pytest.fixture
    def make_scene(self) -> MakeScene:
        return OlderLangFlowScene


class TestLangFlowPayload(PayloadFormatContract):
    payload_format = LangFlowPayload()
    same = (
        {"flow": "lab-echo", "input_value": "a", "tweaks": {"ChatInput-a": {"files": []}}},
        {"flow": "lab-echo", "input_value": "b", "tweaks": {"ChatInput-a": {"files": ["x"]}}},
        {
            "flow": "lab-echo",
            "tweaks": {"ChatInput-a": {"files": {}}},
            "session_id": "s",
            "output_ids": ["o"],
        },
    )
    other = (
        {"flow": "lab-echo"},
        {"flow": "lab-sleep"},
        {"flow": "lab-echo", "tweaks": {"ChatInput-a": {"sender_name": "Ada"}}},
        {"flow": "lab-echo", "tweaks": {"ChatInput-b": {"files": []}}},
    )
    wrong = (
        ("flow", {"input_value": "a"}),
        ("flow", {"flow": " "}),
        ("flow", {"flow": 3}),
        ("input_value", {"flow": "f", "input_value": 3}),
        ("input_type", {"flow": "f", "input_type": "picture"}),
        ("output_type", {"flow": "f", "output_type": None}),
        ("tweaks", {"flow": "f", "tweaks": []}),
        ("seconds", {"flow": "f", "tweaks": {"seconds": 3}}),
        ("LabSleep-m.code", {"flow": "f", "tweaks": {"LabSleep-m": {"code": "import os"}}}),
        ("globals", {"flow": "f", "globals": "x"}),
        ("KEY", {"flow": "f", "globals": {"KEY": 3}}),
        ("KEY", {"flow": "f", "globals": {"KEY": "two\nlines"}}),
        ("session_id", {"flow": "f", "session_id": ""}),
        ("output_ids", {"flow": "f", "output_ids": "ChatOutput-z"}),
        ("data", {"flow": "f", "data": {"nodes": []}}),
        ("graph", {"flow": "f", "graph": {}}),
    )
