"""ComfyFleet: one address for a fleet of ComfyUI servers.

These are the public names. Each is imported at its first use, which keeps the command line fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient as FleetClient
    from comfyfleet.client.options import JobUpdate as JobUpdate
    from comfyfleet.client.sync import SyncFleetClient as SyncFleetClient
    from comfyfleet.client.webhook_receiver import WebhookEvent as WebhookEvent
    from comfyfleet.client.webhook_receiver import verify_webhook as verify_webhook
    from comfyfleet.model.errors import ComfyFleetError as ComfyFleetError
    from comfyfleet.model.errors import Fault as Fault
    from comfyfleet.model.errors import Refusal as Refusal
    from comfyfleet.model.errors import RefusalCode as RefusalCode
    from comfyfleet.model.failure import Failure as Failure
    from comfyfleet.model.failure import FailureKind as FailureKind
    from comfyfleet.model.failure import ServiceFailed as ServiceFailed
    from comfyfleet.model.job import Attachment as Attachment
    from comfyfleet.model.job import JobResult as JobResult
    from comfyfleet.model.job import OutputFile as OutputFile
    from comfyfleet.model.requirement import HardwareNeed as HardwareNeed
    from comfyfleet.model.requirement import LocationNeed as LocationNeed
    from comfyfleet.model.requirement import Preferences as Preferences
    from comfyfleet.model.requirement import Requirements as Requirements
    from comfyfleet.model.workflow_graph import InvalidWorkflow as InvalidWorkflow
    from comfyfleet.model.workflow_hash import exact_hash as exact_hash
    from comfyfleet.model.workflow_hash import hash_workflow as hash_workflow
    from comfyfleet.policy.failover import FailoverStrategy as FailoverStrategy
    from comfyfleet.policy.failover import SmartFailover as SmartFailover
    from comfyfleet.policy.rules import Rules as Rules
    from comfyfleet.policy.rules import Weights as Weights
    from comfyfleet.pool.events import PoolEvent as PoolEvent
    from comfyfleet.pool.options import Affinity as Affinity
    from comfyfleet.pool.options import Server as Server
    from comfyfleet.pool.options import attach as attach
    from comfyfleet.pool.pool import WorkflowPool as WorkflowPool
    from comfyfleet.pool.records import BlockedWorkflow as BlockedWorkflow
    from comfyfleet.pool.records import JobCancelled as JobCancelled
    from comfyfleet.pool.records import JobFailed as JobFailed
    from comfyfleet.pool.records import JobRecord as JobRecord
    from comfyfleet.pool.records import PoolStats as PoolStats
    from comfyfleet.pool.records import ServerStats as ServerStats
    from comfyfleet.pool.sync import SyncWorkflowPool as SyncWorkflowPool

__version__ = "0.1.0"

_NAMES = {
    "comfyfleet.client.client": ("FleetClient",),
    "comfyfleet.client.options": ("JobUpdate",),
    "comfyfleet.client.sync": ("SyncFleetClient",),
    "comfyfleet.client.webhook_receiver": ("WebhookEvent", "verify_webhook"),
    "comfyfleet.model.errors": ("ComfyFleetError", "Fault", "Refusal", "RefusalCode"),
    "comfyfleet.model.failure": ("Failure", "FailureKind", "ServiceFailed"),
    "comfyfleet.model.job": ("Attachment", "JobResult", "OutputFile"),
    "comfyfleet.model.requirement": ("HardwareNeed", "LocationNeed", "Preferences", "Requirements"),
    "comfyfleet.model.workflow_graph": ("InvalidWorkflow",),
    "comfyfleet.model.workflow_hash": ("exact_hash", "hash_workflow"),
    "comfyfleet.policy.failover": ("FailoverStrategy", "SmartFailover"),
    "comfyfleet.policy.rules": ("Rules", "Weights"),
    "comfyfleet.pool.events": ("PoolEvent",),
    "comfyfleet.pool.options": ("Affinity", "Server", "attach"),
    "comfyfleet.pool.pool": ("WorkflowPool",),
    "comfyfleet.pool.records": (
        "BlockedWorkflow",
        "JobCancelled",
        "JobFailed",
        "JobRecord",
        "PoolStats",
        "ServerStats",
    ),
    "comfyfleet.pool.sync": ("SyncWorkflowPool",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
