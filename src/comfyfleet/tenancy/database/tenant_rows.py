"""Moves or erases a tenant's rows: freezes the account, exports and imports pages of rows, erases, unfreezes.

The fence is a number that grows with each attempt; older fences are refused, so only one of two hubs
continues. The frozen account stays in the old database and refuses late writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from comfyfleet.model.ids import TenantId
from comfyfleet.tenancy.database.executor import Row, Work, page, row, rows
from comfyfleet.tenancy.database.values import AccountFrozen


class _Part(NamedTuple):
    key: tuple[str, ...]
    columns: tuple[str, ...]
    of: str = ""
    """The table that names the tenant, if this one does not."""
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
"""The tables of a tenant in the order of a relocation, without the account (the sum of the postings) and the inbox
(known from the settlements)."""

LOOK = "SELECT fence FROM @accounts WHERE tenant = :tenant FOR KEY SHARE"
"""This lock does not conflict with the one of a posting."""
_FREEZE = """
INSERT INTO @accounts (tenant, balance, held, fence) VALUES (:tenant, 0, 0, :fence)
ON CONFLICT (tenant) DO UPDATE SET fence = :fence WHERE accounts.fence IS NULL OR accounts.fence <= :fence
RETURNING tenant
"""
_UNFREEZE = """
UPDATE @accounts SET fence = NULL,
    balance = (SELECT coalesce(sum(p.balance), 0) FROM @postings p WHERE p.tenant = :tenant),
    held = (SELECT coalesce(sum(p.held), 0) FROM @postings p WHERE p.tenant = :tenant)
WHERE tenant = :tenant AND fence = :fence RETURNING tenant
"""
_CREATE = """
INSERT INTO @accounts (tenant, balance, held) VALUES (:tenant, 0, 0) ON CONFLICT (tenant) DO UPDATE SET fence = NULL
"""


def check_open(tenant: TenantId) -> Work[None]:
    """For writes without a posting. A posting checks the fence itself."""
    found = yield from row(LOOK, tenant=tenant)
    if found is not None and found[0] is not None:
        raise AccountFrozen(tenant)


def create_account(tenant: TenantId) -> Work[None]:
    yield from rows(_CREATE, tenant=tenant)


def freeze_account(tenant: TenantId, fence: int) -> Work[bool]:
    # Wait for writes without a posting, which lock the account.
    """From now on writes raise `AccountFrozen`. False: a newer fence has frozen it."""
    yield from row("SELECT fence FROM @accounts WHERE tenant = :tenant FOR UPDATE", tenant=tenant)
    return (yield from row(_FREEZE, tenant=tenant, fence=fence)) is not None


def unfreeze_account(tenant: TenantId, fence: int) -> Work[bool]:
    """Sets the account to the sum of its postings. False: this fence does not hold it."""
    return (yield from row(_UNFREEZE, tenant=tenant, fence=fence)) is not None


def has_account(tenant: TenantId) -> Work[bool]:
    """Also True for a frozen account. Every tenant of this database has one."""
    return (yield from row("SELECT 1 FROM @accounts WHERE tenant = :tenant", tenant=tenant)) is not None


def fence_of(tenant: TenantId) -> Work[int | None]:
    found = yield from row("SELECT fence FROM @accounts WHERE tenant = :tenant", tenant=tenant)
    return None if found is None else found[0]


def rows_of(tenant: TenantId, part: str, after: Row | None, limit: int) -> Work[list[Row]]:
    """A page of one of `tenant_rows.PARTS`, ordered by key, for `import_rows` of another database."""
    described, values = PARTS[part], {"tenant": tenant, "limit": page(limit)}
    key, behind = ", ".join(described.key), ""
    if after is not None:
        places = [described.columns.index(name) for name in described.key]
        last = {f"last_{number}": after[place] for number, place in enumerate(places)}
        behind = f" AND ({key}) > ({', '.join(f':{name}' for name in last)})"
        values |= last
    return (
        yield from rows(
            f"SELECT {', '.join(described.columns)} FROM @{part} WHERE {_of_tenant(part)}{behind} "
            f"ORDER BY {key} LIMIT :limit",
            **values,
        )
    )


def import_rows(tenant: TenantId, fence: int, part: str, taken: Sequence[Row]) -> Work[bool]:
    """Keeps rows that exist already. False: this fence does not hold the account."""
    if not (yield from _is_frozen(tenant, fence)):
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
    """Deletes some rows; 0: only the frozen account is left. None: this fence does not hold the account."""
    if not (yield from _is_frozen(tenant, fence)):
        return None
    # Backwards: a table that names the tenant of another one is erased after it.
    for part in reversed(PARTS):
        key = ", ".join(PARTS[part].key)
        # The tenant is in both conditions: every tenant has the same numbers.
        gone = yield from rows(
            f"DELETE FROM @{part} WHERE {_of_tenant(part)} AND ({key}) IN "
            f"(SELECT {key} FROM @{part} WHERE {_of_tenant(part)} LIMIT :limit) RETURNING 1",
            tenant=tenant,
            limit=page(limit),
        )
        if gone:
            return len(gone)
    yield from rows("UPDATE @accounts SET balance = 0, held = 0 WHERE tenant = :tenant", tenant=tenant)
    return 0


def _is_frozen(tenant: TenantId, fence: int) -> Work[bool]:
    found = yield from row(
        "SELECT 1 FROM @accounts WHERE tenant = :tenant AND fence = :fence FOR UPDATE",
        tenant=tenant,
        fence=fence,
    )
    return found is not None


def _of_tenant(part: str) -> str:
    owner = PARTS[part].of
    if not owner:
        return "tenant = :tenant"
    return f"(job_id, round) IN (SELECT job_id, round FROM @{owner} WHERE tenant = :tenant)"
