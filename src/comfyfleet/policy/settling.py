"""What follows for a tenant's book from how a round ended in the central store. Pure: databases write what is made
here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from comfyfleet.model.dispatch import Attempt, AttemptOutcome, Dispatch, Phase
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import Job, JobResult
from comfyfleet.model.ledger import Hold, HoldId, Posting, Price, RunEntry, Settlement, Usage
from comfyfleet.policy import accounting

_COPIED = ("worker_id", "prompt_id", "started_at", "completed_at", "failure", "is_late", "priority")
_MICROS_A_MILLISECOND = 1_000_000 / 3_600_000


class Verdict(NamedTuple):
    """The end of a round, as its tenant's database is to write it."""

    settlement: Settlement
    posting: Posting
    changes: dict[str, Any]
    run: RunEntry


def hold_of(dispatch: Dispatch) -> HoldId:
    return HoldId(dispatch.job_id, dispatch.round)


def deciding_attempt(dispatch: Dispatch, attempts: Sequence[Attempt]) -> Attempt | None:
    """The last of the round; of one that completed, the one that did."""
    of_round = [each for each in attempts if each.round == dispatch.round]
    if dispatch.phase is Phase.COMPLETED:
        of_round = [each for each in of_round if each.outcome is AttemptOutcome.COMPLETED]
    return of_round[-1] if of_round else None


def settled(
    dispatch: Dispatch,
    stub: Job,
    attempts: Sequence[Attempt],
    hold: Hold,
    price: Price | None,
    job: Job,
    result: JobResult | None,
    rate_per_hour: float | None,
    now: float,
) -> Verdict:
    """`stub` is the central store's record, `job` the tenant's; `result` what the deciding attempt left there."""
    assert dispatch.phase.is_final, "a round that goes on is not settled"
    at = stub.completed_at or now
    deciding = deciding_attempt(dispatch, attempts)
    # A worker that works on the store itself leaves its result there, and nobody has looked at it.
    is_direct = result is None and stub.result is not None
    result = stub.result if result is None else result
    is_completed = dispatch.phase is Phase.COMPLETED
    outputs = len(result.files) if is_completed and result is not None else 0
    service = job.payload.requirements.service
    usage = Usage(service, outputs, 0 if deciding is None else _milliseconds(deciding))
    amount = _cost(price, usage, hold) if is_completed and price is not None else 0
    settlement = accounting.settle(hold, dispatch.phase, amount, at)
    changes: dict[str, Any] = {name: getattr(stub, name) for name in _COPIED}
    changes["result"] = result if is_completed else None
    if is_completed and job.payload.attachments:
        changes["payload"] = msgspec.structs.replace(job.payload, attachments=())
    spent = sum(_milliseconds(each) for each in attempts if each.round == dispatch.round)
    run = RunEntry(
        hold.hold_id,
        hold.tenant,
        dispatch.workflow_hash,
        _keepable(service),
        dispatch.phase.value,
        at,
        None if deciding is None else WorkerId(_keepable(deciding.worker_id)),
        outputs,
        spent,
        settlement.consumed,
        None if rate_per_hour is None else round(rate_per_hour * spent * _MICROS_A_MILLISECOND),
        ("worker" if is_direct else "hub") if is_completed else "",
    )
    return Verdict(settlement, accounting.settling_posting(hold, settlement), changes, run)


def _cost(price: Price, usage: Usage, hold: Hold) -> int:
    # Known since the round began, and held. The payload that it was read from may be unreadable by now.
    return accounting.cost(price, usage) if accounting.is_told_by_worker(price) else hold.amount


def _keepable(name: str) -> str:
    """What every database can keep of it: callers and workers choose names, and none may keep a round unsettled."""
    return name.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _milliseconds(attempt: Attempt) -> int:
    return 0 if attempt.ended_at is None else max(0, round((attempt.ended_at - attempt.started_at) * 1000))
