"""An agent against a scripted hub and a simulated service: polls, commands, drain and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker._scripted import WORKER, ScriptedApi, cancel, leased_job, quick, running, until

from comfyfleet.model.calls import Command, LeasedJob, Poll, ProgressReport
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.ids import TenantId
from comfyfleet.model.job import JobResult, Timeouts
from comfyfleet.model.worker import Capabilities, Gpu, Hardware, Service, TenantAccess
from comfyfleet.ports import Inventory
from comfyfleet.worker.agent import Agent, AgentState, AgentStatus
from comfyfleet.worker.connectors.simulated import SimulatedConnector, hangs, takes
from comfyfleet.worker.journal import Journal

# the ordinary way


async def test_a_job_is_polled_run_and_completed() -> None:
    api, connector, job = ScriptedApi(), SimulatedConnector(), leased_job()
    async with running(api, connector):
        api.give(job)
        await until(lambda: api.named("complete"))
        await until(lambda: api.parked == 1)
    assert [run.job.job_id for run in connector.runs] == ["job"]
    assert api.named("complete")[0].ref == job.ref
    first, second = api.named("poll")
    assert first.poll_id != second.poll_id


async def test_a_lease_is_acknowledged_on_receipt_while_the_job_runs() -> None:
    api, job = ScriptedApi(), leased_job(ttl_s=1000.0)
    async with running(api, SimulatedConnector(behaviour=hangs()), settings=quick(heartbeat_s=1000.0)):
        api.give(job)
        await until(lambda: api.named("heartbeat") == [(job.ref,)])
        assert not api.named("complete")


async def test_the_run_does_not_wait_for_its_acknowledgement() -> None:
    api = ScriptedApi()
    api.holds["heartbeat"] = asyncio.Event()
    async with running(api, SimulatedConnector(behaviour=takes(0.0))):
        api.give(leased_job())
        await until(lambda: api.named("complete"))


async def test_heartbeats_extend_a_lease_beyond_its_first_duration() -> None:
    api, job = ScriptedApi(), leased_job(ttl_s=0.3)
    api.ttl_s = 0.3
    connector = SimulatedConnector(behaviour=takes(0.6))
    async with running(api, connector, settings=quick(heartbeat_s=1000.0)):
        api.give(job)
        await until(lambda: api.named("complete"))
    assert not connector.cancels
    assert api.named("heartbeat").count((job.ref,)) > 3


async def test_all_leases_are_confirmed_in_one_call() -> None:
    api = ScriptedApi()
    api.ttl_s = 0.2
    jobs = [leased_job(name, ttl_s=0.2) for name in ("one", "two", "three")]
    async with running(api, SimulatedConnector(behaviour=hangs()), settings=quick(slots=3)):
        api.give(*jobs)
        await until(lambda: any(set(refs) == {job.ref for job in jobs} for refs in api.named("heartbeat")))


async def test_an_idle_agent_still_fetches_commands() -> None:
    api = ScriptedApi()
    async with running(api, SimulatedConnector()) as agent:
        api.orders.append(Command("pause"))
        await until(lambda: agent.state.status is AgentStatus.PAUSED)
        await until(lambda: api.parked == 0)
        api.orders.append(Command("resume"))
        await until(lambda: agent.state.status is AgentStatus.ONLINE and api.parked == 1)


async def test_the_timeouts_of_a_job_reach_the_connector_as_they_came() -> None:
    api, connector = ScriptedApi(), SimulatedConnector()
    async with running(api, connector):
        api.give(leased_job(timeouts=Timeouts(stall_s=1.0)))
        await until(lambda: connector.runs)
    assert connector.runs[0].job.timeouts == Timeouts(stall_s=1.0)


# polls


async def test_after_a_lost_answer_the_same_poll_is_asked_again() -> None:
    api, connector = ScriptedApi(), SimulatedConnector()
    api.lost_answers["poll"].extend([ConnectionError("cut off")] * 2)
    async with running(api, connector):
        api.give(leased_job())
        await until(lambda: api.named("complete"))
    first, second, third, *_ = [call.poll_id for call in api.named("poll")]
    assert first == second == third
    assert connector.run_count == 1


async def test_a_poll_without_work_is_followed_by_another() -> None:
    api = ScriptedApi()
    async with running(api, SimulatedConnector(), settings=quick(poll_wait_s=0.005)):
        await until(lambda: len(api.named("poll")) > 3)
    polls = [call.poll_id for call in api.named("poll")]
    assert len(set(polls)) == len(polls)


async def test_a_worker_that_was_forgotten_registers_again() -> None:
    api = ScriptedApi()
    async with running(api, SimulatedConnector(), settings=quick(poll_wait_s=0.005)):
        api.is_known = False
        await until(lambda: len(api.named("register")) == 2)
        api.give(leased_job())
        await until(lambda: api.named("complete"))


async def test_a_job_for_a_service_the_worker_has_not_is_declined() -> None:
    api = ScriptedApi()
    async with running(api, SimulatedConnector()):
        api.give(leased_job(service="a1111"))
        await until(lambda: api.named("release"))
    assert api.named("release")[0].reason == "declined"


async def test_slots_run_side_by_side() -> None:
    api, connector = ScriptedApi(), SimulatedConnector(behaviour=hangs())
    async with running(api, connector, settings=quick(slots=3)):
        await until(lambda: api.parked == 3)
        api.give(*(leased_job(str(number)) for number in range(4)))
        await until(lambda: connector.run_count == 3)
        await until(lambda: api.parked == 0)
    assert api.named("register")[0].slots == 3


async def test_each_service_gets_its_own_jobs() -> None:
    api = ScriptedApi()
    pictures = SimulatedConnector("comfyui", Capabilities((Service("comfyui", models=frozenset({"a"})),)))
    words = SimulatedConnector("langflow")
    async with running(api, pictures, words):
        api.give(leased_job("words", service="langflow"), leased_job("picture"))
        await until(lambda: len(api.named("complete")) == 2)
    assert [run.job.job_id for run in pictures.runs] == ["picture"]
    assert [run.job.job_id for run in words.runs] == ["words"]
    services = api.named("register")[0].capabilities.services
    assert services == (Service("comfyui", models=frozenset({"a"})), Service("langflow"))


async def test_two_connectors_for_one_service_are_refused() -> None:
    with pytest.raises(ValueError, match="comfyui, comfyui"):
        Agent(ScriptedApi(), WORKER, [SimulatedConnector(), SimulatedConnector()])


async def test_what_is_declared_is_joined_with_what_is_found() -> None:
    api = ScriptedApi()
    found = Capabilities((Service("comfyui", models=frozenset({"a"})),), Hardware(Gpu(1, 24, "RTX 4090")))
    access = TenantAccess("strict", (TenantId("t"),))
    declared = Capabilities(
        (Service("comfyui", models=frozenset({"b"})), Service("langflow")), tenant_access=access
    )
    async with running(api, SimulatedConnector(capabilities=found), declared=declared):
        pass
    told = api.named("register")[0].capabilities
    assert told.services == (Service("comfyui", models=frozenset({"a", "b"})),)
    assert (told.hardware, told.tenant_access) == (found.hardware, access)


async def test_a_registration_that_fails_after_the_worker_was_forgotten_keeps_the_poll() -> None:
    api = ScriptedApi()
    async with running(api, SimulatedConnector()) as agent:
        await until(lambda: api.parked == 1)
        poll_id = api.named("poll")[0].poll_id
        api.faults["register"].extend([Fault("away")] * 3)
        api.is_known = False
        api.orders.append(Command("pause"))
        await until(lambda: not api.faults["register"])
        await until(lambda: agent.state.status is AgentStatus.PAUSED)
        api.orders.append(Command("resume"))
        await until(lambda: api.parked == 1)
    assert {call.poll_id for call in api.named("poll")} == {poll_id}


# commands


async def test_a_pushed_command_is_heard_before_the_next_heartbeat() -> None:
    api, connector, job = ScriptedApi(), SimulatedConnector(behaviour=hangs()), leased_job()
    async with running(api, connector, settings=quick(heartbeat_s=1000.0)):
        api.give(job)
        await until(lambda: connector.runs)
        api.push(cancel(job))
        await until(lambda: api.named("release"))


async def test_listening_for_commands_goes_on_after_faults_and_does_not_spin() -> None:
    api = ScriptedApi()
    api.faults["commands"].extend([Fault("away")] * 2)
    async with running(api, SimulatedConnector()) as agent:
        api.push(Command("pause"))
        await until(lambda: agent.state.status is AgentStatus.PAUSED)
    assert 3 <= len(api.named("commands")) < 10


async def test_a_burst_of_commands_is_heard_without_growing_pauses() -> None:
    api, connector = ScriptedApi(), SimulatedConnector(behaviour=hangs())
    jobs = [leased_job(str(number)) for number in range(20)]
    settings = quick(slots=20, heartbeat_s=1000.0, backoff_base_s=0.01, backoff_cap_s=1000.0)
    async with running(api, connector, settings=settings):
        api.give(*jobs)
        await until(lambda: connector.run_count == 20)
        for job in jobs:
            api.push(cancel(job))
        await until(lambda: len(api.named("release")) == 20)


# the end


async def test_a_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    api, finish = ScriptedApi(), asyncio.Event()

    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        await finish.wait()
        return JobResult()

    connector = SimulatedConnector(behaviour=behave)
    async with running(api, connector, settings=quick(slots=2)) as agent:
        await until(lambda: api.parked == 2)
        api.give(leased_job("first"))
        await until(lambda: connector.runs)
        draining = asyncio.create_task(agent.drain())
        await until(lambda: api.parked == 0)
        api.give(leased_job("second"))
        finish.set()
        await draining
        assert api.names[-1] == "unregister"
    assert [call.ref.job_id for call in api.named("complete")] == ["first"]
    assert connector.run_count == 1
    assert api.named("unregister") == ["drain"]


async def test_a_drain_gives_back_what_does_not_end_in_its_grace() -> None:
    api, connector = ScriptedApi(), SimulatedConnector(behaviour=hangs())
    async with running(api, connector, settings=quick(drain_grace_s=0.02)) as agent:
        api.give(leased_job())
        await until(lambda: connector.runs)
        await agent.drain()
        assert [call.reason for call in api.named("release")] == ["drain"]
        assert connector.runs[0].state == "cancelled"


@pytest.mark.parametrize("call", ["complete", "release"])
async def test_a_drain_does_not_wait_beyond_its_grace_for_a_report_that_nobody_takes(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a store whose disk is full. The lease would live for a minute, and be repeated for as long."""
    api = ScriptedApi()
    api.faults[call].extend([Fault("the disk is full")] * 100_000)
    connector = SimulatedConnector(behaviour=takes(0.0) if call == "complete" else hangs())
    slow = quick(drain_grace_s=0.05, stop_grace_s=0.05, backoff_base_s=20.0, backoff_cap_s=20.0)
    async with running(api, connector, settings=slow) as agent:
        api.give(leased_job())
        await until(lambda: api.named("complete") or (call == "release" and connector.runs))
        await agent.drain()
        if call == "complete":
            assert len(api.named(call)) >= 2, "it tries once more when it leaves"
    told = [each.getMessage() for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert len(told) == 1, told
    assert "could not be reported" in told[0] and told[0].endswith(": the disk is full")


async def test_a_drain_can_be_commanded() -> None:
    api, connector = ScriptedApi(), SimulatedConnector()
    async with running(api, connector) as agent:
        api.orders += [Command("drain"), Command("drain")]
        await until(lambda: api.named("unregister"))
        assert agent.state.status is AgentStatus.DRAINING
        await until(lambda: api.parked == 0)


async def test_a_result_that_arrives_while_the_run_is_drained_is_completed() -> None:
    class Late(SimulatedConnector):
        async def cancel_job(self, job: LeasedJob) -> None:
            finish.set()

    api, finish = ScriptedApi(), asyncio.Event()

    async def behave(job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        await finish.wait()
        return JobResult()

    connector = Late(behaviour=behave)
    async with running(api, connector, settings=quick(drain_grace_s=0.0)) as agent:
        api.give(leased_job())
        await until(lambda: connector.runs)
        await agent.drain()
    assert api.named("complete")
    assert not api.named("release")


async def test_a_stop_gives_back_what_runs_and_can_be_asked_twice() -> None:
    api, connector = ScriptedApi(), SimulatedConnector(behaviour=hangs())
    async with running(api, connector) as agent:
        api.give(leased_job())
        await until(lambda: connector.runs)
        await asyncio.gather(agent.stop(), agent.stop())
        await agent.stop()
        assert agent.state.status is AgentStatus.STOPPED
        assert not connector.is_open
    assert [call.reason for call in api.named("release")] == ["drain"]
    assert api.named("unregister") == ["stopped"]


async def test_a_stop_does_not_wait_for_a_hub_that_is_gone() -> None:
    api, connector = ScriptedApi(), SimulatedConnector(behaviour=hangs())
    async with running(api, connector, settings=quick(stop_grace_s=0.02, heartbeat_timeout_s=0.02)) as agent:
        api.give(leased_job())
        await until(lambda: connector.runs)
        for name in ("heartbeat", "release", "unregister", "progress"):
            api.holds[name] = asyncio.Event()
        async with asyncio.timeout(60):
            await agent.stop()
    assert connector.runs[0].state == "cancelled"


async def test_an_agent_that_was_never_started_can_be_stopped() -> None:
    agent = Agent(ScriptedApi(), WORKER, [SimulatedConnector()])
    await agent.stop()
    assert agent.state.status is AgentStatus.STOPPED


async def test_a_listener_that_fails_does_not_hurt_the_agent() -> None:
    def listener(state: AgentState) -> None:
        raise ValueError("a defect of the listener")

    api = ScriptedApi()
    async with running(api, SimulatedConnector(), on_state=listener):
        api.give(leased_job())
        await until(lambda: api.named("complete"))


async def test_slots_that_never_wait_leave_room_for_the_rest_of_the_program() -> None:
    api = ScriptedApi()
    api.give(*(leased_job(str(number)) for number in range(5000)))
    connector = SimulatedConnector()
    async with running(api, connector):
        assert connector.run_count < 5000
        await until(lambda: len(api.named("complete")) == 5000)


@pytest.mark.parametrize("steps", range(12))
async def test_a_stop_at_any_step_leaves_no_lease_unreported(steps: int) -> None:
    """Wherever the stop falls, a job that was taken is completed or given back, or its lease was never acknowledged."""
    api, job = ScriptedApi(), leased_job()
    connector = SimulatedConnector(behaviour=takes(0.0))
    async with running(api, connector, settings=quick(heartbeat_s=1000.0)) as agent:
        await until(lambda: api.parked == 1)
        api.give(job)
        for _ in range(steps):
            await asyncio.sleep(0)
    ends = [name for name in api.names if name in ("complete", "release", "fail")]
    if (job.ref,) in api.named("heartbeat") or connector.runs:
        assert len(ends) == 1
    assert agent.state.status is AgentStatus.STOPPED


async def test_a_lease_that_came_with_the_recall_of_its_poll_is_given_back_by_a_drain() -> None:
    class Stubborn(ScriptedApi):
        """Answers a poll although its caller has gone."""

        async def poll(self, call: Poll) -> LeasedJob | None:
            try:
                return await super().poll(call)
            except asyncio.CancelledError:
                return leased_job("late")

    api, connector = Stubborn(), SimulatedConnector()
    async with running(api, connector) as agent:
        await until(lambda: api.parked == 1)
        await agent.drain()
    assert [(call.ref.job_id, call.reason) for call in api.named("release")] == [("late", "drain")]
    assert not connector.runs


async def test_a_refresh_that_waits_while_the_worker_leaves_does_not_bring_it_back() -> None:
    look = asyncio.Event()
    look.set()

    class Slow(SimulatedConnector):
        async def inventory(self) -> Inventory:
            await look.wait()
            return await super().inventory()

    api, connector = ScriptedApi(), Slow()
    async with running(api, connector, settings=quick(health_interval_s=1000.0)) as agent:
        look.clear()
        connector.boot = "2"
        first = asyncio.create_task(agent.refresh())
        await asyncio.sleep(0)
        drain = asyncio.create_task(agent.drain())
        await until(lambda: api.parked == 0)
        second = asyncio.create_task(agent.refresh())
        await asyncio.sleep(0)
        look.set()
        await asyncio.gather(first, drain, second)
    assert len(api.named("register")) == 1
    assert api.names[-1] == "unregister"


async def test_many_refreshes_at_once_are_one_look_and_another_for_what_came_meanwhile() -> None:
    """Each look asks a server for all that it has, and a hub may be asked a hundred times a second."""
    look = asyncio.Event()
    look.set()

    class Slow(SimulatedConnector):
        async def inventory(self) -> Inventory:
            found = await super().inventory()
            await look.wait()
            return found

    api, connector = ScriptedApi(), Slow()
    async with running(api, connector, settings=quick(health_interval_s=1000.0, heartbeat_s=0.005)):
        look.clear()
        api.orders = [Command("refresh")] * 50
        await until(lambda: connector.inventory_count == 2)
        api.orders = [Command("refresh")] * 50
        await until(lambda: not api.orders)
        look.set()
        await until(lambda: len(api.named("register")) == 3)
        beats = len(api.named("heartbeat"))
        await until(lambda: len(api.named("heartbeat")) > beats + 3)
    assert (connector.inventory_count, len(api.named("register"))) == (3, 3)


# ends that nobody takes


@pytest.mark.parametrize("is_failure", [False, True])
async def test_a_slot_goes_on_while_the_end_of_its_job_is_not_taken(is_failure: bool, tmp_path: Path) -> None:
    api, journal, call = ScriptedApi(), Journal(tmp_path, WORKER), "fail" if is_failure else "complete"
    first, second = leased_job("first", ttl_s=1000.0), leased_job("second", ttl_s=1000.0)

    async def work(job: LeasedJob, _: Callable[[ProgressReport], None]) -> JobResult:
        if is_failure and job.job_id == "first":
            raise ServiceFailed(Failure(FailureKind.NODE_ERROR, "it broke"))
        return JobResult()

    api.faults[call].extend(Fault("the database of its tenant is away") for _ in range(3))
    api.holds[call] = asyncio.Event()
    async with running(api, SimulatedConnector(behaviour=work), journal=journal):
        api.give(first)
        await until(lambda: api.named(call))
        # Refused once; the next try is not answered before the second job is over.
        api.give(second)
        await until(lambda: any(each.ref == second.ref for each in api.named("complete")))
        beats = len(api.named("heartbeat"))
        # Its lease is confirmed until somebody takes its end.
        await until(lambda: any(first.ref in refs for refs in api.named("heartbeat")[beats:]))
        assert first.job_id in {begun.job_id for begun in journal._open.values()}, (
            "a restart would know of it"
        )
        api.holds[call].set()
        await until(lambda: not journal._open)
    reported = [each.ref for each in api.named(call)]
    assert reported.count(first.ref) > 1


async def test_a_drain_waits_for_ends_that_nobody_took_yet() -> None:
    api, job = ScriptedApi(), leased_job(ttl_s=1000.0)
    api.faults["complete"].append(Fault("the database of its tenant is away"))
    api.holds["complete"] = asyncio.Event()
    async with running(api, SimulatedConnector(behaviour=takes(0.0))) as agent:
        api.give(job)
        await until(lambda: len(api.named("complete")) == 2)
        draining = asyncio.create_task(agent.drain())
        await until(lambda: agent.state.status is AgentStatus.DRAINING)
        api.holds["complete"].set()
        await draining
    assert len(api.named("complete")) == 2 and not api.named("release")
