"""The agent's settings and states, and the pause between two tries."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from enum import StrEnum

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    slots: int = 1
    poll_wait_s: float = 30.0
    command_wait_s: float = 30.0

    # leases
    heartbeat_share: float = 0.25
    """A heartbeat follows each time this share of the shortest lease has passed …"""
    heartbeat_jitter: float = 0.2
    """… plus or minus this share of the interval."""
    heartbeat_s: float = 15.0
    """The longest interval between heartbeats, which also fetch commands."""
    heartbeat_timeout_s: float = 5.0
    abandon_share: float = 0.8
    """A run stops after this share of its lease without a confirmed heartbeat."""

    # attempts
    cancel_timeout_s: float = 10.0
    """The longest time a service gets to confirm that it stopped a run."""
    cancel_settle_s: float = 1.0
    """The run may then end by itself for this long before the agent tears it off."""
    reconcile_timeout_s: float = 10.0
    report_s: float = 86_400.0
    """How long the agent goes on to report a run that has ended, after its lease. A hub that was away may still
    accept the report."""
    max_input_bytes: int = 256 * 1024 * 1024
    """The bound for all input files of a job: they are on the worker's disk during the run."""

    # progress
    batch_s: float = 0.005
    flush_s: float = 2.0
    """The longest time the report of an end waits for earlier progress: the end matters more."""
    max_pending_reports: int = 10_000

    # servers
    health_interval_s: float = 10.0
    health_timeout_s: float = 5.0
    open_timeout_s: float = 30.0
    missed_checks: int = 2
    """A server is offline after this many unanswered checks in a row."""
    reconnect_grace_s: float = 5.0
    """A server that came back gets work after this time."""
    inventory_interval_s: float = 300.0
    missing_interval_s: float = 10.0
    """How soon the agent looks again after a run lacked something; the pauses then grow."""
    seek_interval_s: float = 5.0
    """How often the agent looks up the names that jobs wait for."""
    inventory_timeout_s: float = 60.0

    # stop
    drain_grace_s: float = 60.0
    stop_grace_s: float = 5.0

    # faults
    backoff_base_s: float = 0.2
    backoff_cap_s: float = 15.0


class AgentStatus(StrEnum):
    STARTING = "starting"
    ONLINE = "online"
    RECONNECTING = "reconnecting"
    """The server answers again; its grace period is not over."""
    OFFLINE = "offline"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


class AgentState(msgspec.Struct, frozen=True):
    """What an agent tells its owner each time its status changes."""

    status: AgentStatus
    reason: str = ""
    disconnects: int = 0
    """How often a server was lost since the agent started."""


class Backoff:
    """Growing pauses with jitter, so that a fleet does not return all at once."""

    __slots__ = ("_base_s", "_cap_s", "_tries")

    def __init__(self, settings: AgentSettings) -> None:
        self._base_s = settings.backoff_base_s
        self._cap_s = settings.backoff_cap_s
        self._tries = 0

    def next_s(self) -> float:
        # The exponent is bounded because retries never end.
        longest = min(self._cap_s, self._base_s * (1 << min(self._tries, 30)))
        self._tries += 1
        return longest * (0.5 + random.random() / 2)

    def reset(self) -> None:
        self._tries = 0


async def wait_within(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, or after this time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def is_retryable(error: Exception) -> bool:
    """Refusals are final, except those that mean "not now". All other errors are faults that may pass."""
    if isinstance(error, Refusal):
        return error.code in (RefusalCode.UNAVAILABLE, RefusalCode.RATE_LIMITED)
    return True
