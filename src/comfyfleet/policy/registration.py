"""The worker record after a registration, or after an agent reports that its server cannot be used. Pure."""

from __future__ import annotations

import msgspec

from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import ProfileKey
from comfyfleet.model.worker import Capabilities, WorkerRecord
from comfyfleet.policy.workflow_stats import merge_live_state


def capabilities_of(call: RegisterWorker, known: WorkerRecord | None) -> Capabilities:
    """If the server never answered, the agent knows no capabilities, and the old ones stay."""
    return known.capabilities if call.offline_reason and known is not None else call.capabilities


def registered_first(call: RegisterWorker, profile: ProfileKey, now: float) -> WorkerRecord:
    return WorkerRecord(
        call.worker_id,
        call.capabilities,
        profile,
        call.slots,
        now,
        now,
        call.live,
        is_offline=bool(call.offline_reason),
        offline_reason=call.offline_reason,
        registrations=1,
        instance=call.instance,
    )


def registered_again(
    stored: WorkerRecord, call: RegisterWorker, profile: ProfileKey, now: float, lost_s: float
) -> WorkerRecord:
    """Raises a refusal if another agent uses this worker id and sent a heartbeat within `lost_s`."""
    if stored.is_other(call.instance) and not stored.is_offline and now < stored.last_seen_at + lost_s:
        raise Refusal(
            RefusalCode.NOT_ALLOWED,
            f"another agent works as {call.worker_id!r} already: give this one another name (--name), or stop the "
            f"other one. If the other one is gone, this one can register {lost_s:g} s after its last heartbeat",
        )
    capabilities = capabilities_of(call, stored)
    return msgspec.structs.replace(
        stored,
        capabilities=capabilities,
        # Another engine may have changed the profile meanwhile.
        profile=stored.profile if stored.capabilities == capabilities else profile,
        slots=call.slots,
        live=call.live if stored.is_offline else merge_live_state(stored.live, call.live),
        connected_at=now if stored.is_offline and not call.offline_reason else stored.connected_at,
        last_seen_at=now,
        is_offline=bool(call.offline_reason),
        offline_reason=call.offline_reason,
        was_lost=stored.was_lost and (stored.is_offline or not call.offline_reason),
        disconnects=stored.disconnects + (bool(call.offline_reason) and not stored.is_offline),
        # The drained process is gone. A new one may stay, but is paused until an operator resumes it.
        is_draining=stored.is_draining and not stored.is_offline,
        is_paused=stored.is_paused or (stored.is_draining and stored.is_offline),
        registrations=stored.registrations + 1,
        instance=call.instance,
    )
