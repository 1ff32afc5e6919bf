"""A tenant's rows on their way to another database, or to nowhere: the book closed by a fence, rows read and taken in
page by page, erased, the book opened again.

The fence is a number that grows with each attempt: whoever comes with an older one is refused, so of two that move the
same tenant one goes on. The row of the account that holds it stays where the tenant was: nothing that comes late is
written there any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from comfyfleet.model.ids import TenantId
from comfyfleet.tenancy.database.executor import Row, Work, row, rows
from comfyfleet.tenancy.database.port import AccountFrozen


class _Part(NamedTuple):
    key: tuple[str, ...]
    columns: tuple[str, ...]
    of: str = ""
    """The table that knows whose a row is, where the part itself does not say."""
    booleans: frozenset[str] = frozenset()


_ROUND = ("job_id", "round")
PARTS: dict[str, _Part] = {
    "jobs": _Part(
        ("job_id",),
        ("job_id", "tenant", "reference", "round", "phase", "record", "payload", "result", "ended_at"),
    ),
    "rounds": _Part(
        _ROUND,
        (*_ROUND, "tenant", "phase", "outbox", "envelope", "opened_at", "ended_at", "price"),
    ),
    "staged": _Part((*_ROUND, "attempt_id"), (*_ROUND, "attempt_id", "result", "at"), of="rounds"),
    "failures": _Part((*_ROUND, "attempt_id"), (*_ROUND, "attempt_id", "failure", "at"), of="rounds"),
    "holds": _Part(
        _ROUND, (*_ROUND, "tenant", "amount", "at", "is_settled"), booleans=frozenset({"is_settled"})
    ),
    "settlements": _Part(
        _ROUND, (*_ROUND, "amount", "outcome", "phase", "consumed", "at", "note"), of="holds"
    ),
    "grants": _Part(("grant_id",), ("tenant", "grant_id", "amount", "at", "state", "note")),
    "postings": _Part(
        ("number",), ("tenant", "number", "kind", "balance", "held", "at", "reference", "note")
    ),
    "runs": _Part(
        ("number",),
        (
            "tenant",
            "number",
            *_ROUND,
            "workflow_hash",
            "service",
            "phase",
            "at",
            "worker_id",
            "outputs",
            "gpu_milliseconds",
            "consumed",
            "cost_micros",
            "verified_by",
        ),
    ),
    "documents": _Part(("drawer", "name"), ("tenant", "drawer", "name", "body", "version")),
}
"""Everything a database has of a tenant, but for its account, which is the sum of its postings. What lies in the inbox
is known by the settlements too."""

_ERASED = (
    "staged",
    "failures",
    "settlements",
    "postings",
    "runs",
    "grants",
    "documents",
    "holds",
    "rounds",
    "jobs",
)
"""In this order: whose a settlement is, is known by its hold."""

LOOK = "SELECT fence FROM @accounts WHERE tenant = :tenant FOR KEY SHARE"
"""Posting locks the row in another way: those who look and those who post do not wait for each other."""
_CLOSE = """
INSERT INTO @accounts (tenant, balance, held, fence) VALUES (:tenant, 0, 0, :fence)
ON CONFLICT (tenant) DO UPDATE SET fence = :fence WHERE accounts.fence IS NULL OR accounts.fence <= :fence
RETURNING tenant
"""
_OPEN = """
UPDATE @accounts SET fence = NULL,
    balance = (SELECT coalesce(sum(p.balance), 0) FROM @postings p WHERE p.tenant = :tenant),
    held = (SELECT coalesce(sum(p.held), 0) FROM @postings p WHERE p.tenant = :tenant)
WHERE tenant = :tenant AND fence = :fence RETURNING tenant
"""
_BEGIN = """
INSERT INTO @accounts (tenant, balance, held) VALUES (:tenant, 0, 0) ON CONFLICT (tenant) DO UPDATE SET fence = NULL
"""


def check_open(tenant: TenantId) -> Work[None]:
    """For what is written without a posting: those see the fence in the account, which they lock."""
    found = yield from row(LOOK, tenant=tenant)
    if found is not None and found[0] is not None:
        raise AccountFrozen(tenant)


def create_account(tenant: TenantId) -> Work[None]:
    yield from rows(_BEGIN, tenant=tenant)


def freeze_account(tenant: TenantId, fence: int) -> Work[bool]:
    # Whoever writes without a posting has locked it: after that its rows are there, or are refused.
    yield from row("SELECT fence FROM @accounts WHERE tenant = :tenant FOR UPDATE", tenant=tenant)
    return (yield from row(_CLOSE, tenant=tenant, fence=fence)) is not None


def unfreeze_account(tenant: TenantId, fence: int) -> Work[bool]:
    return (yield from row(_OPEN, tenant=tenant, fence=fence)) is not None


def has_account(tenant: TenantId) -> Work[bool]:
    return (yield from row("SELECT 1 FROM @accounts WHERE tenant = :tenant", tenant=tenant)) is not None


def fence_of(tenant: TenantId) -> Work[int | None]:
    found = yield from row("SELECT fence FROM @accounts WHERE tenant = :tenant", tenant=tenant)
    return None if found is None else found[0]


def rows_of(tenant: TenantId, part: str, after: Row | None, limit: int) -> Work[list[Row]]:
    described, values = PARTS[part], {"tenant": tenant, "limit": limit}
    key, behind = ", ".join(described.key), ""
    if after is not None:
        places = [described.columns.index(name) for name in described.key]
        last = {f"last_{number}": after[place] for number, place in enumerate(places)}
        behind = f" AND ({key}) > ({', '.join(f':{name}' for name in last)})"
        values |= last
    return (
        yield from rows(
            f"SELECT {', '.join(described.columns)} FROM @{part} WHERE {_whose(part)}{behind} "
            f"ORDER BY {key} LIMIT :limit",
            **values,
        )
    )


def take_rows(tenant: TenantId, fence: int, part: str, taken: Sequence[Row]) -> Work[bool]:
    if not (yield from _is_closed(tenant, fence)):
        return False
    described, values, lines = PARTS[part], dict[str, object](), []
    for number, line in enumerate(taken):
        named = {f"{name}_{number}": each for name, each in zip(described.columns, line, strict=True)}
        for name in described.booleans:
            named[f"{name}_{number}"] = bool(named[f"{name}_{number}"])
        values |= named
        lines.append(f"({', '.join(f':{name}' for name in named)})")
    yield from rows(
        f"INSERT INTO @{part} ({', '.join(described.columns)}) VALUES {', '.join(lines)} ON CONFLICT DO NOTHING",
        **values,
    )
    return True


def erase(tenant: TenantId, fence: int, limit: int) -> Work[int | None]:
    if not (yield from _is_closed(tenant, fence)):
        return None
    for part in _ERASED:
        key = ", ".join(PARTS[part].key)
        # Whose a row is goes into both: numbers are the same for every tenant.
        gone = yield from rows(
            f"DELETE FROM @{part} WHERE {_whose(part)} AND ({key}) IN "
            f"(SELECT {key} FROM @{part} WHERE {_whose(part)} LIMIT :limit) RETURNING 1",
            tenant=tenant,
            limit=limit,
        )
        if gone:
            return len(gone)
    yield from rows("UPDATE @accounts SET balance = 0, held = 0 WHERE tenant = :tenant", tenant=tenant)
    return 0


def _is_closed(tenant: TenantId, fence: int) -> Work[bool]:
    found = yield from row(
        "SELECT 1 FROM @accounts WHERE tenant = :tenant AND fence = :fence FOR UPDATE",
        tenant=tenant,
        fence=fence,
    )
    return found is not None


def _whose(part: str) -> str:
    knows = PARTS[part].of
    if not knows:
        return "tenant = :tenant"
    return f"(job_id, round) IN (SELECT job_id, round FROM @{knows} WHERE tenant = :tenant)"
