"""SQL of the credit ledger. Every change of an account goes through `post`, which also writes a posting."""

from __future__ import annotations

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.ledger import (
    Account,
    CreditGrant,
    GrantState,
    Hold,
    HoldId,
    Ledger,
    Outcome,
    Posting,
    PostingKind,
    Settlement,
)
from comfyfleet.tenancy.database import tenant_rows
from comfyfleet.tenancy.database.executor import Row, Work, page, row, rows
from comfyfleet.tenancy.database.values import MAX_LEDGER, PostingResult

# One statement compares and changes, so two simultaneous spends cannot overdraw the account.
_MOVE_CREDITS = """
UPDATE @accounts SET balance = balance + :balance, held = held + :held
WHERE tenant = :tenant AND balance + :balance - held - :held >= 0 AND fence IS NULL RETURNING balance
"""
_POST = """
INSERT INTO @postings (tenant, number, kind, balance, held, at, reference, note)
VALUES (:tenant, (SELECT coalesce(max(number), 0) + 1 FROM @postings WHERE tenant = :tenant), :kind, :balance, :held,
    :at, :reference, :note) ON CONFLICT DO NOTHING RETURNING number
"""
_POSTED = (
    "SELECT balance, held FROM @postings WHERE tenant = :tenant AND kind = :kind AND reference = :reference"
)
_ACCOUNT = """
SELECT coalesce((SELECT balance FROM @accounts WHERE tenant = :tenant), 0),
    coalesce((SELECT held FROM @accounts WHERE tenant = :tenant), 0),
    coalesce((SELECT sum(amount) FROM @grants WHERE tenant = :tenant AND state = 'pending'), 0)
"""
_SETTLE = """
INSERT INTO @settlements (job_id, round, amount, outcome, phase, consumed, at, note)
VALUES (:job_id, :round, :amount, :outcome, :phase, :consumed, :at, :note) ON CONFLICT DO NOTHING RETURNING job_id
"""
_GRANT = """
INSERT INTO @grants (tenant, grant_id, amount, at, state, note)
VALUES (:tenant, :grant_id, :amount, :at, :state, :note) ON CONFLICT DO NOTHING RETURNING grant_id
"""
_CONFIRM = """
UPDATE @grants SET state = 'granted', at = :at
WHERE tenant = :tenant AND grant_id = :grant_id AND state = 'pending' AND amount = :amount RETURNING grant_id
"""
_VOID = """
UPDATE @grants SET state = 'void'
WHERE tenant = :tenant AND grant_id = :grant_id AND state = 'pending' RETURNING grant_id
"""
GRANTS = "SELECT grant_id, tenant, amount, at, state, note FROM @grants WHERE tenant = :tenant"
_KNOWN_GRANT = "SELECT state, amount FROM @grants WHERE tenant = :tenant AND grant_id = :grant_id"
_HOLD = "SELECT job_id, round, tenant, amount, at FROM @holds"
_OPEN_HOLDS = f"{_HOLD} WHERE NOT is_settled AND at < :before ORDER BY at, job_id LIMIT :limit"
_STATEMENT = """
SELECT tenant, kind, balance, held, at, reference, note, number FROM @postings
WHERE tenant = :tenant AND number > :after ORDER BY number LIMIT :limit
"""
_SUMS = """
SELECT coalesce(sum(balance), 0), coalesce(sum(held), 0) FROM @postings WHERE tenant = :tenant AND number <= :number
"""
_SETTLEMENT = "SELECT s.job_id, s.round, s.outcome, s.consumed, s.at, s.note FROM @settlements s"


class RolledBack(Exception):
    """Raised inside a transaction to roll it back and answer `outcome`."""

    def __init__(self, outcome: PostingResult) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def post(posting: Posting) -> Work[None]:
    """Rolls back if the account does not cover it or it was posted before."""
    yield from rows(
        "INSERT INTO @accounts (tenant, balance, held) VALUES (:tenant, 0, 0) ON CONFLICT DO NOTHING",
        tenant=posting.tenant,
    )
    change = {"tenant": posting.tenant, "balance": posting.balance, "held": posting.held}
    named = {"tenant": posting.tenant, "kind": posting.kind.value, "reference": posting.reference}
    # Lock the account first: then posting numbers are in commit order, and paging readers miss none.
    if (yield from row(_MOVE_CREDITS, **change)) is None:
        yield from tenant_rows.check_open(posting.tenant)
        # A repeated posting is known even if the account could not cover it again.
        raise RolledBack((yield from _repeated(posting, named)) or PostingResult.SHORT)
    entered = yield from row(
        _POST,
        **named,
        balance=posting.balance,
        held=posting.held,
        at=posting.at,
        note=posting.note,
    )
    if entered is None:
        raise RolledBack((yield from _repeated(posting, named)) or PostingResult.REFUSED)


def _repeated(posting: Posting, named: dict[str, str]) -> Work[PostingResult | None]:
    """KNOWN: the same posting exists. REFUSED: a different one has its reference. None: neither."""
    found = yield from row(_POSTED, **named)
    if found is None:
        return None
    return PostingResult.KNOWN if found == (posting.balance, posting.held) else PostingResult.REFUSED


def account(tenant: TenantId) -> Work[Account]:
    found = yield from row(_ACCOUNT, tenant=tenant)
    assert found is not None, "an aggregate has a row"
    return Account(tenant, *(int(each) for each in found))


# holds and settlements


def insert_hold(hold: Hold) -> Work[None]:
    yield from rows(
        "INSERT INTO @holds (job_id, round, tenant, amount, at, is_settled) "
        "VALUES (:job_id, :round, :tenant, :amount, :at, false)",
        **hold.hold_id._asdict(),
        tenant=hold.tenant,
        amount=hold.amount,
        at=hold.at,
    )


def insert_settlement(settlement: Settlement, hold: Hold, phase: Phase) -> Work[bool]:
    """False: it is settled already."""
    inserted = yield from row(
        _SETTLE,
        **hold.hold_id._asdict(),
        amount=hold.amount,
        outcome=settlement.outcome.value,
        phase=phase.value,
        consumed=settlement.consumed,
        at=settlement.at,
        note=settlement.note,
    )
    if inserted is None:
        return False
    yield from rows(
        "UPDATE @holds SET is_settled = true WHERE job_id = :job_id AND round = :round",
        **hold.hold_id._asdict(),
    )
    return True


def hold(hold_id: HoldId) -> Work[Hold | None]:
    found = yield from row(f"{_HOLD} WHERE job_id = :job_id AND round = :round", **hold_id._asdict())
    return None if found is None else _hold(found)


def settlement(hold_id: HoldId) -> Work[Settlement | None]:
    found = yield from row(
        f"{_SETTLEMENT} WHERE s.job_id = :job_id AND s.round = :round", **hold_id._asdict()
    )
    return None if found is None else _settlement(found)


def open_holds(before: float, limit: int) -> Work[list[Hold]]:
    """Unsettled holds, the oldest first."""
    return [_hold(each) for each in (yield from rows(_OPEN_HOLDS, before=before, limit=page(limit)))]


# grants and corrections


def grant(given: CreditGrant, posting: Posting | None) -> Work[PostingResult]:
    """A pending grant has no posting."""
    assert (posting is None) == (given.state is GrantState.PENDING), "only a pending grant has no posting"
    yield from tenant_rows.check_open(given.tenant)
    inserted = yield from row(
        _GRANT,
        tenant=given.tenant,
        grant_id=given.grant_id,
        amount=given.amount,
        at=given.at,
        state=given.state.value,
        note=given.note,
    )
    if inserted is None:
        found = yield from row(_KNOWN_GRANT, tenant=given.tenant, grant_id=given.grant_id)
        # A pending grant may have been decided since; an immediate one must have been granted.
        is_same = found is not None and found[1] == given.amount
        is_same = is_same and (posting is None or found == (GrantState.GRANTED.value, given.amount))
        return PostingResult.KNOWN if is_same else PostingResult.REFUSED
    if posting is not None:
        yield from post(posting)
    return PostingResult.DONE


def confirm(posting: Posting) -> Work[PostingResult]:
    """Grants the pending grant that the posting names."""
    assert posting.kind is PostingKind.GRANT, "only grants are pending"
    named = {"tenant": posting.tenant, "grant_id": posting.reference}
    decided = yield from row(_CONFIRM, **named, at=posting.at, amount=posting.balance)
    if decided is not None:
        yield from post(posting)
        return PostingResult.DONE
    known = (GrantState.GRANTED.value, posting.balance)
    return PostingResult.KNOWN if (yield from row(_KNOWN_GRANT, **named)) == known else PostingResult.REFUSED


def void(tenant: TenantId, grant_id: str) -> Work[PostingResult]:
    """Cancels a pending grant."""
    named = {"tenant": tenant, "grant_id": grant_id}
    yield from tenant_rows.check_open(tenant)
    if (yield from row(_VOID, **named)) is not None:
        return PostingResult.DONE
    found = yield from row(_KNOWN_GRANT, **named)
    return PostingResult.KNOWN if found is not None and found[0] == GrantState.VOID else PostingResult.REFUSED


def adjust(posting: Posting) -> Work[PostingResult]:
    assert posting.kind is PostingKind.ADJUST, "other postings have their own functions"
    yield from post(posting)
    return PostingResult.DONE


# reading


def statement(tenant: TenantId, after: int, limit: int) -> Work[list[Posting]]:
    """Postings after that number."""
    return (yield from _postings(tenant, after, page(limit)))


def _postings(tenant: TenantId, after: int, limit: int) -> Work[list[Posting]]:
    return [_posting(each) for each in (yield from rows(_STATEMENT, tenant=tenant, after=after, limit=limit))]


def account_at(tenant: TenantId, number: int) -> Work[Account]:
    """The sum of the postings up to that number, without pending grants."""
    found = yield from row(_SUMS, tenant=tenant, number=number)
    assert found is not None, "an aggregate has a row"
    return Account(tenant, *(int(each) for each in found))


def ledger(tenant: TenantId) -> Work[Ledger]:
    """The whole ledger in one snapshot. Refused if it has more than `MAX_LEDGER` postings."""
    postings = yield from _postings(tenant, 0, MAX_LEDGER + 1)
    if len(postings) > MAX_LEDGER:
        raise Refusal(
            RefusalCode.TOO_LARGE,
            f"the ledger of tenant {tenant} has more than {MAX_LEDGER} postings; read its statement page by page",
        )
    holds = yield from rows(f"{_HOLD} WHERE tenant = :tenant ORDER BY at, job_id", tenant=tenant)
    settlements = yield from rows(
        f"{_SETTLEMENT} JOIN @holds h ON h.job_id = s.job_id AND h.round = s.round WHERE h.tenant = :tenant "
        "ORDER BY s.at, s.job_id",
        tenant=tenant,
    )
    grants = yield from rows(f"{GRANTS} ORDER BY grant_id", tenant=tenant)
    ended = yield from rows(
        "SELECT job_id, round, phase FROM @rounds WHERE tenant = :tenant AND phase <> 'open'", tenant=tenant
    )
    return Ledger(
        (yield from account(tenant)),
        tuple(postings),
        tuple(_hold(each) for each in holds),
        tuple(_settlement(each) for each in settlements),
        tuple(read_grant(each) for each in grants),
        {HoldId(JobId(job_id), number): phase for job_id, number, phase in ended},
    )


def read_grant(found: Row) -> CreditGrant:
    grant_id, tenant, amount, at, state, note = found
    return CreditGrant(grant_id, TenantId(tenant), amount, at, GrantState(state), note)


def _hold(found: Row) -> Hold:
    job_id, number, tenant, amount, at = found
    return Hold(HoldId(JobId(job_id), number), TenantId(tenant), amount, at)


def _settlement(found: Row) -> Settlement:
    job_id, number, outcome, consumed, at, note = found
    return Settlement(HoldId(JobId(job_id), number), Outcome(outcome), consumed, at, note)


def _posting(found: Row) -> Posting:
    tenant, kind, balance, held, at, reference, note, number = found
    return Posting(TenantId(tenant), PostingKind(kind), balance, held, at, reference, note, number)
