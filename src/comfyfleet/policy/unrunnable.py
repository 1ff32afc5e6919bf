"""Jobs that no known worker can run: when they have waited long enough, and what is said of it."""

from __future__ import annotations

from comfyfleet.model.dispatch import Dispatch, Phase, Standing
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy.rules import Rules


def unrunnable_after(tenant: Tenant | None, rules: Rules) -> float:
    """Its own term, or else the hub's setting, by which tenants without terms go."""
    own = None if tenant is None else tenant.unrunnable_after
    return rules.unrunnable_after if own is None else own


def fails_at(dispatch: Dispatch, since: float, after_s: float) -> float | None:
    """`since`: when it was first seen that nobody can run its class. None: it does not wait for a worker."""
    if dispatch.phase is not Phase.QUEUED or dispatch.is_held or dispatch.standing is Standing.PAUSED:
        return None
    if dispatch.relaxed_class is not None:
        # It soon asks for less.
        return None
    return max(since, dispatch.queued_at, dispatch.not_before or 0.0) + after_s


def failure_of(after_s: float, lacking: str | None) -> Failure:
    nearest = "none is known" if lacking is None else f"the nearest: {lacking}"
    return Failure(
        FailureKind.UNRUNNABLE,
        f"no worker that is here or known could run it for {_spoken(after_s)}; {nearest}. "
        "Start a worker that can, and retry it",
    )


def _spoken(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"
