"""Who an agent is to the other side: the same where it runs again, and nobody else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.engine._rig import Rig
from tests.worker._scripted import until

from comfyfleet.model.ids import WorkerId
from comfyfleet.worker.agent import Agent, AgentSettings, AgentStatus
from comfyfleet.worker.connectors.simulated import SimulatedConnector
from comfyfleet.worker.journal import Journal

GPU = WorkerId("gpu")
QUICK = AgentSettings(backoff_base_s=0.01, backoff_cap_s=0.05)


def agent(rig: Rig, machine: Path) -> Agent:
    return Agent(rig.engine, GPU, [SimulatedConnector()], QUICK, journal=Journal(machine, GPU))


def test_a_journal_says_who_it_is_at_each_start_and_another_where_it_is_open_already(tmp_path: Path) -> None:
    first, second = Journal(tmp_path / "a", GPU), Journal(tmp_path / "b", GPU)
    first.open()
    second.open()
    assert first.instance and second.instance and first.instance != second.instance
    beside = Journal(tmp_path / "a", GPU)
    beside.open()
    assert beside.instance not in ("", first.instance, second.instance), (
        "on one machine, and at the same time"
    )
    first.close()
    again = Journal(tmp_path / "a", GPU)
    again.open()
    assert again.instance == first.instance
    for journal in (again, second, beside):
        journal.close()


async def test_a_second_machine_with_the_same_name_says_what_to_do_and_takes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with Rig() as rig, agent(rig, tmp_path / "here") as here:
        await until(lambda: here.state.status is AgentStatus.ONLINE)
        async with agent(rig, tmp_path / "there") as there:
            await until(lambda: "--name" in caplog.text)
            assert there.state.status is not AgentStatus.ONLINE
            assert caplog.text.count("--name") == 1, "said once"
            await here.stop()
            await until(lambda: there.state.status is AgentStatus.ONLINE)
