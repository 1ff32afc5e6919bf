"""The outbox relay finishes steps between tenant databases and the store that a crash interrupted.

It enqueues jobs from tenant outboxes (steps S2, S3), settles ended jobs (T1, T2) and moves pending failure
texts. It acts on an entry only when it has seen it twice, so requests in progress are left alone. Every hub
runs a relay; two relays may repeat each other's steps without harm.
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
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import OutboxEntry
from comfyfleet.tenancy.ledger_store import TenantLedgerStore
from comfyfleet.tenancy.tenants import TenantLocation
from comfyfleet.tracing import BackgroundJob, log_failure

_LOG = logging.getLogger(__name__)

LOOK_S = 1.0
LIFE_S = 30.0
"""The relay does not enqueue what it read longer ago. Tombstones last twice as long."""
_PAGE = 200
PAGES = 5
"""Unsettled jobs that one pass reads at most; the next pass continues there."""

Admit = Callable[[Job, Dispatch, Callable[[Dispatch], Awaitable[WriteResult | None]]], Awaitable[None]]


class OutboxRelay(BackgroundJob):
    """`admit` is the engine's: it knows the requirement class of a job."""

    def __init__(self, store: TenantLedgerStore, admit: Admit) -> None:
        super().__init__("outbox relay")
        self._store = store
        self._admit = admit
        self._seen: set[HoldId] = set()
        self._ends: set[HoldId] = set()
        """Seen in the last complete pass."""
        self._ends_now: set[HoldId] = set()
        """Seen in this pass, which may take several calls of `_settle`."""
        self._last_end: JobId | None = None
        self._is_due = asyncio.Event()
        store.on_relay_work = self.wake

    def wake(self) -> None:
        self._is_due.set()

    async def _run(self) -> None:
        # No request of this process is in progress yet, so there is nothing to wait for.
        await self._try_pass(at_once=True)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._is_due.wait()
                    await asyncio.sleep(LOOK_S / 10)
            self._is_due.clear()
            await self._try_pass()

    async def _try_pass(self, at_once: bool = False) -> None:
        try:
            await self.run_once(at_once=at_once)
        except Fault as fault:
            _LOG.warning("the outbox relay cannot finish its pass, will retry: %s", fault)
        except Exception:
            log_failure(_LOG, "the outbox relay failed, will retry")

    async def run_once(self, *, at_once: bool = False) -> None:
        """One pass. `at_once`: also entries that it sees for the first time."""
        before, self._seen = self._seen, set()
        if at_once:
            await self._store.directory.open()
        # In parallel: a database that does not answer delays no other.
        passes = [
            self._relay_database(each, before, at_once) for each in self._store.directory.databases.used_names
        ]
        left = self._store.settler.pending_texts.take_all()
        results = await asyncio.gather(*passes, self._settle(at_once), left, return_exceptions=True)
        # Raise after all have ended, or they would run beside the next pass.
        for error in results:
            if error is not None:
                raise error

    async def _relay_database(self, name: str, before: set[HoldId], at_once: bool) -> None:
        try:
            await self._send(name, await self._store.directory.databases.get(name), before, at_once)
        except Fault as fault:
            _LOG.info("cannot reach database %s, will retry: %s", name, fault)

    # S2, S3

    async def _send(self, name: str, database: TenantDatabase, before: set[HoldId], at_once: bool) -> None:
        after: HoldId | None = None
        while True:
            until = asyncio.get_running_loop().time() + LIFE_S
            page = await database.outbox(is_sent=False, after=after, limit=_PAGE)
            for entry in page:
                self._seen.add(entry.hold_id)
                if at_once or entry.hold_id in before:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(until):
                            await self._enqueue(name, database, entry)
                after = entry.hold_id
            if len(page) < _PAGE:
                return

    async def _enqueue(self, name: str, database: TenantDatabase, entry: OutboxEntry) -> None:
        tenant = await self._store.directory.tenants.get(entry.tenant)
        try:
            job = await database.leasable(entry.hold_id)
        except Fault as fault:
            if self._store.directory.databases.is_unreachable(name):
                raise
            # The database answers, but this job is unreadable. Go on with the next one.
            _LOG.warning("cannot enqueue job %s, will retry: %s", entry.hold_id, fault)
            return
        # The tenant has moved or is deleted: relocation or deletion removes the entry.
        if tenant is None or tenant.database != name or job is None:
            return
        home = TenantLocation(tenant, database)
        facts = (FactDraft(FactKind.QUEUED, None if job.round == 1 else {"round": job.round}),)
        try:
            await self._admit(
                job, entry.dispatch, lambda dispatch: self._store.send(home, dispatch, job, facts)
            )
        except Refusal as refusal:
            _LOG.warning("cannot enqueue job %s: %s", entry.hold_id, refusal)
        except Fault:
            raise
        except Exception:
            # Go on with the next job.
            log_failure(_LOG, "cannot enqueue job %s", entry.hold_id)

    # end a round (T1, T2 of docs/ledger.md)

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
            _LOG.info("cannot settle %s, will retry: %s", hold_of(dispatch), fault)
        except Exception:
            # Go on with the next job.
            log_failure(_LOG, "cannot settle %s", hold_of(dispatch))

    async def _is_away(self, tenant_id: TenantId) -> bool:
        tenant = await self._store.directory.tenants.get(tenant_id)
        return tenant is not None and self._store.directory.databases.is_unreachable(tenant.database)
