"""The simulated connector keeps the contract of connectors, as far as a connector without a server can."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.canonical_json import canonical_json
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service
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
from comfyfleet.worker.connectors.simulated import PLUGIN, Reporter, SimulatedConnector, follows_payload
from comfyfleet.worker.connectors.simulated_payload import SimulatedFormat

MODEL = "base.safetensors"
NO_SERVER = "there is no server: the run is in the connector"
NO_WIRE = "there is no connection that could break or lie"
_FAILURES = {
    ConnectorFault.RUN_FAILS: FailureKind.NODE_ERROR,
    ConnectorFault.OUT_OF_MEMORY: FailureKind.OUT_OF_MEMORY,
}
CANNOT: dict[ConnectorAbility | ConnectorFault, str] = {
    **dict.fromkeys(
        (
            ConnectorAbility.STRANGERS,
            ConnectorAbility.WAITING,
            ConnectorAbility.CONTINUES,
            ConnectorAbility.SURVIVES_AGENT,
            ConnectorAbility.KEEPS_RESULTS,
            ConnectorFault.CRASH,
            ConnectorFault.RESTART,
            ConnectorFault.NEVER_ACCEPTS,
            ConnectorFault.NEVER_STARTS,
        ),
        NO_SERVER,
    ),
    **dict.fromkeys(
        (
            ConnectorFault.LOST_BEFORE_ACCEPTANCE,
            ConnectorFault.LOST_AFTER_ACCEPTANCE,
            ConnectorFault.LOST_IN_RUN,
            ConnectorFault.ENDLESS_ANSWER,
            ConnectorFault.GARBAGE_ANSWER,
            ConnectorFault.REDIRECT,
            ConnectorFault.ENDLESS_OUTPUT,
        ),
        NO_WIRE,
    ),
    ConnectorAbility.MAKES_FILES: "its results are values",
    ConnectorAbility.TELLS_VERSION: "it simulates no release",
    ConnectorFault.STALLS: "it keeps no time limits: its behaviour decides when a run ends",
    ConnectorFault.WRONG_KEY: "it asks for no key",
    ConnectorFault.OUT_OF_CREDITS: "it costs nothing",
    ConnectorFault.MISSING_MODEL: "it simulates the run of any model",
}


class SimulatedScene(ConnectorScene):
    service = "simulated"
    promise = DeliveryPromise.AT_LEAST_ONCE
    payload_format = SimulatedFormat()
    cannot = CANNOT

    def __init__(self) -> None:
        super().__init__()
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._connectors: list[SimulatedConnector] = []
        self._failure: FailureKind | None = None

    async def start(self) -> None:
        """There is no server."""

    async def stop(self) -> None:
        """There is no server."""

    def connect(self) -> Connector:
        service = Service("simulated", models=frozenset({MODEL}))
        capabilities = Capabilities(services=(service,), is_fake=True)
        self._connectors.append(SimulatedConnector("simulated", capabilities, self._behave))
        return self._connectors[-1]

    async def _behave(self, job: LeasedJob, report: Reporter) -> JobResult:
        if self._failure is not None:
            raise ServiceFailed(Failure(self._failure, "told to fail"))
        return await follows_payload(0.0, sleep=self._sleep)(job, report)

    async def _sleep(self, _seconds: float) -> None:
        await self._may_go.wait()

    def payload(self, mark: int) -> dict[str, Any]:
        return {"outputs": {"made": {"mark": [mark]}}, "models": [MODEL], "steps": 2}

    async def made_from(self, result: JobResult, connector: Connector, folder: Path) -> int:
        (mark,) = result.outputs["made"]["mark"]
        assert isinstance(mark, int)
        payload = canonical_json(self.payload(mark))
        assert result.outputs["payload"]["sha256"] == [sha256(payload).hexdigest()]
        return mark

    async def hold(self) -> None:
        self._may_go.clear()

    async def release(self) -> None:
        self._may_go.set()

    def runs(self, mark: int) -> Sequence[RunState]:
        runs = [run for connector in self._connectors for run in connector.runs]
        states: list[RunState] = []
        for run in runs:
            if run.job.workflow == self.payload(mark):
                states.append("stopped" if run.state == "cancelled" else run.state)
        return states

    async def cause(self, fault: ConnectorFault) -> None:
        self._failure = _FAILURES[fault]

    async def repair(self) -> None:
        self._failure = None


class TestSimulatedConnector(ConnectorContract):
    @pytest.fixture
    def make_scene(self) -> MakeScene:
        return SimulatedScene


class TestSimulatedPlugin(ConnectorPluginContract):
    plugin = PLUGIN
    address = "0.5"
    wrong_addresses = ("", "fast", "-1", "nan", "inf")
    same = (
        {"seconds": 1, "outputs": {"a": {"text": ["one"]}}},
        {"seconds": 1, "outputs": {"a": {"text": ["two"]}}},
    )
    other = ({"seconds": 2}, {"models": ["base"]}, {"seed": -1, "steps": 3}, {"fail": {"kind": "crashed"}})
    wrong = (
        ("seconds", {"seconds": -1}),
        ("color", {"color": "red"}),
        ("fail.kind", {"fail": {"kind": "no such kind"}}),
        ("models[1]", {"models": ["base", 7]}),
    )
