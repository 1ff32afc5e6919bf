"""What an agent has begun outlives it: the next one goes on under the same lease, or clears away what is nobody's."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.worker._comfyui import QUICK as QUICK_COMFYUI
from tests.worker._comfyui import leased, slow
from tests.worker._scripted import WORKER, ScriptedApi, leased_job, quick, until

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import Timeouts
from comfyfleet.pool.options import Server
from comfyfleet.pool.servers import PoolAgents
from comfyfleet.ports import Connector
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.simulated import SimulatedConnector, hangs
from comfyfleet.worker.journal import Journal


def opened(folder: Path, name: str = WORKER) -> Journal:
    journal = Journal(folder, WorkerId(name))
    journal.open()
    return journal


def begin(journal: Journal, name: str) -> LeasedJob:
    job = leased_job(name)
    journal.begin(job.ref, job.service, PollId(f"poll-{name}"))
    return job


def left(folder: Path) -> list[str]:
    journal = Journal(folder, WORKER)
    try:
        return [begun.job_id for begun in journal.open()]
    finally:
        journal.close()


def file_in(folder: Path) -> Path:
    (found,) = folder.glob("*.jsonl")
    return found


# the file


def test_what_was_begun_and_not_ended_is_known_at_the_next_start(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    jobs = [begin(journal, name) for name in "abc"]
    journal.end(jobs[1].ref)
    journal.close()
    assert left(tmp_path) == ["a", "c"]


def test_a_torn_line_and_nonsense_cost_only_themselves(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    begin(journal, "a")
    begin(journal, "b")
    journal.close()
    path = file_in(tmp_path)
    path.write_bytes(b"\xff\x00{}\n[]\n" + path.read_bytes()[:-9])
    assert left(tmp_path) == ["a"]
    assert left(tmp_path) == ["a"], "the file was made whole"


def test_the_file_stays_small_however_much_is_run(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    kept = begin(journal, "kept")
    for number in range(3_000):
        journal.end(begin(journal, f"job-{number}").ref)
    assert len(file_in(tmp_path).read_bytes().splitlines()) < 1_100
    journal.close()
    assert left(tmp_path) == [kept.job_id]


def test_no_lease_token_is_in_it_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    journal = opened(tmp_path / "data")
    job = begin(journal, "a")
    journal.close()
    path = file_in(tmp_path / "data")
    assert job.ref.token.encode() not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_processes_of_one_name_do_not_share_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(tmp_path)
    begin(first, "a")
    second = Journal(tmp_path, WORKER)
    with caplog.at_level(logging.WARNING):
        assert second.open() == ()
    name, none = first.client_id, second.client_id
    assert name is not None and none is None, (
        "a server that knew both by one name would tell one of them alone"
    )
    assert "give every worker its own name" in caplog.text
    begin(second, "b")
    other = opened(tmp_path, "gpu-b")
    for journal in (first, second, other):
        journal.close()
    assert left(tmp_path) == ["a"]
    again = opened(tmp_path)
    assert again.client_id == name
    again.close()


def test_files_on_their_way_are_nobodys_after_a_crash(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    (journal.spool / "comfyfleet-abc").mkdir()
    (journal.spool / "comfyfleet-abc" / "output").write_bytes(b"half of it")
    journal.close()
    again = opened(tmp_path)
    assert list(again.spool.iterdir()) == []
    again.close()


@pytest.mark.parametrize(
    ("server", "has_one"),
    [
        (Server("http://gpu:1", id="gpu"), True),
        (Server(id="gpu", connector=ComfyUI("http://gpu:1")), True),
        (Server(id="gpu", connector=SimulatedConnector(), more=(ComfyUI("http://gpu:1"),)), True),
        (Server(id="gpu", connector=SimulatedConnector()), False),
    ],
)
def test_a_worker_has_one_where_something_may_outlive_it(
    tmp_path: Path, server: Server, has_one: bool
) -> None:
    assert (PoolAgents(lambda *_: None, journals=tmp_path).journal_of(server) is not None) == has_one


def test_a_folder_that_cannot_be_written_costs_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    journal = Journal(tmp_path / "file" / "journal", WORKER)
    with caplog.at_level(logging.WARNING):
        assert journal.open() == ()
    assert "cannot write its journal" in caplog.text
    journal.end(begin(journal, "a").ref)
    journal.close()


def test_a_disk_that_is_full_costs_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = opened(tmp_path)
    assert journal._file is not None
    journal._file.close()
    with Path("/dev/full").open("wb") as journal._file, caplog.at_level(logging.WARNING):
        begin(journal, "a")
    assert "No space left" in caplog.text
    assert not journal.is_persistent
    journal.close()


# the agent


@asynccontextmanager
async def agent_with_journal(
    api: ScriptedApi, folder: Path, *connectors: Connector, slots: int = 1
) -> AsyncIterator[Agent]:
    journal = Journal(folder, WORKER)
    async with Agent(api, WORKER, connectors, quick(slots=slots), journal=journal) as agent:
        yield agent


async def killed(agent: Agent) -> None:
    """As SIGKILL leaves it: nothing is said, given back or written any more."""
    tasks = set(agent._tasks)
    assert agent._journal is not None
    agent._journal.close()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_the_next_agent_asks_with_the_same_poll_and_goes_on_under_the_same_lease(
    tmp_path: Path,
) -> None:
    api, job = ScriptedApi(), leased_job()
    api.give(job)
    first = SimulatedConnector(behaviour=hangs())
    async with agent_with_journal(api, tmp_path, first) as agent:
        await until(lambda: first.run_count)
        await killed(agent)
    (poll,) = [call for call in api.named("poll") if call.poll_id in api._by_poll]
    api.calls.clear()
    second = SimulatedConnector()
    async with agent_with_journal(api, tmp_path, second):
        await until(lambda: api.named("complete"))
    assert api.named("poll")[0].poll_id == poll.poll_id
    assert api.named("complete")[0].ref == job.ref
    assert left(tmp_path) == []


async def test_what_lost_its_lease_is_stopped_at_the_service_before_anything_new_is_asked_for(
    tmp_path: Path,
) -> None:
    journal = opened(tmp_path)
    gone = begin(journal, "gone")
    journal.close()
    api, connector = ScriptedApi(), SimulatedConnector()
    async with agent_with_journal(api, tmp_path, connector):
        await until(lambda: len(api.named("poll")) > 1)
        assert [job.attempt_id for job in connector.cancels] == [gone.attempt_id]
    assert (connector.run_count, left(tmp_path)) == (0, [])


async def test_another_job_that_comes_for_the_old_poll_is_run_as_any_other(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    gone = begin(journal, "gone")
    journal.close()
    api, connector = ScriptedApi(), SimulatedConnector()
    api.give(leased_job("new"))
    async with agent_with_journal(api, tmp_path, connector, slots=3):
        await until(lambda: api.named("complete"))
    assert [job.job_id for job in connector.cancels] == [gone.job_id]
    assert [run.job.job_id for run in connector.runs] == ["new"]


async def test_what_was_begun_waits_for_its_own_service_while_others_work(tmp_path: Path) -> None:
    api, job = ScriptedApi(), leased_job("begun", service="slow-to-start")
    journal = opened(tmp_path)
    journal.begin(job.ref, job.service, PollId("poll-begun"))
    journal.close()
    api._by_poll[PollId("poll-begun")] = job
    up, down = SimulatedConnector(), SimulatedConnector("slow-to-start")
    down.is_healthy = False
    async with agent_with_journal(api, tmp_path, up, down):
        api.give(leased_job("other"))
        await until(lambda: api.named("complete"))
        assert [call.ref.job_id for call in api.named("complete")] == ["other"]
        await until(lambda: api.parked)
        down.go_online()
        await until(lambda: len(api.named("complete")) == 2)
    assert api.named("complete")[1].ref == job.ref
    assert (api.named("release"), left(tmp_path)) == ([], [])


async def test_what_was_begun_with_a_service_that_is_offered_no_more_goes_back_for_good(
    tmp_path: Path,
) -> None:
    api, job = ScriptedApi(), leased_job("begun", service="gone")
    journal = opened(tmp_path)
    journal.begin(job.ref, job.service, PollId("poll-begun"))
    journal.close()
    api._by_poll[PollId("poll-begun")] = api._given[job.ref] = job
    async with agent_with_journal(api, tmp_path, SimulatedConnector()):
        await until(lambda: api.named("release"))
    assert left(tmp_path) == []


@pytest.mark.parametrize("is_finished", [True, False])
async def test_a_prompt_that_comfyui_ran_on_with_is_not_submitted_again(
    tmp_path: Path, is_finished: bool
) -> None:
    # A run that the next agent could not hear of would seem to stall.
    timeouts = Timeouts(stall_s=0.6)
    api, job = ScriptedApi(), leased(slow(steps=20 if is_finished else 40), timeouts=timeouts)
    api.give(job)
    async with FakeComfyUI() as fake:
        async with agent_with_journal(api, tmp_path, ComfyUI(fake.url, QUICK_COMFYUI)) as agent:
            await until(
                lambda: any(report.kind == "progress" for call in api.named("progress") for report in call)
            )
            await killed(agent)
            if is_finished:
                await until(lambda: fake.stats.prompt_log[0].ended_at)
        async with agent_with_journal(api, tmp_path, ComfyUI(fake.url, QUICK_COMFYUI)):
            await until(lambda: api.named("complete") or api.named("fail"))
        assert [call.ref for call in api.named("complete")] == [job.ref]
        assert list(fake.stats.prompts_run.values()) == [1]
