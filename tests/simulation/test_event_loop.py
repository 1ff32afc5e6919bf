"""Simulated time: nothing sleeps, timers fire at their own time and in a fixed order."""

from __future__ import annotations

import asyncio
import time

import pytest

from comfyfleet.simulation.event_loop import START, EverythingWaits, SimulatedClock, run_simulated


def test_a_year_passes_at_once() -> None:
    async def wait() -> float:
        await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_simulated(wait()) == 365 * 86_400
    assert time.monotonic() - began < 30


def test_tasks_run_in_the_order_of_their_timers() -> None:
    seen: list[tuple[str, float]] = []

    async def note(name: str, *waits: float) -> None:
        for seconds in waits:
            await asyncio.sleep(seconds)
            seen.append((name, asyncio.get_running_loop().time()))

    async def both() -> None:
        await asyncio.gather(note("a", 1, 1, 3), note("b", 1.5, 1))

    run_simulated(both())
    assert seen == [("a", 1), ("b", 1.5), ("a", 2), ("b", 2.5), ("a", 5)]


def test_a_timer_of_the_clock_is_never_early() -> None:
    async def fire() -> list[tuple[float, float]]:
        clock, fired = SimulatedClock(asyncio.get_running_loop()), list[tuple[float, float]]()
        for number in range(1, 200):
            at = START + number / 7
            clock.call_at(at, lambda at=at: fired.append((at, clock.now())))  # type: ignore[misc]
        await asyncio.sleep(60)
        return fired

    fired = run_simulated(fire())
    assert len(fired) == 199
    assert all(at <= now < at + 1e-6 for at, now in fired)


def test_setting_the_clock_moves_no_timer_and_no_duration() -> None:
    async def jump() -> tuple[float, float, list[float]]:
        loop = asyncio.get_running_loop()
        clock, fired = SimulatedClock(loop), list[float]()
        clock.call_at(clock.now() + 10, lambda: fired.append(loop.time()))
        clock.set_by(3_600)
        await asyncio.sleep(20)
        return clock.now() - START, clock.monotonic(), fired

    now, monotonic, fired = run_simulated(jump())
    assert (now, monotonic) == (3_620, 20)
    assert fired == [pytest.approx(10)]


def test_a_simulation_in_which_nothing_can_happen_says_so() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(EverythingWaits, match="no timer is set"):
        run_simulated(wait_for_nobody())


def test_work_for_threads_is_done_at_once() -> None:
    async def work() -> int:
        return await asyncio.to_thread(sum, [1, 2, 3])

    assert run_simulated(work()) == 6
