"""Every number policy uses, in one place: bounds, waits, weights. Settings, not constants of the code.

How long each kind of record is kept, in one place: days from the moment when nothing more happens to it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from comfyfleet.model.tenant import DEFAULT_CHARGE_S

MIN_PRIORITY = -1000
MAX_PRIORITY = 1000


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much each of the eight dimensions counts in a score."""

    service: float = 100
    hardware: float = 90
    models: float = 80
    tenant: float = 70
    performance: float = 60
    location: float = 50
    cost: float = 40
    load: float = 30


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # leases
    lease_ttl_s: float = 60.0
    acknowledge_s: float = 10.0
    """A lease whose first heartbeat does not come in this time goes back uncharged."""
    worker_lost_s: float = 60.0
    cancel_grace_s: float = 30.0
    """After this long a lease whose cancel was not confirmed is revoked."""
    sweep_s: float = 2.0
    """The longest a sweep waits where no timer could be set."""

    # attempts
    max_attempts: int = 3
    max_worker_faults: int = 5
    max_releases: int = 20
    retry_base_s: float = 1.0
    retry_cap_s: float = 60.0
    give_up_workers: int = 3
    """So many different workers failed a job: the workflow is to blame."""
    accept_timeout_s: float = 30.0
    start_timeout_s: float | None = None
    stall_timeout_s: float | None = None

    # blocks
    cooldown_s: float = 60.0
    max_failures_before_block: int = 1
    inventory_block_s: float = 3600.0
    """The longest a worker stays blocked for something it lacked, should its inventory never be seen to change."""
    max_server_deaths: int = 2
    """So many servers died while they ran a job: its workflow is refused to its tenant until an operator lifts it."""
    poison_workflows: int = 3
    """So many workflows of a tenant were refused in this time: nothing more of it is run."""
    poison_window_s: float = 3600.0
    quarantine_blocks: int = 32
    quarantine_s: float = 300.0

    # matching
    window_lanes: int = 32
    quantum_s: float = 30.0
    """Tenants whose virtual times differ by less count as equal, so that warmth and the like may choose."""
    charge_s: float = DEFAULT_CHARGE_S
    affinity_wait_s: float = 3.0
    bigger_card_wait_s: float = 60.0
    """After out of memory a job asks for a bigger card; so often it is looked whether there still is one."""
    weights: Weights = Weights()
    round_s: float = 1.0
    """Parked slots are matched at least this often, should a wake-up be lost."""

    # priority
    urgency_points: dict[str, int] = msgspec.field(
        default_factory=lambda: {"low": -10, "normal": 0, "high": 10, "critical": 50}
    )
    deadline_window_s: float = 600.0
    """In this time before its deadline a job's priority rises …"""
    deadline_points: int = 100
    """… to this much above its own, in steps."""
    deadline_steps: int = 10

    # watching
    recheck_s: float = 5.0
    """Whoever waits for a job looks at it at least this often, should nobody have been told of its end."""

    # dependencies
    max_dependencies: int = 100
    held_look_s: float = 5.0
    """A job that waits for others is looked at after this long, should nobody have been told of their end …"""
    held_look_cap_s: float = 900.0
    """… and then ever more seldom, down to this."""

    # jobs that nobody can run
    unrunnable_after: float = 24 * 3600.0
    """A hub fails a waiting job that no known worker can run for so long; tenants may have a term of their own."""

    # webhooks
    delivery_base_s: float = 5.0
    """A delivery that failed is tried again after about this long, then three times as long each time …"""
    delivery_cap_s: float = 4 * 3600.0
    """… but never longer than this …"""
    delivery_tries: int = 12
    """… and so often: about 12 hours, for which the job is kept."""

    # bounds
    max_nodes: int = 10_000
    max_attachment_bytes: int = 256 * 1024 * 1024
    max_inputs: int = 100
    """Files that a job brings; with what is attached to it they have `max_attachment_bytes` at most."""
    max_waiting: int = 2_000_000
    max_open_bytes: int = 16 * 1024 * 1024 * 1024
    """What the payloads of all open jobs, waiting or leased, may take together."""
    max_metadata_bytes: int = 64 * 1024
    keep_completed_s: float = 24 * 3600.0
    keep_cancelled_s: float = 24 * 3600.0
    keep_failed_s: float = 7 * 24 * 3600.0
    keep_delivered_s: float = 24 * 3600.0
    keep_undelivered_s: float = 7 * 24 * 3600.0
    keep_offline_workers_s: float = 7 * 24 * 3600.0
    """A worker that has been offline for so long is forgotten, with its totals and blocks."""


IDLE_HEARTBEAT_S = 15.0
"""So often an idle agent is heard of, give or take a fifth."""
SHORTEST_LOST_S = 2 * IDLE_HEARTBEAT_S
_POSITIVE = ("lease_ttl_s", "acknowledge_s", "sweep_s", "round_s")


def problem_of(rules: Rules) -> tuple[str, str] | None:
    """A rule that no fleet can live by, and why. What is not a number is none either."""
    for name in _POSITIVE:
        if not getattr(rules, name) > 0:
            return name, "must be more than 0 seconds"
    if not rules.worker_lost_s >= SHORTEST_LOST_S:
        return "worker_lost_s", (
            f"must be at least {SHORTEST_LOST_S:g} seconds: an idle worker is heard of about every "
            f"{IDLE_HEARTBEAT_S:g}, and with less it would be taken for lost and come back again and again"
        )
    if not rules.unrunnable_after > 0:
        return "unrunnable_after", "must be more than 0 seconds"
    if not rules.max_attempts >= 1:
        return "max_attempts", "must be at least 1"
    return None


DAY_S = 86400.0

Days = Annotated[float, Meta(ge=1 / 24)]
"""An hour at least: what is on its way must find what it is about."""


class Retention(msgspec.Struct, frozen=True):
    completed_days: Days = 1.0
    """Jobs with everything that is kept with them: payload, result, facts, attempts, reference."""
    cancelled_days: Days = 1.0
    failed_days: Days = 7.0
    """The dead letter."""
    delivered_days: Days = 1.0
    """What was sent to webhooks …"""
    undelivered_days: Days = 7.0
    """… and what was given up."""
    offline_workers_days: Days = 7.0
    files_days: Days = 7.0
    """From the moment it was made; a file that an open job brings stays."""
    audit_days: Days = 90.0
    """What operators did …"""
    audit_jobs_days: Days = 7.0
    """… and what callers did to jobs."""
    events_days: Days = 30.0
    """In tenants' databases: which events of the store were taken in. Settlements say the same, and stay."""


RULES = {
    "completed_days": "keep_completed_s",
    "cancelled_days": "keep_cancelled_s",
    "failed_days": "keep_failed_s",
    "delivered_days": "keep_delivered_s",
    "undelivered_days": "keep_undelivered_s",
    "offline_workers_days": "keep_offline_workers_s",
}
"""What the engine's rules call those that they have."""
