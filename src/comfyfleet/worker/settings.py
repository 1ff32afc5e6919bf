"""The numbers an agent lives by, the states it tells of, and the pause between two tries.

Settings only: what they lead to is in `agent.py`, `attempt.py`, `heartbeat.py`, `progress_sender.py` and `servers.py`.
"""

from __future__ import annotations

import random
from enum import StrEnum

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    slots: int = 1
    """How many jobs run at a time."""
    poll_wait_s: float = 30.0
    command_wait_s: float = 30.0

    # leases
    heartbeat_share: float = 0.25
    """A held lease is confirmed each time this share of it has passed …"""
    heartbeat_jitter: float = 0.2
    """… give or take this share of the interval."""
    heartbeat_s: float = 15.0
    """The longest between two heartbeats, whatever is held: they fetch commands too."""
    heartbeat_timeout_s: float = 5.0
    abandon_share: float = 0.8
    """A run is stopped after this share of its lease without a confirmed heartbeat."""

    # attempts
    cancel_timeout_s: float = 10.0
    """The longest a service gets to confirm that it stopped a run."""
    cancel_settle_s: float = 1.0
    """After that a run may end by itself for this long before it is torn off."""
    reconcile_timeout_s: float = 10.0
    max_input_bytes: int = 256 * 1024 * 1024
    """What the files of a job may have together: they lie on the disk of the worker during the run."""

    # news
    batch_s: float = 0.005
    flush_s: float = 2.0
    """The longest an end of a lease waits for earlier news: the end matters more."""
    max_pending_reports: int = 10_000

    # the servers
    health_interval_s: float = 10.0
    health_timeout_s: float = 5.0
    open_timeout_s: float = 30.0
    missed_checks: int = 2
    """A server that left so many checks in a row unanswered is offline."""
    reconnect_grace_s: float = 5.0
    """A server that came back gets work only after this long."""
    inventory_interval_s: float = 300.0
    missing_interval_s: float = 10.0
    """After a run failed for something missing it is looked for this often, then less and less often."""
    seek_interval_s: float = 5.0
    """What jobs wait for, and a server can be asked for by name, is asked for this often."""
    inventory_timeout_s: float = 60.0

    # the end
    drain_grace_s: float = 60.0
    stop_grace_s: float = 5.0

    # faults
    backoff_base_s: float = 0.2
    backoff_cap_s: float = 15.0


class AgentStatus(StrEnum):
    STARTING = "starting"
    ONLINE = "online"
    RECONNECTING = "reconnecting"
    """The server answers again; its grace is not over."""
    OFFLINE = "offline"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


class AgentState(msgspec.Struct, frozen=True):
    """What an agent tells whoever started it, each time its status changes."""

    status: AgentStatus
    reason: str = ""
    disconnects: int = 0
    """How often a server was lost since the agent started."""


class Backoff:
    """Longer and longer pauses, with jitter so that a fleet does not return as one."""

    __slots__ = ("_base_s", "_cap_s", "_tries")

    def __init__(self, settings: AgentSettings) -> None:
        self._base_s = settings.backoff_base_s
        self._cap_s = settings.backoff_cap_s
        self._tries = 0

    def next_s(self) -> float:
        # The exponent is bounded because retries go on for ever.
        longest = min(self._cap_s, self._base_s * (1 << min(self._tries, 30)))
        self._tries += 1
        return longest * (0.5 + random.random() / 2)

    def reset(self) -> None:
        self._tries = 0


def is_worth_a_retry(error: Exception) -> bool:
    """A refusal is an answer; everything else, and "not now", is a fault that may pass."""
    if isinstance(error, Refusal):
        return error.code in (RefusalCode.UNAVAILABLE, RefusalCode.RATE_LIMITED)
    return True
