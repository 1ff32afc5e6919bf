"""The relay: brings to the central store what waits in tenants' databases (S2, S3), and settles there what ended here
(T1, T2), whenever whoever began it could not go on. What workers without a hub left there for a tenant's database goes
the same way.

What is on its way in the ordinary manner is left alone: something is repeated once it was seen twice. Every hub has a
relay; that two do the same is harmless.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from comfyfleet.model.dispatch import Dispatch, WriteResult
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.model.ledger import HoldId
from comfyfleet.policy.accounting import hold_of
from comfyfleet.tenancy.database.port import OutboxEntry, TenantDatabase
from comfyfleet.tenancy.ledger_store import TenantLedgerStore
from comfyfleet.tenancy.tenants import TenantLocation
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

LOOK_S = 1.0
LIFE_S = 30.0
"""What was read longer ago is not brought to the store any more: a tombstone is kept for twice as long."""
_PAGE = 200
PAGES = 5
"""Of ends that wait to be settled, in one look: while a database is away there may be any number. The next look goes on
where this one ended."""

Admit = Callable[[Job, Dispatch, Callable[[Dispatch], Awaitable[WriteResult | None]]], Awaitable[None]]


class OutboxRelay:
    """`admit` is the engine's: it knows which class a job stands in."""

    def __init__(self, store: TenantLedgerStore, admit: Admit) -> None:
        self._store = store
        self._admit = admit
        self._seen: set[HoldId] = set()
        self._ends: set[HoldId] = set()
        """Those that were seen in the last look through all of them …"""
        self._ends_now: set[HoldId] = set()
        """… and in this one, which may take several."""
        self._last_end: JobId | None = None
        self._is_due = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        store.left_behind = self.wake

    def start(self) -> None:
        if self._running is None:
            self._running = in_background(self._run(), name="outbox relay")

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def wake(self) -> None:
        self._is_due.set()

    async def _run(self) -> None:
        # What a crash left before this process began is nobody's: it is not waited with.
        await self._tried(is_first=True)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._is_due.wait()
                    await asyncio.sleep(LOOK_S / 10)
            self._is_due.clear()
            await self._tried()

    async def _tried(self, is_first: bool = False) -> None:
        try:
            await self.look(at_once=is_first)
        except Fault as fault:
            _LOG.warning("what waits between the store and tenants' databases is looked at later: %s", fault)
        except Exception:
            log_failure(_LOG, "what waits between the store and tenants' databases could not be looked at")

    async def look(self, *, at_once: bool = False) -> None:
        """`at_once`: also what may be on its way just now."""
        before, self._seen = self._seen, set()
        if at_once:
            await self._store.homes.open()
        # Beside each other: a database that does not answer keeps nobody else's jobs waiting.
        pools = [self._send_of(each, before, at_once) for each in self._store.homes.pools.asked]
        left = self._store.settler.left_texts.take_all()
        ends = await asyncio.gather(*pools, self._settle(at_once), left, return_exceptions=True)
        # Only now: what went on behind a look that failed would be in the way of the next one.
        for end in ends:
            if end is not None:
                raise end

    async def _send_of(self, pool: str, before: set[HoldId], at_once: bool) -> None:
        try:
            await self._send(pool, await self._store.homes.pools.get(pool), before, at_once)
        except Fault as fault:
            _LOG.info("the pool %s is asked again later: %s", pool, fault)

    # S2, S3

    async def _send(self, pool: str, database: TenantDatabase, before: set[HoldId], at_once: bool) -> None:
        after: HoldId | None = None
        while True:
            until = asyncio.get_running_loop().time() + LIFE_S
            page = await database.outbox(is_sent=False, after=after, limit=_PAGE)
            for entry in page:
                self._seen.add(entry.hold_id)
                if at_once or entry.hold_id in before:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(until):
                            await self._bring(pool, database, entry)
                after = entry.hold_id
            if len(page) < _PAGE:
                return

    async def _bring(self, pool: str, database: TenantDatabase, entry: OutboxEntry) -> None:
        tenant = await self._store.homes.tenants.get(entry.tenant)
        try:
            job = await database.leasable(entry.hold_id)
        except Fault as fault:
            if self._store.homes.pools.is_away(pool):
                raise
            # The database is there: this job cannot be opened, and those behind it may be others'.
            _LOG.warning("job %s does not get into the queue now: %s", entry.hold_id, fault)
            return
        # Elsewhere by now, or gone: what is left here is for whoever moves or deletes it.
        if tenant is None or tenant.pool != pool or job is None:
            return
        home = TenantLocation(tenant, database)
        facts = (FactDraft(FactKind.QUEUED, None if job.round == 1 else {"round": job.round}),)
        try:
            await self._admit(
                job, entry.dispatch, lambda dispatch: self._store.send(home, dispatch, job, facts)
            )
        except Refusal as refusal:
            _LOG.warning("job %s does not get into the queue: %s", entry.hold_id, refusal)
        except Fault:
            raise
        except Exception:
            # One that cannot be brought must not keep the others waiting.
            log_failure(_LOG, "job %s does not get into the queue", entry.hold_id)

    # T1, T2

    async def _settle(self, at_once: bool) -> None:
        for _ in range(PAGES):
            page = await self._store.central.unsettled(_PAGE, self._last_end)
            for dispatch in page:
                hold_id = hold_of(dispatch)
                self._ends_now.add(hold_id)
                if (at_once or hold_id in self._ends) and not await self._is_away(dispatch.tenant):
                    await self._settle_one(dispatch)
                self._last_end = dispatch.job_id
            if len(page) < _PAGE:
                self._ends, self._ends_now, self._last_end = self._ends_now, set(), None
                return

    async def _settle_one(self, dispatch: Dispatch) -> None:
        try:
            await self._store.settler.settle(dispatch)
        except Fault as fault:
            _LOG.info("%s is settled later: %s", hold_of(dispatch), fault)
        except Exception:
            # One that cannot be settled must not keep the others waiting.
            log_failure(_LOG, "%s could not be settled", hold_of(dispatch))

    async def _is_away(self, tenant_id: TenantId) -> bool:
        tenant = await self._store.homes.tenants.get(tenant_id)
        return tenant is not None and self._store.homes.pools.is_away(tenant.pool)
