"""A slow watcher loses progress, never facts, and disturbs nobody."""

from __future__ import annotations

import asyncio
import time

import pytest

from comfyfleet.engine.local_bus import MAX_PENDING_NEWS, LocalBus, LocalSubscription
from comfyfleet.model.fact import Event, Fact, FactKind, FleetEvent, ProgressEvent, ProgressKind
from comfyfleet.model.ids import JobId, WorkerId

JOB, OTHER = JobId("job"), JobId("other")


def fact(number: int, job_id: JobId = JOB) -> Fact:
    return Fact(job_id, number, FactKind.LEASED, 0.0)


def progress(value: int, job_id: JobId = JOB, kind: ProgressKind = ProgressKind.PROGRESS) -> ProgressEvent:
    return ProgressEvent(job_id, kind, 0.0, data={"value": value})


async def drained(subscription: LocalSubscription) -> list[Event]:
    subscription.close()
    return [event async for event in subscription]


async def test_a_slow_watcher_loses_progress_and_keeps_every_fact() -> None:
    bus = LocalBus()
    watcher = bus.subscribe()
    for number in range(1, 2001):
        bus.publish(fact(number))
        bus.publish(progress(number, JobId(f"job-{number}")))
    seen = await drained(watcher)
    assert [event.number for event in seen if isinstance(event, Fact)] == list(range(1, 2001))
    assert [event.data["value"] for event in seen if isinstance(event, ProgressEvent)] == list(
        range(2001 - MAX_PENDING_NEWS, 2001)
    )


async def test_of_progress_and_previews_the_newest_wins_and_stays_behind_the_facts_before_it() -> None:
    bus = LocalBus()
    watcher = bus.subscribe(JOB)
    bus.publish(progress(1))
    bus.publish(progress(10, kind=ProgressKind.PREVIEW))
    bus.publish(fact(1))
    bus.publish(progress(2))
    bus.publish(progress(3))
    bus.publish(progress(11, kind=ProgressKind.PREVIEW))
    assert await drained(watcher) == [fact(1), progress(3), progress(11, kind=ProgressKind.PREVIEW)]


async def test_outputs_are_not_replaced_by_newer_ones() -> None:
    bus = LocalBus()
    watcher = bus.subscribe(JOB)
    outputs = [progress(value, kind=ProgressKind.OUTPUT) for value in (1, 2)]
    for output in outputs:
        bus.publish(output)
    assert await drained(watcher) == outputs


async def test_a_watcher_of_one_job_hears_of_no_other() -> None:
    bus = LocalBus()
    mine, everything = bus.subscribe(JOB), bus.subscribe()
    told: list[Event] = [fact(1), fact(1, OTHER), FleetEvent("online", 0.0, WorkerId("a"))]
    for event in told:
        bus.publish(event)
    assert await drained(mine) == told[:1]
    assert await drained(everything) == told


async def test_a_watcher_that_waits_is_woken_and_ends_when_it_is_closed() -> None:
    bus = LocalBus()
    watcher = bus.subscribe(JOB)
    seen: list[Event] = []

    async def watch() -> None:
        async for event in watcher:
            seen.append(event)

    task = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    bus.publish(fact(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == [fact(1)]
    watcher.close()
    await task
    bus.publish(fact(2))
    assert seen == [fact(1)]


async def test_a_bus_that_is_closed_ends_every_subscription_with_what_it_holds() -> None:
    bus = LocalBus()
    watchers = [bus.subscribe(), bus.subscribe(JOB), bus.subscribe(OTHER)]
    bus.publish(fact(1))
    bus.close()
    bus.publish(fact(2))
    async with asyncio.timeout(60):
        assert [[event async for event in watcher] for watcher in watchers] == [[fact(1)], [fact(1)], []]
        assert [event async for event in bus.subscribe(JOB)] == []
    bus.close()


async def test_a_failing_listener_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    bus = LocalBus()
    heard: list[Event] = []

    def broken(_: Event) -> None:
        raise ValueError("not my day")

    bus.listen(broken)
    leave = bus.listen(heard.append)
    watcher = bus.subscribe()
    bus.publish(fact(1))
    assert heard == [fact(1)]
    assert "not my day" in caplog.text
    leave()
    leave()
    bus.publish(fact(2))
    assert heard == [fact(1)]
    assert await drained(watcher) == [fact(1), fact(2)]


async def test_what_a_watcher_has_not_read_does_not_slow_down_those_who_publish() -> None:
    def seconds(waiting: int) -> float:
        bus = LocalBus()
        bus.subscribe()
        for number in range(waiting):
            bus.publish(fact(number, JobId(f"job-{number}")))
        started = time.process_time()
        for number in range(2000):
            bus.publish(progress(number, JobId(f"late-{number}")))
        return time.process_time() - started

    few = min(seconds(10) for _ in range(3))
    many = min(seconds(20_000) for _ in range(3))
    assert many < 20 * few
