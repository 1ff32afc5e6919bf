"""Confirms an agent's leases in one heartbeat call, abandons unconfirmed ones, and fetches commands.

`CommandListener` only makes commands faster: each heartbeat also brings them. `agent.py` carries them out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from comfyfleet.model.calls import Command, HeartbeatReply
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Refusal
from comfyfleet.worker.settings import Backoff
from comfyfleet.worker.slots import AgentContext


class HeldLease(Protocol):
    """A lease that needs heartbeats. Times are the event loop's."""

    ref: LeaseRef
    ttl_s: float
    confirmed_at: float

    def abandon(self) -> None: ...


class HeartbeatLoop:
    def __init__(
        self,
        context: AgentContext,
        on_beat: Callable[[HeartbeatReply], None],
        on_refusal: Callable[[Refusal], None],
    ) -> None:
        self._api, self._worker_id, self._settings, self._outage = context
        self._on_beat = on_beat
        self._on_refusal = on_refusal
        self._held: dict[LeaseRef, HeldLease] = {}
        self._unacknowledged: dict[LeaseRef, None] = {}
        self._wake = asyncio.Event()
        self._beat_timer: asyncio.TimerHandle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self.is_registered = False
        """Whether the hub expects heartbeats while no lease is held."""

    def add(self, held: HeldLease) -> None:
        """Confirms the lease from now on. The first heartbeat follows at once and acknowledges it."""
        self._held[held.ref] = held
        self._unacknowledged[held.ref] = None
        self._wake.set()
        abandon_at = held.confirmed_at + held.ttl_s * self._settings.abandon_share
        if self._watch_timer is None or abandon_at < self._watch_timer.when():
            self._watch_at(abandon_at)

    def send_soon(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._ring()

    def remove(self, held: HeldLease) -> None:
        self._held.pop(held.ref, None)
        self._unacknowledged.pop(held.ref, None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._settings)
        self._beat_at(loop.time() + self._interval_s())
        self._watch()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                now = loop.time()
                is_due = self._beat_timer is None
                refs = list(self._held if is_due else self._unacknowledged)
                if not refs and not (is_due and self.is_registered):
                    if is_due:
                        self._beat_at(now + self._interval_s())
                    continue
                if await self._beat(refs, now):
                    backoff.reset()
                    if is_due or self._is_late():
                        self._beat_at(loop.time() + self._interval_s())
                else:
                    self._beat_at(loop.time() + min(backoff.next_s(), self._interval_s()))
        finally:
            for timer in (self._beat_timer, self._watch_timer):
                if timer is not None:
                    timer.cancel()
            self._beat_timer = self._watch_timer = None

    async def _beat(self, refs: Sequence[LeaseRef], sent_at: float) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s()):
                beat = await self._api.heartbeat(self._worker_id, refs)
        except Refusal as refusal:
            self._on_refusal(refusal)
            return False
        except Exception:
            self._outage.heartbeat_missed()
            return False
        self._outage.heartbeat_answered()
        for ref in beat.alive:
            self._unacknowledged.pop(ref, None)
            if (held := self._held.get(ref)) is not None:
                # Counted from the request: the hub extended the lease at that moment or later.
                held.confirmed_at = max(held.confirmed_at, sent_at)
                held.ttl_s = beat.ttl_s
        for ref in beat.lost:
            self._unacknowledged.pop(ref, None)
        self._on_beat(beat)
        return True

    def _shortest_s(self) -> float | None:
        return min((held.ttl_s for held in self._held.values()), default=None)

    def _timeout_s(self) -> float:
        # A heartbeat that hangs must leave time for another one before the run is abandoned.
        shortest = self._shortest_s()
        longest = self._settings.heartbeat_timeout_s
        return longest if shortest is None else min(longest, shortest * self._settings.abandon_share / 3)

    def _interval_s(self) -> float:
        shortest = self._shortest_s()
        interval = self._settings.heartbeat_s
        if shortest is not None:
            interval = min(interval, shortest * self._settings.heartbeat_share)
        return interval * (1 + self._settings.heartbeat_jitter * (2 * random.random() - 1))

    def _is_late(self) -> bool:
        """Whether the next heartbeat was scheduled for longer leases, or for none."""
        if self._beat_timer is None:
            # The timer fired during the last heartbeat: the next one follows now, for all leases.
            return False
        shortest = self._shortest_s()
        if shortest is None:
            return False
        left = self._beat_timer.when() - asyncio.get_running_loop().time()
        return left > shortest * self._settings.heartbeat_share * (1 + self._settings.heartbeat_jitter)

    def _beat_at(self, when: float) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_timer = asyncio.get_running_loop().call_at(when, self._ring)

    def _ring(self) -> None:
        self._beat_timer = None
        self._wake.set()

    def _watch_at(self, when: float) -> None:
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._watch_timer = asyncio.get_running_loop().call_at(when, self._watch)

    def _watch(self) -> None:
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        # One timer for all leases, set again only when it fires: a short lease needs no timer.
        self._watch_timer = None
        now = asyncio.get_running_loop().time()
        soonest: float | None = None
        for held in list(self._held.values()):
            abandon_at = held.confirmed_at + held.ttl_s * self._settings.abandon_share
            if abandon_at <= now:
                held.abandon()
            elif soonest is None or abandon_at < soonest:
                soonest = abandon_at
        if soonest is not None:
            self._watch_at(soonest)


class CommandListener:
    def __init__(
        self, context: AgentContext, obey: Callable[[Command], None], on_call: Callable[[], None]
    ) -> None:
        """`on_call`: the hub answered early without a command, so a heartbeat will bring something new."""
        self._api, self._worker_id, self._settings, _ = context
        self._obey = obey
        self._on_call = on_call
        self._is_registered = asyncio.Event()

    def set_registered(self, is_registered: bool) -> None:
        """Hubs send commands only to registered workers."""
        if is_registered:
            self._is_registered.set()
        else:
            self._is_registered.clear()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._settings)
        while True:
            await self._is_registered.wait()
            asked_at = loop.time()
            commands: tuple[Command, ...] = ()
            try:
                commands = await self._api.commands(self._worker_id, self._settings.command_wait_s)
            except Exception:
                # The heartbeat meets the same error and handles it.
                await asyncio.sleep(backoff.next_s())
                continue
            for command in commands:
                self._obey(command)
            if not commands and loop.time() - asked_at < self._settings.command_wait_s / 2:
                self._on_call()
            if commands or loop.time() - asked_at >= self._settings.command_wait_s / 2:
                backoff.reset()
            if loop.time() - asked_at < self._settings.backoff_base_s:
                # A hub that answers at once, or repeats itself, must not keep this loop busy.
                await asyncio.sleep(backoff.next_s())
