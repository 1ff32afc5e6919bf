"""Every number that policy uses: limits, waits and weights, and the retention of each kind of record."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from comfyfleet.model.tenant import DEFAULT_CHARGE_S

MIN_PRIORITY = -1000
MAX_PRIORITY = 1000


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weight of each dimension in a score."""

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
    """A lease without a first heartbeat in this time is released; this costs no attempt."""
    worker_lost_s: float = 60.0
    cancel_grace_s: float = 30.0
    """A lease is revoked if its worker has not confirmed a cancellation in this time."""
    sweep_s: float = 2.0
    """The longest time between sweeps."""

    # attempts
    max_attempts: int = 3
    max_worker_faults: int = 5
    max_releases: int = 20
    """How often a job may be released without a result. Declined jobs do not count."""
    retry_base_s: float = 1.0
    retry_cap_s: float = 60.0
    give_up_workers: int = 3
    """The job fails when its lease expired on so many different workers, or when it failed on so many and its
    workflow is blocked on every compatible worker: the workflow is to blame."""
    accept_timeout_s: float = 30.0
    start_timeout_s: float | None = None
    stall_timeout_s: float | None = None

    # blocks
    cooldown_s: float = 60.0
    max_failures_before_block: int = 1
    inventory_block_s: float = 3600.0
    """How long a worker stays blocked for a missing item, if its inventory does not change."""
    max_server_deaths: int = 2
    """After so many server deaths a workflow is refused to its tenant until an operator lifts the block."""
    poison_workflows: int = 3
    """A tenant with so many refused workflows within `poison_window_s` is paused."""
    poison_window_s: float = 3600.0
    quarantine_blocks: int = 32
    quarantine_s: float = 300.0

    # matching
    window_lanes: int = 32
    quantum_s: float = 30.0
    """Tenants whose virtual times differ by less count as equal, so that loaded models decide."""
    charge_s: float = DEFAULT_CHARGE_S
    affinity_wait_s: float = 3.0
    """How long a job waits for a worker that it prefers."""
    patience: float = 2.0
    """How much later than first come, first served a job may start so that workers keep their models, in load times of
    its own models. 0: first come, first served."""
    bigger_card_wait_s: float = 60.0
    """After out of memory a job needs a bigger GPU. So often policy checks that there still is one."""
    weights: Weights = Weights()
    round_s: float = 1.0
    """The longest time between matching passes, in case a wake-up is lost. Not the round of a job."""

    # priority
    urgency_points: dict[str, int] = msgspec.field(
        default_factory=lambda: {"low": -10, "normal": 0, "high": 10, "critical": 50}
    )
    deadline_window_s: float = 600.0
    """So long before its deadline a job's priority starts to rise, by `deadline_points` in `deadline_steps`."""
    deadline_points: int = 100
    deadline_steps: int = 10

    # watching
    recheck_s: float = 5.0
    """A waiting caller reads the job at least this often, in case a notification is lost."""

    # dependencies
    max_dependencies: int = 100
    held_look_s: float = 5.0
    """A job that waits for others is checked after this time, in case a notification is lost, then less often."""
    held_look_cap_s: float = 900.0
    """The longest time between such checks."""

    # jobs that nobody can run
    unrunnable_after: float = 24 * 3600.0
    """A waiting job fails if no known worker could run it for so long. Tenants may have their own value."""

    # webhooks
    delivery_base_s: float = 5.0
    """The first retry of a failed delivery. Each further wait is three times as long, up to `delivery_cap_s`."""
    delivery_cap_s: float = 4 * 3600.0
    delivery_tries: int = 12
    """About 12 hours in total. The job is kept until then."""

    # bounds
    max_nodes: int = 10_000
    max_attachment_bytes: int = 256 * 1024 * 1024
    max_inputs: int = 100
    """Input files of a job. With its attachments they have at most `max_attachment_bytes`."""
    max_waiting: int = 2_000_000
    max_open_bytes: int = 16 * 1024 * 1024 * 1024
    """The total payload size of all open jobs."""
    max_metadata_bytes: int = 64 * 1024
    keep_completed_s: float = 24 * 3600.0
    keep_cancelled_s: float = 24 * 3600.0
    keep_failed_s: float = 7 * 24 * 3600.0
    keep_delivered_s: float = 24 * 3600.0
    keep_undelivered_s: float = 7 * 24 * 3600.0
    keep_offline_workers_s: float = 7 * 24 * 3600.0
    """A worker that is offline for so long is removed with its totals and blocks."""


IDLE_HEARTBEAT_S = 15.0
"""The interval of an idle agent's heartbeats, plus or minus a fifth."""
SHORTEST_LOST_S = 2 * IDLE_HEARTBEAT_S
_POSITIVE = ("lease_ttl_s", "acknowledge_s", "sweep_s", "round_s")


def problem_of(rules: Rules) -> tuple[str, str] | None:
    """The first invalid rule and the reason. NaN is not valid either."""
    for name in _POSITIVE:
        if not getattr(rules, name) > 0:
            return name, "must be more than 0 seconds"
    if not rules.worker_lost_s >= SHORTEST_LOST_S:
        return "worker_lost_s", (
            f"must be at least {SHORTEST_LOST_S:g} seconds: an idle worker sends a heartbeat about every "
            f"{IDLE_HEARTBEAT_S:g} seconds, and with less it would be lost and register again and again"
        )
    if not rules.unrunnable_after > 0:
        return "unrunnable_after", "must be more than 0 seconds"
    if not rules.patience >= 0:
        return "patience", "must be 0 or more"
    if not rules.max_attempts >= 1:
        return "max_attempts", "must be at least 1"
    return None


DAY_S = 86400.0

Days = Annotated[float, Meta(ge=1 / 24)]
"""At least an hour, so that delayed messages still find their record."""


class Retention(msgspec.Struct, frozen=True):
    """How many days each kind of record is kept after its last change."""

    completed_days: Days = 1.0
    """Jobs with payload, result, facts, attempts and reference."""
    cancelled_days: Days = 1.0
    failed_days: Days = 7.0
    """Failed jobs: the dead letter queue."""
    delivered_days: Days = 1.0
    """Sent webhook deliveries."""
    undelivered_days: Days = 7.0
    """Webhook deliveries that were given up."""
    offline_workers_days: Days = 7.0
    files_days: Days = 7.0
    """Counted from the creation. An input file of an open job stays."""
    audit_days: Days = 90.0
    """Audit entries of operators."""
    audit_jobs_days: Days = 7.0
    """Audit entries of callers about jobs."""
    events_days: Days = 30.0
    """Processed events in tenant databases. The settlements stay."""


RULES = {
    "completed_days": "keep_completed_s",
    "cancelled_days": "keep_cancelled_s",
    "failed_days": "keep_failed_s",
    "delivered_days": "keep_delivered_s",
    "undelivered_days": "keep_undelivered_s",
    "offline_workers_days": "keep_offline_workers_s",
}
"""The rule of the engine for each retention setting."""
