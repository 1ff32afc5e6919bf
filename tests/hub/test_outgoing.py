"""How many calls go out at a time, and that nobody waits for somebody else's slow host."""

from __future__ import annotations

import asyncio

from comfyfleet.hub.webhooks.sender import OutgoingCalls, OutgoingLimits


class Calls:
    """Each call lasts until it is let go."""

    def __init__(self, bounds: OutgoingLimits | None = None) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}
        self.outgoing = OutgoingCalls(self._work, bounds)

    async def _work(self, name: str) -> None:
        self.begun.append(name)
        await self._gates.setdefault(name, asyncio.Event()).wait()

    async def let_go(self, name: str) -> None:
        self._gates.setdefault(name, asyncio.Event()).set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_host_an_owner_and_all_have_their_bounds() -> None:
    calls = Calls(OutgoingLimits(total=4, per_owner=3, per_host=2))
    for number in range(3):
        calls.outgoing.offer(f"a{number}", "slow", "acme")
    calls.outgoing.offer("b0", "other", "acme")
    calls.outgoing.offer("b1", "other", "acme")
    calls.outgoing.offer("c0", "third", "else")
    calls.outgoing.offer("c1", "third", "else")
    await calls.settle()
    # Two of the slow host, one more of its owner, and one of somebody else.
    assert calls.begun == ["a0", "a1", "b0", "c0"]
    await calls.let_go("c0")
    assert calls.begun[4:] == ["c1"]
    await calls.let_go("a0")
    await calls.let_go("a1")
    await calls.let_go("b0")
    assert sorted(calls.begun[5:]) == ["a2", "b1"]
    await calls.outgoing.close()


async def test_an_owner_who_is_busy_elsewhere_keeps_nobody_waiting_at_a_host_that_many_have() -> None:
    calls = Calls(OutgoingLimits(per_owner=2, per_host=1))
    calls.outgoing.offer("slow", "slow", "acme")
    calls.outgoing.offer("slower", "slower", "acme")
    calls.outgoing.offer("first", "shared", "third")
    calls.outgoing.offer("of acme", "shared", "acme")
    calls.outgoing.offer("of else", "shared", "else")
    await calls.settle()
    await calls.let_go("first")
    assert calls.begun == ["slow", "slower", "first", "of else"]
    await calls.let_go("of else")
    assert len(calls.begun) == 4, "its owner still has as many as he may"
    await calls.let_go("slow")
    assert calls.begun[4:] == ["of acme"]
    for name in ("slower", "of acme"):
        await calls.let_go(name)
    await calls.outgoing.close()


async def test_one_that_runs_or_stands_in_line_is_not_taken_twice() -> None:
    calls = Calls(OutgoingLimits(per_host=1))
    for _ in range(3):
        calls.outgoing.offer("a", "host", "acme")
        calls.outgoing.offer("b", "host", "acme")
    await calls.let_go("a")
    await calls.let_go("b")
    assert calls.begun == ["a", "b"]
    # When it is over it may come again.
    calls.outgoing.offer("a", "host", "acme")
    await calls.settle()
    assert calls.begun == ["a", "b", "a"]
    await calls.outgoing.close()


async def test_a_line_has_an_end_and_closing_leaves_nothing() -> None:
    calls = Calls(OutgoingLimits(total=1))
    for number in range(2_000):
        calls.outgoing.offer(str(number), "host", "acme")
    for number in range(500):
        await calls.let_go(str(number))
    for number in range(500, 501):
        await calls.let_go(str(number))
    assert len(calls.begun) == 501, "the one that ran, and those that could stand in line"
    assert len(calls.outgoing) == 0
    calls.outgoing.offer("x", "host", "acme")
    await calls.settle()
    closing = asyncio.create_task(calls.outgoing.close())
    await calls.let_go("x")
    await closing
    await calls.outgoing.close()
    calls.outgoing.offer("y", "host", "acme")
    await calls.settle()
    assert "y" not in calls.begun
