"""The handlers of usage and of exports for accounting. A tenant sees its own, and not what it cost the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

from starlette.responses import StreamingResponse

from comfyfleet.hub.credits import seen
from comfyfleet.hub.door import Call, Handler, Reply
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.ledger import UsageBy, UsageLine
from comfyfleet.model.tenant import Tenant
from comfyfleet.ports import Clock
from comfyfleet.tenancy.database import TenantDatabase
from comfyfleet.tenancy.homes import Homes
from comfyfleet.wire import usage as wire
from comfyfleet.wire.bodies import seconds_of

_MONTH_S = 30 * 86400.0
_MAX_LINES = 10_000
_PAGE = 1_000


class UsageHandlers:
    def __init__(self, homes: Homes, clock: Clock) -> None:
        self._homes = homes
        self._clock = clock

    def bound(self) -> dict[str, Handler]:
        return {"usage": self.usage, "export_credits": self.export}

    async def usage(self, call: Call[wire.UsageQuery]) -> Reply:
        asked, now = call.given, self._clock.now()
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
        for pool, tenants in (await self._pools_of(tenant)).items():
            here = {each.tenant_id for each in tenants}
            database = await self._homes.pools.get(pool)
            # By tenant too, whatever was asked for: what one that has moved left behind is counted where it is now.
            some = await database.usage(
                tenant, since=since, until=until, by=by | {"tenant"}, limit=_MAX_LINES + 1
            )
            found += [each for each in some if each.tenant in here]
            if len(found) > _MAX_LINES:
                raise Refusal(
                    RefusalCode.TOO_LARGE,
                    f"this would have more than {_MAX_LINES} lines: ask for a shorter time, one tenant, or by less",
                )
        return sorted(found, key=_order) if "tenant" in by else _together(found)

    async def _pools_of(self, tenant: TenantId | None) -> dict[str, list[Tenant]]:
        if tenant is None:
            return await self._homes.everyone()
        known = await self._homes.tenants.get(tenant)
        return {} if known is None else {known.pool: [known]}

    async def export(self, call: Call[wire.ExportQuery]) -> StreamingResponse:
        tenant = await seen(self._homes.tenants, call)
        database = await self._homes.pools.of(tenant)
        shows_cost = call.caller.scope is None
        # The first page before the answer begins: a database that is away is told as such.
        pages = _pages(database, tenant.tenant_id, call.given, shows_cost=shows_cost)
        first = await anext(pages)
        name = f"{tenant.tenant_id}-{call.given.of}-after-{call.given.after}.{call.given.format}"
        return StreamingResponse(
            _following(first, pages),
            media_type=wire.CONTENT_TYPES[call.given.format],
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )


async def _pages(
    database: TenantDatabase, tenant: TenantId, asked: wire.ExportQuery, *, shows_cost: bool
) -> AsyncIterator[bytes]:
    columns = wire.POSTING_COLUMNS if asked.of == "postings" else wire.RUN_COLUMNS
    after, text = asked.after, wire.heading(columns, asked.format)
    while True:
        lines: list[dict[str, Any]]
        if asked.of == "postings":
            postings = await database.statement(tenant, after=after, limit=_PAGE)
            lines = [wire.posting_line(each) for each in postings]
        else:
            runs = await database.runs(tenant, after=after, limit=_PAGE)
            lines = [wire.run_line(each, shows_cost=shows_cost) for each in runs]
        yield text + wire.written(lines, asked.format)
        if len(lines) < _PAGE:
            return
        after, text = lines[-1]["number"], b""


async def _following(first: bytes, pages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for page in pages:
        yield page


def _together(lines: list[UsageLine]) -> list[UsageLine]:
    """Without the tenants that they were asked for by."""
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
