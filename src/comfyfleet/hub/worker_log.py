"""Workers that come, leave or are lost, in the audit log: by the hub whose engine noticed."""

from __future__ import annotations

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.audit import Audit
from comfyfleet.model.access import AuditEntry, Role
from comfyfleet.model.fact import Event, FleetEvent


class WorkerLog:
    def __init__(self, engine: Engine, audit: Audit) -> None:
        self._audit = audit
        self._leave_bus = engine.bus.listen(self._hear)

    def close(self) -> None:
        self._leave_bus()

    def _hear(self, event: Event) -> None:
        if not isinstance(event, FleetEvent) or event.kind not in ("online", "offline"):
            return
        action = "worker_registered"
        if event.kind == "offline":
            action = "worker_lost" if event.data.get("is_lost") else "worker_left"
        self._audit.happened(AuditEntry(0.0, "", Role.WORKER, action, event.worker_id, outcome="done"))
