"""Workers that come, leave and are lost, in the audit log of several hubs on one Redis: each time once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from tests.engine.test_foreign import Guest, until
from tests.hub._hub import HubRig, running_hub
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.fact import Event, FleetEvent
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.redis.store import RedisStore

ANYTHING = Capabilities((Service("comfyui"),))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with some_server() as url:
        yield url


class Hubs:
    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self._stack = stack
        self.a: HubRig
        self.b: HubRig

    async def another(self) -> HubRig:
        return await self._stack.enter_async_context(running_hub(store_url=self.url))


@pytest_asyncio.fixture
async def hubs(server: str) -> AsyncIterator[Hubs]:
    async with AsyncExitStack() as stack:
        hubs = Hubs(with_prefix(server), stack)
        hubs.a, hubs.b = await hubs.another(), await hubs.another()
        yield hubs


async def in_the_log(rig: HubRig, name: str, count: int = 1) -> list[str]:
    """What it tells of a worker, once there is so much."""

    async def found() -> list[str]:
        entries = (await rig.get("/api/audit")).body["entries"]
        actions = [str(each["action"]) for each in entries if each["target"] == name]
        return actions if len(actions) >= count else []

    return list(await until(found))


async def everybody_has_looked(*rigs: HubRig) -> None:
    """A hub that has entered the newest worker has looked at those before it."""
    for number, rig in enumerate(rigs):
        await rig.engine.register(RegisterWorker(WorkerId(f"newest-{number}"), ANYTHING))
        await in_the_log(rig, f"newest-{number}")


async def test_a_worker_with_a_redis_client_alone_is_told_and_entered_once_by_several_hubs(
    hubs: Hubs,
) -> None:
    heard: list[Event] = []
    rigs = [hubs.a, hubs.b, await hubs.another()]
    for rig in rigs:
        rig.engine.bus.listen(heard.append)
    async with Guest(hubs.url) as guest:
        for done in (0, 2):
            await guest.register()
            await in_the_log(hubs.a, guest.name, done + 1)
            await guest.call("leave", guest.name)
            await in_the_log(hubs.a, guest.name, done + 2)
    await everybody_has_looked(*rigs)
    told = [each.kind for each in heard if isinstance(each, FleetEvent) and each.worker_id == guest.name]
    assert await in_the_log(hubs.b, guest.name) == ["worker_registered", "worker_left"] * 2
    assert told == ["online", "offline"] * 2


async def test_a_worker_with_an_engine_of_its_own_is_entered_once_by_several_hubs(hubs: Hubs) -> None:
    call = RegisterWorker(WorkerId("direct"), ANYTHING)
    async with Engine(RedisStore(hubs.url)) as engine:
        await engine.register(call)
        await in_the_log(hubs.a, "direct", 1)
        await engine.unregister(call.worker_id, "stopped")
        await engine.register(call)
    async with Engine(RedisStore(hubs.url), rules=Rules(worker_lost_s=1.0, sweep_s=0.1)):
        await in_the_log(hubs.b, "direct", 4)
    await everybody_has_looked(hubs.a, hubs.b, await hubs.another())
    actions = ["worker_registered", "worker_left", "worker_registered", "worker_lost"]
    assert await in_the_log(hubs.a, "direct") == actions
