"""Handlers of credits, receipts, usage and exports. A tenant sees its own data, without the operator's cost.

`policy/accounting.py` defines postings; the tenant's database makes sure that each is entered once.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec
from starlette.responses import StreamingResponse

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.http.credentials import visible_job
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.hub.tenants.handlers import known
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.ledger import Account, CreditGrant, GrantState, UsageBy, UsageLine
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy import accounting
from comfyfleet.policy import tenants as policy
from comfyfleet.ports import Clock
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import PostingResult
from comfyfleet.tenancy.tenants import TenantDirectory, Tenants, not_found
from comfyfleet.wire import bodies
from comfyfleet.wire import credits as wire
from comfyfleet.wire.bodies import seconds_of

_MAX_ROUNDS = 100
"""Newest rounds of a job on one receipt."""


class CreditHandlers:
    def __init__(self, engine: Engine, tenants: Tenants, databases: TenantDatabases) -> None:
        self._engine = engine
        self._tenants = tenants
        self._databases = databases

    async def balance(self, call: HubRequest[None]) -> Reply:
        tenant = await self._seen(call)
        return Reply(200, await self._balance(tenant, await self._databases.database_of(tenant)))

    async def statement(self, call: HubRequest[wire.StatementQuery]) -> Reply:
        tenant, asked = await self._seen(call), call.data
        database = await self._databases.database_of(tenant)
        after = asked.after if asked.cursor is None else asked.cursor
        found = await database.statement(tenant.tenant_id, after=after, limit=asked.limit)
        cursor = str(found[-1].number) if len(found) == asked.limit else None
        # Postings never change, so this total still fits the page.
        before = await database.account_at(tenant.tenant_id, after)
        return Reply(200, wire.StatementView(tuple(wire.entries(before, found)), cursor))

    async def list_grants(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        tenant, asked = await self._seen(call), call.data
        database = await self._databases.database_of(tenant)
        after = None if asked.cursor is None else _place_of(asked.cursor)
        found = await database.grants(tenant.tenant_id, after=after, limit=asked.limit)
        cursor = f"{found[-1].at!r}/{found[-1].grant_id}" if len(found) == asked.limit else None
        return Reply(200, wire.GrantList(tuple(map(wire.grant, found)), cursor))

    async def job_receipt(self, call: HubRequest[None]) -> Reply:
        job_id = JobId(call.parameters["job_id"])
        dispatch = await visible_job(call.caller, self._engine, job_id)
        tenant = await self._tenants.get(dispatch.tenant)
        rounds = []
        if tenant is not None:
            database = await self._databases.database_of(tenant)
            rounds = await database.receipts(tenant.tenant_id, job_id, limit=_MAX_ROUNDS)
        return Reply(200, wire.receipt(job_id, dispatch.tenant, rounds))

    async def grant_credits(self, call: HubRequest[wire.GrantBody]) -> Reply:
        tenant, database = await self._open(call)
        body, now = call.data, self._engine.now()
        given = accounting.grant(
            body.id or uuid.uuid4().hex,
            tenant.tenant_id,
            body.amount,
            now,
            is_pending=body.pending,
            note=body.note,
        )
        entered = await database.grant(given, None if body.pending else accounting.posting_of(given))
        if entered is PostingResult.REFUSED:
            raise Refusal(
                RefusalCode.DUPLICATE_DIFFERS,
                f"there is already a grant {given.grant_id!r} with another amount or state; read it, or choose another "
                "id for a new grant",
            )
        kept = await self._granted(database, tenant.tenant_id, given.grant_id)
        return Reply(
            200 if entered is PostingResult.KNOWN else 201, wire.grant(kept), created_id=_named(kept)
        )

    async def confirm_grant(self, call: HubRequest[None]) -> Reply:
        tenant, database = await self._open(call)
        grant_id, now = call.parameters["grant_id"], self._engine.now()
        kept = await self._granted(database, tenant.tenant_id, grant_id)
        granted = accounting.grant(grant_id, tenant.tenant_id, kept.amount, now, note=kept.note)
        if await database.confirm(accounting.posting_of(granted)) is PostingResult.REFUSED:
            raise _decided(kept)
        return Reply(200, wire.grant(await self._granted(database, tenant.tenant_id, grant_id)))

    async def void_grant(self, call: HubRequest[None]) -> Reply:
        tenant, database = await self._open(call)
        grant_id = call.parameters["grant_id"]
        kept = await self._granted(database, tenant.tenant_id, grant_id)
        if await database.void(tenant.tenant_id, grant_id) is PostingResult.REFUSED:
            raise _decided(kept)
        return Reply(200, wire.grant(await self._granted(database, tenant.tenant_id, grant_id)))

    async def adjust_credits(self, call: HubRequest[wire.AdjustBody]) -> Reply:
        tenant, database = await self._open(call)
        body, now = call.data, self._engine.now()
        correction = accounting.adjust(
            body.id or uuid.uuid4().hex, tenant.tenant_id, body.amount, now, body.note
        )
        entered = await database.adjust(accounting.posting_of(correction))
        if entered is PostingResult.SHORT:
            account = await database.account(tenant.tenant_id)
            raise accounting.adjusted_too_far(tenant.tenant_id, body.amount, account)
        if entered is PostingResult.REFUSED:
            raise Refusal(
                RefusalCode.DUPLICATE_DIFFERS,
                f"there is already an adjustment {correction.adjustment_id!r} with another amount; choose another id "
                "for a new one",
            )
        made = f"{tenant.tenant_id}/{correction.adjustment_id}"
        status = 200 if entered is PostingResult.KNOWN else 201
        return Reply(status, await self._balance(tenant, database), created_id=made)

    async def _seen(self, call: HubRequest[Any]) -> Tenant:
        return await seen(self._tenants, call)

    async def _open(self, call: HubRequest[Any]) -> tuple[Tenant, TenantDatabase]:
        tenant = await self._seen(call)
        policy.check_open(tenant)
        return tenant, await self._databases.database_of(tenant)

    async def _balance(self, tenant: Tenant, database: TenantDatabase) -> wire.BalanceView:
        return wire.balance(await database.account(tenant.tenant_id))

    async def _granted(self, database: TenantDatabase, tenant: TenantId, grant_id: str) -> CreditGrant:
        # A database cannot store such an id.
        found = await database.grant_of(tenant, grant_id) if grant_id.isprintable() else None
        if found is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"tenant {tenant!r} has no grant {grant_id!r}")
        return found


async def seen(tenants: Tenants, call: HubRequest[Any]) -> Tenant:
    """The tenant in the path. Another key's tenant is not found."""
    tenant_id = TenantId(call.parameters["tenant_id"])
    if not call.caller.sees(tenant_id):
        raise not_found(tenant_id)
    return await known(tenants, tenant_id)


def _place_of(cursor: str) -> tuple[float, str]:
    at, _, grant_id = cursor.partition("/")
    try:
        return float(at), grant_id
    except ValueError as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"cursor {cursor!r} does not come from a list of grants; start without one",
            field="cursor",
        ) from error


def _named(grant: CreditGrant) -> str:
    return f"{grant.tenant}/{grant.grant_id}"


def _decided(grant: CreditGrant) -> Refusal:
    how = "granted and may be spent" if grant.state is GrantState.GRANTED else "void"
    return Refusal(
        RefusalCode.WRONG_PHASE,
        f"the grant {grant.grant_id!r} is already {how}; correct it with an adjustment or another grant",
    )


_MONTH_S = 30 * 86400.0
_MAX_LINES = 10_000
_PAGE = 1_000


class UsageHandlers:
    def __init__(self, directory: TenantDirectory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    async def usage(self, call: HubRequest[wire.UsageQuery]) -> Reply:
        asked, now = call.data, self._clock.now()
        until = now if asked.until is None else seconds_of(asked.until) or 0.0
        since = until - _MONTH_S if asked.since is None else seconds_of(asked.since) or 0.0
        tenant = call.caller.scope
        if asked.tenant is not None:
            if not call.caller.sees(TenantId(asked.tenant)):
                return Reply(200, wire.UsageList(since, until, ()))
            tenant = TenantId(asked.tenant)
        by = frozenset(cast("list[UsageBy]", asked.by.split(",")))
        lines = await self._lines(tenant, since, until, by)
        shows_cost = call.caller.scope is None
        return Reply(
            200,
            wire.UsageList(
                since, until, tuple(wire.usage_view(each, shows_cost=shows_cost) for each in lines)
            ),
        )

    async def _lines(
        self, tenant: TenantId | None, since: float, until: float, by: frozenset[UsageBy]
    ) -> list[UsageLine]:
        found: list[UsageLine] = []
        for name, tenants in (await self._databases_of(tenant)).items():
            here = {each.tenant_id for each in tenants}
            database = await self._directory.databases.get(name)
            # Always by tenant: the old database of a moved tenant still has lines, which must not count.
            some = await database.usage(
                tenant, since=since, until=until, by=by | {"tenant"}, limit=_MAX_LINES + 1
            )
            found += [each for each in some if each.tenant in here]
            if len(found) > _MAX_LINES:
                raise Refusal(
                    RefusalCode.TOO_LARGE,
                    f"the answer has more than {_MAX_LINES} lines: ask for a shorter time, one tenant, or fewer groups",
                )
        return sorted(found, key=_order) if "tenant" in by else _together(found)

    async def _databases_of(self, tenant: TenantId | None) -> dict[str, list[Tenant]]:
        if tenant is None:
            return await self._directory.tenants_by_database()
        known = await self._directory.tenants.get(tenant)
        return {} if known is None else {known.database: [known]}

    async def export_credits(self, call: HubRequest[wire.ExportQuery]) -> StreamingResponse:
        tenant = await seen(self._directory.tenants, call)
        database = await self._directory.databases.database_of(tenant)
        shows_cost = call.caller.scope is None
        # The first page comes before the answer starts, so that a database error has its own status.
        pages = _pages(database, tenant.tenant_id, call.data, shows_cost=shows_cost)
        first = await anext(pages)
        name = f"{tenant.tenant_id}-{call.data.of}-after-{call.data.after}.{call.data.format}"
        return StreamingResponse(
            _following(first, pages),
            media_type=wire.CONTENT_TYPES[call.data.format],
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )


async def _pages(
    database: TenantDatabase, tenant: TenantId, asked: wire.ExportQuery, *, shows_cost: bool
) -> AsyncIterator[bytes]:
    kind = wire.PostingLine if asked.of == "postings" else wire.RunLine
    after, text = asked.after, wire.header_line(kind, asked.format)
    account: Account | None = None
    while True:
        lines: Sequence[wire.PostingLine | wire.RunLine]
        if asked.of == "postings":
            postings = await database.statement(tenant, after=after, limit=_PAGE)
            if account is None:
                account = await database.account_at(tenant, after)
            lines = entries = wire.posting_lines(account, postings)
            if entries:
                last = entries[-1]
                account = msgspec.structs.replace(account, balance=last.balance_after, held=last.held_after)
        else:
            runs = await database.runs(tenant, after=after, limit=_PAGE)
            lines = [wire.run_line(each, shows_cost=shows_cost) for each in runs]
        yield text + wire.encode_lines(lines, asked.format)
        if len(lines) < _PAGE:
            return
        after, text = lines[-1].number, b""


async def _following(first: bytes, pages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for page in pages:
        yield page


def _together(lines: list[UsageLine]) -> list[UsageLine]:
    """Sums the lines over all tenants."""
    found: dict[tuple[Any, ...], UsageLine] = {}
    for each in lines:
        key = (each.workflow_hash, each.worker_id, each.day)
        known = found.get(key, UsageLine(None, *key))
        costs = [cost for cost in (known.cost_micros, each.cost_micros) if cost is not None]
        found[key] = UsageLine(
            None,
            *key,
            known.rounds + each.rounds,
            known.completed + each.completed,
            known.outputs + each.outputs,
            known.gpu_milliseconds + each.gpu_milliseconds,
            known.consumed + each.consumed,
            sum(costs) if costs else None,
        )
    return sorted(found.values(), key=_order)


def _order(line: UsageLine) -> tuple[Any, ...]:
    return (line.tenant or "", line.day or 0, line.workflow_hash or "", line.worker_id or "")
