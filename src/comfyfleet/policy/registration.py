"""What becomes of a worker's record when its agent registers, or says that its server cannot be used. Pure."""

from __future__ import annotations

import msgspec

from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import ProfileKey
from comfyfleet.model.worker import Capabilities, WorkerRecord
from comfyfleet.policy.workflow_stats import still_warm


def capabilities_of(call: RegisterWorker, known: WorkerRecord | None) -> Capabilities:
    """An agent whose server never answered knows nothing of it: what was known before stays."""
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
    """Refuses where another agent works under this name: one that was heard of since `lost_s` ago."""
    if stored.is_other(call.instance) and not stored.is_offline and now < stored.last_seen_at + lost_s:
        raise Refusal(
            RefusalCode.NOT_ALLOWED,
            f"another agent works as {call.worker_id!r} already: give this one a name of its own (--name), or stop "
            f"the other one. If that is gone, this one is let in {lost_s:g} s after its last sign of life",
        )
    capabilities = capabilities_of(call, stored)
    return msgspec.structs.replace(
        stored,
        capabilities=capabilities,
        # Another engine may have parted it from its equals meanwhile.
        profile=stored.profile if stored.capabilities == capabilities else profile,
        slots=call.slots,
        live=call.live if stored.is_offline else still_warm(stored.live, call.live),
        connected_at=now if stored.is_offline and not call.offline_reason else stored.connected_at,
        last_seen_at=now,
        is_offline=bool(call.offline_reason),
        offline_reason=call.offline_reason,
        was_lost=stored.was_lost and (stored.is_offline or not call.offline_reason),
        disconnects=stored.disconnects + (bool(call.offline_reason) and not stored.is_offline),
        # The process that drained is gone. What comes back is not sent away again, and gets no work either
        # until the operator who said so says otherwise.
        is_draining=stored.is_draining and not stored.is_offline,
        is_paused=stored.is_paused or (stored.is_draining and stored.is_offline),
        registrations=stored.registrations + 1,
        instance=call.instance,
    )
