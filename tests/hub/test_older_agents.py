"""An agent of the version before, as it wrote its calls and as it read the answers: what is newer does not disturb it.

The texts were written by version 493782c. Its structs read the answers here as they did there: what they do not know is
passed over, and an action that they do not know would cost the whole answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal, TypeVar

import msgspec
import pytest_asyncio
from tests.hub._hub import HubRig, graph, running_hub

from comfyfleet.model.access import Role

REGISTER = (
    '{"worker_id":"gpu","capabilities":{"services":[{"name":"comfyui","models":["sd.safetensors"],"node_classes":'
    '["SaveImage","KSampler"]}],"hardware":{"gpu":{"count":1,"memory_gb":24,"model":"RTX"}}},"slots":1,"live":{}}'
)
POLL = '{"worker_id":"gpu","poll_id":"POLL","wait_s":0.0,"capabilities_hash":"HASH"}'
HEARTBEAT = '{"worker_id":"gpu","leases":[LEASE]}'
PROGRESS = (
    '{"reports":[{"lease":LEASE,"kind":"started"},'
    '{"lease":LEASE,"kind":"progress","data":{"value":1,"max":4},"image":"YWJj"}]}'
)
COMPLETE = (
    '{"lease":LEASE,"result":{"outputs":{"9":{"images":[{"filename":"a.png"}]}},'
    '"files":[{"node_id":"9","kind":"images","filename":"a.png"}]},"seconds":1.5}'
)
RELEASE = '{"lease":LEASE,"reason":"cancelled"}'
COMMANDS = '{"worker_id":"gpu","wait_s":0.0}'
UNREGISTER = '{"worker_id":"gpu","reason":"drain"}'


class Command(msgspec.Struct):
    action: Literal["cancel", "retry", "pause", "resume", "drain"]
    job_id: str | None = None
    lease_number: int = 0
    reason: str = ""


class Lease(msgspec.Struct):
    job_id: str
    round: int
    number: int
    epoch: int
    token: str


class Registered(msgspec.Struct):
    worker_id: str
    capabilities: dict[str, Any]
    capabilities_hash: str
    slots: int
    heartbeat_s: float
    lost_after_s: float
    connected_at: float
    last_seen_at: float
    profile: str


class Payload(msgspec.Struct):
    workflow: dict[str, Any]


class Leased(msgspec.Struct):
    id: str
    service: str
    workflow_hash: str
    payload: Payload
    attempt: int = 1


class Given(msgspec.Struct):
    lease: Lease
    worker_id: str
    duration_s: float
    acknowledge_s: float
    job: Leased


class Beat(msgspec.Struct):
    duration_s: float
    alive: tuple[Lease, ...] = ()
    lost: tuple[Lease, ...] = ()
    commands: tuple[Command, ...] = ()


class Settled(msgspec.Struct):
    status: str
    will_retry: bool = False


class Commands(msgspec.Struct):
    commands: tuple[Command, ...] = ()


T = TypeVar("T")


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub() as rig:
        yield rig


class OlderAgent:
    def __init__(self, rig: HubRig) -> None:
        self._rig = rig
        self._hash = ""
        self._polls = 0

    async def register(self) -> None:
        self._hash = (await self.ask("register", REGISTER, Registered)).capabilities_hash

    async def take(self) -> Given:
        self._polls += 1
        text = POLL.replace("HASH", self._hash).replace("POLL", str(self._polls))
        return await self.ask("poll", text, Given)

    async def tell(self, name: str, text: str, given: Given, kind: type[T]) -> T:
        return await self.ask(name, text.replace("LEASE", msgspec.json.encode(given.lease).decode()), kind)

    async def ask(self, name: str, text: str, kind: type[T]) -> T:
        answer = await self._rig.post(f"/api/worker/{name}", json.loads(text), role=Role.WORKER)
        assert answer.status in (200, 201, 204), answer.content
        return msgspec.json.decode(answer.content or b"{}", type=kind)


async def test_it_runs_a_job_with_its_content_and_is_told_of_pauses_and_retries_in_words_that_it_knows(
    rig: HubRig,
) -> None:
    agent = OlderAgent(rig)
    await agent.register()
    job_id = await rig.submit()
    first = await agent.take()
    assert (first.job.id, first.job.attempt) == (job_id, 1)
    assert first.job.payload.workflow == graph()
    assert (await agent.tell("heartbeat", HEARTBEAT, first, Beat)).alive == (first.lease,)
    assert (await agent.tell("progress", PROGRESS, first, Beat)).lost == ()

    await rig.post(f"/api/jobs/{job_id}/pause")
    (told,) = (await agent.tell("heartbeat", HEARTBEAT, first, Beat)).commands
    assert (told.action, told.job_id) == ("cancel", job_id)
    settled = await agent.tell("release", RELEASE, first, Settled)
    assert (settled.status, settled.will_retry) == ("queued", True)
    await rig.post(f"/api/jobs/{job_id}/resume")

    second = await agent.take()
    await agent.tell("heartbeat", HEARTBEAT, second, Beat)
    await rig.post(f"/api/jobs/{job_id}/retry")
    (told,) = (await agent.ask("commands", COMMANDS, Commands)).commands
    assert (told.action, told.job_id) == ("retry", job_id)
    await agent.tell("release", RELEASE, second, Settled)

    third = await agent.take()
    assert (third.job.id, third.job.attempt) == (job_id, 3)
    assert (await agent.tell("complete", COMPLETE, third, Settled)).status == "completed"
    ended = (await rig.get(f"/api/jobs/{job_id}")).body
    assert (ended["status"], ended["attempts"]) == ("completed", 3)
    assert [each["outcome"] for each in ended["history"]] == ["cancelled", "cancelled", "completed"]
    found = (await rig.get(f"/api/jobs/{job_id}/result")).body["result"]
    assert found["outputs"] == {"9": {"images": [{"filename": "a.png"}]}}
    await agent.ask("unregister", UNREGISTER, Commands)
    (worker,) = (await rig.get("/api/workers")).body["workers"]
    assert (worker["id"], worker["status"]) == ("gpu", "offline")


async def test_what_others_wait_for_and_a_drain_of_all_reach_it_too(rig: HubRig) -> None:
    agent = OlderAgent(rig)
    await agent.register()
    # Needs what nobody has: newer agents are told so with a heartbeat.
    await rig.submit(workflow=graph("NobodyHasIt"))
    text = HEARTBEAT.replace("LEASE", "")
    assert (await agent.ask("heartbeat", text, Beat)).commands == ()
    await rig.post("/api/fleet/pause")
    assert (await agent.ask("heartbeat", text, Beat)).commands == ()
    await rig.post("/api/fleet/resume")
    await rig.post("/api/fleet/drain")
    assert {each.action for each in (await agent.ask("heartbeat", text, Beat)).commands} == {"drain"}
