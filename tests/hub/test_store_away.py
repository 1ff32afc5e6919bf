"""A store that is away is one line in the log for each thing that could not be done, about the right request."""

from __future__ import annotations

import asyncio
import inspect
import logging
from pathlib import Path

import pytest
from tests.hub._hub import hub_in_process, submission
from tests.worker._scripted import quick, until

from comfyfleet import tracing
from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import WorkerId
from comfyfleet.policy.rules import Rules
from comfyfleet.tracing import in_background, log_failure
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.simulated import SimulatedConnector, hangs
from comfyfleet.worker.journal import Journal

LOG = logging.getLogger("somebody")


def told(caplog: pytest.LogCaptureFixture, error: Exception) -> logging.LogRecord:
    caplog.clear()
    try:
        raise error
    except Exception:
        log_failure(LOG, "job %s could not be attended to; it is tried again", "j1")
    (record,) = caplog.records
    return record


def test_a_fault_is_one_line_and_a_defect_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    record = told(caplog, Fault("the store does not answer"))
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.getMessage().endswith("it is tried again: the store does not answer")
    both = told(caplog, ExceptionGroup("several", [Fault("away"), Fault("away")]))
    assert both.levelname == "WARNING" and both.getMessage().endswith("again: away")
    mixed = told(caplog, ExceptionGroup("several", [Fault("away"), KeyError("x")]))
    assert mixed.levelname == "ERROR" and mixed.exc_info is not None
    defect = told(caplog, KeyError("x"))
    assert defect.levelname == "ERROR" and defect.exc_info is not None


async def test_work_in_the_background_is_about_no_request() -> None:
    async def look() -> dict[str, str]:
        return tracing.fields()

    with tracing.log_fields(request_id="mine"):
        assert await in_background(look(), name="look") == {}
        assert tracing.fields() == {"request_id": "mine"}


async def test_a_store_that_goes_away_leaves_no_traceback_and_names_no_unrelated_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Abouts(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            record.about = tracing.fields()
            return True

    def of_engine() -> list[logging.LogRecord]:
        return [each for each in caplog.records if each.name.startswith("comfyfleet.engine")]

    caplog.handler.addFilter(Abouts())
    async with hub_in_process(rules=Rules(round_s=0.05, sweep_s=0.05)) as rig:
        store = rig.engine.store

        async def away(*_: object, **__: object) -> None:
            raise Fault("the store is away")

        body = {"worker_id": "gpu", "capabilities": {"services": ["comfyui"]}}
        await rig.post("/api/worker/register", body, role=Role.WORKER)
        poll = {"worker_id": "gpu", "poll_id": "1", "wait_s": 20}
        sent = rig.post("/api/worker/poll", poll, role=Role.WORKER, headers={"x-request-id": "the-poll"})
        parked = asyncio.ensure_future(sent)
        await until(lambda: rig.hub.connection_limits.counts()["poll"] == 1)
        for name in dir(type(store)):
            if not name.startswith("_") and inspect.iscoroutinefunction(getattr(store, name)):
                monkeypatch.setattr(store, name, away)
        refused = await rig.post("/api/jobs", submission(), headers={"x-request-id": "the-job"})
        assert refused.status == 503
        await until(lambda: bool(of_engine()))
        monkeypatch.undo()
        rig.hub.stop()
        await parked
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    for record in of_engine():
        assert "the store is away" in record.getMessage()
        assert "request_id" not in vars(record)["about"], record.getMessage()


async def test_a_hub_whose_store_refuses_everything_closes_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engine, hub, deliveries, audit log, the agent of a server and its journal, while all of them are busy."""

    async def full(*_: object, **__: object) -> None:
        raise Fault("the store could not write: the disk is full")

    rules = Rules(round_s=0.02, sweep_s=0.02)
    connector = SimulatedConnector(behaviour=hangs())
    journal = Journal(tmp_path / "journal", WorkerId("gpu"))
    async with hub_in_process(rules=rules, store_url=f"sqlite:///{tmp_path}/fleet.db") as rig:
        serving = HubServer(rig.hub, HubServerSettings(port=0))
        async with serving:
            agent = Agent(rig.engine, WorkerId("gpu"), [connector], quick(stop_grace_s=0.1), journal=journal)
            await agent.start()
            for _ in range(6):
                assert (await rig.post("/api/jobs", submission())).status == 201
            await until(lambda: connector.runs)
            store = rig.engine.store
            for part in (store, store.records, store.documents):
                for name in dir(type(part)):
                    is_call = inspect.iscoroutinefunction(getattr(type(part), name, None))
                    if is_call and not name.startswith("_") and name not in ("open", "close"):
                        monkeypatch.setattr(part, name, full)
            assert (await rig.post("/api/jobs", submission())).status in (503, 507)
            await agent.stop()
    monkeypatch.undo()
    assert [each for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR] == []
    assert [each for each in caplog.records if "could not be reported" in each.getMessage()]
    # Its file is free again, and the next start knows what ran.
    assert [begun.service for begun in journal.open()] == ["comfyui"]
    journal.close()
    async with hub_in_process(store_url=f"sqlite:///{tmp_path}/fleet.db") as rig:
        stats = await rig.engine.stats()
        assert (stats.waiting, stats.leased) == (5, 1)
