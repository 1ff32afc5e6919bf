"""Prices, ledger entries, settlements, the check of a ledger, and the comparison of a round in the central store and in
the tenant's database. Pure: databases write the values, the reconciler repairs the differences.

A price gives two numbers: the *ceiling*, which is held when a round begins, and the *cost* of a completed round, which
never exceeds the hold. Every change of an account is a posting; an account is their sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, assert_never

import msgspec
from msgspec.structs import replace

from comfyfleet.model.dispatch import Attempt, AttemptOutcome, Dispatch, Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.job import Job, JobResult
from comfyfleet.model.ledger import (
    MAX_CREDITS,
    Account,
    Adjustment,
    CreditGrant,
    FlatPrice,
    GpuPrice,
    GrantState,
    Hold,
    HoldId,
    Ledger,
    Outcome,
    OutputPrice,
    Posting,
    PostingKind,
    Price,
    RunEntry,
    ServicePrice,
    Settlement,
    Usage,
)

_MILLISECONDS = 1000


def ceiling(price: Price, service: str) -> int:
    """The maximum cost of a round, which the hold covers."""
    match price:
        case FlatPrice(credits=amount):
            pass
        case ServicePrice():
            amount = _of_service(price, service)
        case OutputPrice():
            amount = price.base + price.credits_each * price.most_outputs
        case GpuPrice():
            amount = price.base + price.credits_per_second * price.most_seconds
        case _:
            assert_never(price)
    _check_amount(amount, "the price of a job")
    return amount


def cost(price: Price, usage: Usage) -> int:
    """The cost of a completed round, at most its ceiling. Fractions of a credit are rounded up."""
    match price:
        case FlatPrice(credits=amount):
            return amount
        case ServicePrice():
            return _of_service(price, usage.service)
        case OutputPrice():
            return price.base + price.credits_each * min(max(usage.outputs, 0), price.most_outputs)
        case GpuPrice():
            milliseconds = min(max(usage.gpu_milliseconds, 0), price.most_seconds * _MILLISECONDS)
            # Integer arithmetic, so that two machines never round differently.
            return price.base - (-price.credits_per_second * milliseconds // _MILLISECONDS)
    assert_never(price)


def depends_on_worker_report(price: Price) -> bool:
    """Whether the cost depends on the worker's report."""
    return not isinstance(price, FlatPrice | ServicePrice)


def _of_service(price: ServicePrice, service: str) -> int:
    amount = price.services.get(service, price.otherwise)
    if amount is None:
        raise Refusal(
            RefusalCode.NOT_ALLOWED,
            f"the service {service!r} has no price; choose one of {', '.join(sorted(price.services)) or 'none'}, "
            "or ask the operator of this hub to set a price",
        )
    return amount


def reserve(hold_id: HoldId, tenant: TenantId, amount: int, now: float) -> Hold:
    _check_amount(amount, "a hold")
    return Hold(hold_id, tenant, amount, now)


def settle(hold: Hold, phase: Phase, amount: int, now: float) -> Settlement:
    """Consumed if and only if completed: the cost, at most the hold. The same entry returns the rest."""
    assert phase.is_final, "an open round keeps its hold"
    if phase is not Phase.COMPLETED:
        return Settlement(hold.hold_id, Outcome.REFUNDED, 0, now)
    _check_amount(amount, "the cost of a job")
    return Settlement(hold.hold_id, Outcome.CONSUMED, min(amount, hold.amount), now)


def posting_of(entry: Hold | CreditGrant | Adjustment) -> Posting:
    match entry:
        case Hold(hold_id=hold_id, tenant=tenant, amount=amount, at=at):
            return Posting(tenant, PostingKind.RESERVE, 0, amount, at, str(hold_id))
        case CreditGrant(grant_id=reference, tenant=tenant, amount=amount, at=at, note=note):
            assert entry.state is GrantState.GRANTED, "a pending grant has no posting"
            return Posting(tenant, PostingKind.GRANT, amount, 0, at, reference, note)
        case Adjustment(adjustment_id=reference, tenant=tenant, amount=amount, at=at, note=note):
            return Posting(tenant, PostingKind.ADJUST, amount, 0, at, reference, note)
    assert_never(entry)


def settling_posting(hold: Hold, settlement: Settlement) -> Posting:
    assert hold.hold_id == settlement.hold_id, "a settlement belongs to one hold"
    assert 0 <= settlement.consumed <= hold.amount, "a settlement cannot exceed its hold"
    is_consumed = settlement.outcome is Outcome.CONSUMED
    assert is_consumed or not settlement.consumed, "a refund consumes nothing"
    kind = PostingKind.CONSUME if is_consumed else PostingKind.REFUND
    return Posting(
        hold.tenant,
        kind,
        -settlement.consumed,
        -hold.amount,
        settlement.at,
        str(hold.hold_id),
        settlement.note,
    )


def grant(
    grant_id: str, tenant: TenantId, amount: int, now: float, *, is_pending: bool = False, note: str = ""
) -> CreditGrant:
    _check_amount(amount, "a grant", least=1)
    state = GrantState.PENDING if is_pending else GrantState.GRANTED
    return CreditGrant(grant_id, tenant, amount, now, state, note)


def adjust(adjustment_id: str, tenant: TenantId, amount: int, now: float, note: str) -> Adjustment:
    _check_amount(abs(amount), "an adjustment, up or down,", least=1)
    return Adjustment(adjustment_id, tenant, amount, now, note)


def credits_short(tenant: TenantId, amount: int, account: Account) -> Refusal:
    waiting = f"; {account.pending} more are granted but not confirmed yet" if account.pending else ""
    return Refusal(
        RefusalCode.CREDITS_SHORT,
        f"this needs {amount} credits and tenant {tenant} can spend {account.available}: it has {account.balance}, "
        f"of which {account.held} are held for open jobs{waiting}. "
        "Add credits, or wait until open jobs have ended",
        needed=amount,
        available=account.available,
    )


def adjusted_too_far(tenant: TenantId, amount: int, account: Account) -> Refusal:
    return Refusal(
        RefusalCode.CREDITS_SHORT,
        f"{-amount} credits cannot be taken from tenant {tenant}: it has {account.balance}, of which {account.held} "
        f"are held for open jobs. Take {account.available} at most, or wait until open jobs have ended",
        needed=-amount,
        available=account.available,
    )


def total(tenant: TenantId, postings: Iterable[Posting]) -> Account:
    """The account that is the sum of these postings."""
    balance = held = 0
    for each in postings:
        balance += each.balance
        held += each.held
    return Account(tenant, balance, held)


def problems(ledger: Ledger) -> list[str]:
    """Every broken invariant of a ledger, as text."""
    return [*_wrong_sums(ledger), *_wrong_holds(ledger), *_wrong_endings(ledger)]


def _wrong_sums(ledger: Ledger) -> list[str]:
    found, account = [], ledger.account
    summed = total(account.tenant, ledger.postings)
    settled = {each.hold_id for each in ledger.settlements}
    open_credits = sum(each.amount for each in ledger.holds if each.hold_id not in settled)
    pending = sum(each.amount for each in ledger.grants if each.state is GrantState.PENDING)
    if (account.balance, account.held) != (summed.balance, summed.held):
        found.append(
            f"the account says {account.balance} with {account.held} held, its postings add up to {summed.balance} "
            f"with {summed.held} held"
        )
    if account.held != open_credits:
        found.append(f"{account.held} are held, the open holds add up to {open_credits}")
    if account.pending != pending:
        found.append(f"{account.pending} are pending, the pending grants add up to {pending}")
    if account.available < 0:
        found.append(f"the holds exceed the balance by {-account.available}")
    return found


def _wrong_holds(ledger: Ledger) -> list[str]:
    found = []
    holds = {each.hold_id: each for each in ledger.holds}
    counted = Counter(each.hold_id for each in ledger.settlements)
    found += [f"hold {hold_id} is settled {times} times" for hold_id, times in counted.items() if times > 1]
    expected: Counter[Posting] = Counter(posting_of(each) for each in ledger.holds)
    expected.update(posting_of(each) for each in ledger.grants if each.state is GrantState.GRANTED)
    for each in ledger.settlements:
        if each.hold_id not in holds:
            found.append(f"{each.hold_id} is settled without a hold")
        else:
            expected[settling_posting(holds[each.hold_id], each)] += 1
    written = Counter(
        replace(each, number=0) for each in ledger.postings if each.kind is not PostingKind.ADJUST
    )
    found += [f"{each.kind} of {each.reference} is not in the ledger" for each in expected - written]
    found += [f"{each.kind} of {each.reference} has no cause" for each in written - expected]
    return found


def _wrong_endings(ledger: Ledger) -> list[str]:
    """Consumed ⇔ completed; refunded ⇔ failed or cancelled; open ⇔ the round is open."""
    found = []
    outcomes = {each.hold_id: each.outcome for each in ledger.settlements}
    for hold in ledger.holds:
        ended, outcome = ledger.endings.get(hold.hold_id), outcomes.get(hold.hold_id)
        due = None if ended is None else Outcome.CONSUMED if ended == Phase.COMPLETED else Outcome.REFUNDED
        if due is not outcome:
            found.append(f"round {hold.hold_id} is {ended or 'open'} and its hold is {outcome or 'open'}")
    return found


def _check_amount(amount: int, what: str, least: int = 0) -> None:
    if not least <= amount <= MAX_CREDITS:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{what} must be a whole number of credits from {least} to {MAX_CREDITS}, not {amount}",
        )


_COPIED = ("worker_id", "prompt_id", "started_at", "completed_at", "failure", "is_late", "priority")
_MICROS_A_MILLISECOND = 1_000_000 / 3_600_000


class SettlementDecision(NamedTuple):
    """The end of a round, as the tenant's database writes it."""

    settlement: Settlement
    posting: Posting
    changes: dict[str, Any]
    run: RunEntry


def hold_of(dispatch: Dispatch) -> HoldId:
    return HoldId(dispatch.job_id, dispatch.round)


def deciding_attempt(dispatch: Dispatch, attempts: Sequence[Attempt]) -> Attempt | None:
    """The completed attempt of a completed round, else the last attempt of the round."""
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
) -> SettlementDecision:
    """`stub` is the record in the central store, `job` and `result` are those in the tenant's database."""
    assert dispatch.phase.is_final, "an open round is not settled"
    at = stub.completed_at or now
    deciding = deciding_attempt(dispatch, attempts)
    # A direct worker writes its result to the store, and no hub has verified it.
    is_direct = result is None and stub.result is not None
    result = stub.result if result is None else result
    is_completed = dispatch.phase is Phase.COMPLETED
    outputs = len(result.files) if is_completed and result is not None else 0
    service = job.payload.requirements.service
    usage = Usage(service, outputs, 0 if deciding is None else _milliseconds(deciding))
    amount = _cost(price, usage, hold) if is_completed and price is not None else 0
    settlement = settle(hold, dispatch.phase, amount, at)
    changes: dict[str, Any] = {name: getattr(stub, name) for name in _COPIED}
    changes["result"] = result if is_completed else None
    if is_completed and job.payload.attachments:
        changes["payload"] = replace(job.payload, attachments=())
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
    return SettlementDecision(settlement, settling_posting(hold, settlement), changes, run)


def _cost(price: Price, usage: Usage, hold: Hold) -> int:
    # Such a price equals the hold. The payload, which names the service, may be unreadable by now.
    return cost(price, usage) if depends_on_worker_report(price) else hold.amount


def _keepable(name: str) -> str:
    """A form that every database accepts. Callers and workers choose names, and no name may prevent a settlement."""
    return name.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _milliseconds(attempt: Attempt) -> int:
    return 0 if attempt.ended_at is None else max(0, round((attempt.ended_at - attempt.started_at) * 1000))


class FindingKind(StrEnum):
    UNSENT = "unsent"
    """Open in the tenant's database and missing in the store: the reconciler sends it again."""
    UNSETTLED = "unsettled"
    """Ended in the store and open in the tenant's database: the reconciler settles it."""
    UNCONFIRMED = "unconfirmed"
    """Ended in both, but not marked as settled in the store: the reconciler marks it."""
    OUTLIVED = "outlived"
    """Ended in the tenant's database and open in the store: the reconciler ends it there."""
    UNKNOWN = "unknown"
    """Open in the store and unknown to the tenant's database: the reconciler ends it without a charge."""
    AHEAD = "ahead"
    """The store has a later round, or an ended round that the tenant's database lacks. The database was restored from
    an older state: an operator must act."""
    OLD_HOLD = "old_hold"
    """The hold is older than jobs usually are: an operator should look."""
    WRONG_LEDGER = "wrong_book"
    """A ledger is inconsistent: an operator must act."""
    UNSEEN = "unseen"
    """The tenant's database was not reachable, so nothing could be compared."""

    @property
    def mends_itself(self) -> bool:
        return self not in (
            FindingKind.AHEAD,
            FindingKind.OLD_HOLD,
            FindingKind.WRONG_LEDGER,
            FindingKind.UNSEEN,
        )


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: FindingKind
    tenant: TenantId
    message: str
    hold_id: HoldId | None = None


def check_open_round(hold_id: HoldId, dispatch: Dispatch | None) -> FindingKind | None:
    """Compare a sent, open round of a tenant's database with the dispatch in the store."""
    if dispatch is None or dispatch.round < hold_id.round:
        return FindingKind.UNSENT
    if dispatch.round > hold_id.round:
        return FindingKind.AHEAD
    return FindingKind.UNSETTLED if dispatch.phase.is_final else None


def check_dispatch(dispatch: Dispatch, is_known: bool, ended: Phase | None) -> FindingKind | None:
    """Compare a dispatch with the tenant's database, which may know the round and its end."""
    if dispatch.phase.is_final:
        if dispatch.settled_at is not None:
            return None
        if not is_known:
            # Whether it must be paid is not known any more.
            return FindingKind.AHEAD
        return None if ended is None else FindingKind.UNCONFIRMED
    if not is_known:
        return FindingKind.UNKNOWN
    return None if ended is None else FindingKind.OUTLIVED
