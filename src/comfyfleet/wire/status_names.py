"""Old names of statuses, fields and capabilities, which only the API layer knows.

Each API spells the five phases in its own way; the code inside has one word for each.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode


class StatusDialect(StrEnum):
    REST = "rest"
    POOL = "pool"
    SOCKET = "socket"
    """Old WebSocket callers, and the keys in Redis."""
    BROKER = "broker"
    """The old job broker: read, never written."""


_SAME = {phase: phase.value for phase in Phase}

STATUSES: dict[StatusDialect, dict[Phase, str]] = {
    StatusDialect.REST: _SAME,
    StatusDialect.POOL: {**_SAME, Phase.LEASED: "running"},
    StatusDialect.SOCKET: {**_SAME, Phase.QUEUED: "pending", Phase.LEASED: "assigned"},
    StatusDialect.BROKER: {**_SAME, Phase.QUEUED: "pending", Phase.LEASED: "active"},
}

_PHASES: dict[str, Phase] = {word: phase for words in STATUSES.values() for phase, word in words.items()} | {
    "canceled": Phase.CANCELLED
}

KNOWN_STATUSES = tuple(sorted(_PHASES))


def status_name(phase: Phase, dialect: StatusDialect = StatusDialect.REST) -> str:
    return STATUSES[dialect][phase]


def parse_status(status: str) -> Phase:
    """A status in any spelling."""
    try:
        return _PHASES[status.lower()]
    except KeyError:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"status {status!r} is not known: use one of {', '.join(KNOWN_STATUSES)}",
        ) from None


OLD_SERVICE_NAMES = ("service_type", "job_type", "service_required")
"""Old names of the field `service` of a submission."""

OLD_TENANT_NAMES = ("customer_id", "tenant_id")
"""Old names of the field `tenant` of a submission."""


def modern_capabilities(given: dict[str, Any]) -> tuple[dict[str, Any], float | None]:
    """A worker's capabilities in the current form, and its free memory if the old form contained it.

    In the old form services are names, `models` lists models by service, and tenants are called customers.
    """
    found = dict(given)
    models = found.pop("models", None)
    models = models if isinstance(models, dict) else {}
    services = found.get("services", ())
    if isinstance(services, list | tuple):
        found["services"] = [
            {"name": service, "models": models.get(service)} if isinstance(service, str) else service
            for service in services
        ]
    if isinstance(access := found.pop("customer_access", None), dict):
        found["tenant_access"] = {
            "isolation": access.get("isolation", "none"),
            "allowed": access.get("allowed_customers") or [],
            "denied": access.get("denied_customers") or [],
        }
    if isinstance(performance := found.get("performance"), dict):
        found["performance"] = {
            name: value for name, value in performance.items() if name != "concurrent_jobs"
        }
    for name in ("worker_id", "workerId", "version"):
        found.pop(name, None)
    free_gb = None
    hardware = found.get("hardware")
    if isinstance(hardware, dict) and isinstance(memory := hardware.get("memory"), dict):
        free_gb = memory.get("available_gb")
        memory = {name: value for name, value in memory.items() if name != "available_gb"}
        found["hardware"] = {**hardware, "memory": memory}
    return found, free_gb if isinstance(free_gb, int | float) else None
