"""Delivers facts of jobs to webhooks: from the engine through the outbox to the receivers.

Each hub enters the facts of its own engine at once. Facts that no hub noticed are found by reading the outbox
entries of jobs. There is no leader: a hub claims a delivery before it sends it. `sender.py` limits concurrent
calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.webhooks.sender import OutgoingCalls, PendingDeliveries, WebhookSender
from comfyfleet.model.errors import ComfyFleetError, Fault
from comfyfleet.model.fact import Event, Fact
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.recent import RecentDict
from comfyfleet.model.webhook import OF_THE_JOB, Delivery, DeliveryStatus, WebhookSubscription
from comfyfleet.net.url_guard import UrlGuard
from comfyfleet.policy.rules import Rules
from comfyfleet.tenancy.webhook_outbox import StoredOutboxEntry, WebhookOutbox, delivery_in, submitted_at
from comfyfleet.tenancy.webhooks import Webhooks
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_BATCH_SIZE = 32
_MAX_PENDING_ROUNDS = 10_000
"""Rounds with unprocessed facts. Beyond it, the outbox entries are enough."""
_MAX_UNWANTED = 50_000
_NOTES = 200
"""Outbox entries read in one pass."""
_DUE = 200
_DUE_PAGES = 5
_NEVER_CAME_S = 60.0
"""If the job of an outbox entry is not stored by then, its submission failed."""
_PRUNE_EVERY_S = 10.0
_PRUNE = 500

T = TypeVar("T")


class WebhookDispatcher:
    """`start` and `close` may be called twice."""

    def __init__(
        self,
        engine: Engine,
        ledger: WebhookOutbox,
        webhooks: Webhooks,
        guard: UrlGuard,
        sender: WebhookSender,
        pending: PendingDeliveries,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._webhooks = webhooks
        self._guard = guard
        self._sender = sender
        self._pending = pending
        self._pending_rounds: dict[tuple[JobId, int], None] = {}
        self._unwanted: RecentDict[tuple[JobId, int], None] = RecentDict(_MAX_UNWANTED)
        """Rounds written here that no webhook wants; their facts are skipped."""
        self._announced = 0
        self._is_needed = True
        """Whether any webhook wants any job. If not, facts cost nothing here."""
        self._woken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._is_woken_early = False
        self._outgoing = OutgoingCalls(self._send)
        self._notes_after = ""
        self._due_after = ""
        self._prune_after = ""
        self._pruned_at = 0.0
        self._is_closed = False
        engine.announce_to(self.announce)
        self._leave_bus = engine.bus.listen(self._on_event)

    async def announce(self, submission: Submission, job_id: JobId, round_: int) -> None:
        """Called before the round is stored. Raises `ForbiddenUrl` for a URL that is never called, and
        `queue_full` if the tenant has too many pending deliveries. A retry of an accepted job is always
        allowed."""
        subscriptions = await self._webhooks.subscriptions_for(submission.tenant)
        own = submission.webhook
        if round_ == 1:
            if own is not None:
                # The address behind the URL is checked before each call.
                self._guard.check(own.url)
            # Webhooks of operators do not count against the tenant.
            if own is not None or any(each.owner == submission.tenant for each in subscriptions):
                self._pending.check(submission.tenant)
        if own is None and not subscriptions:
            if self._is_needed:
                self._unwanted[job_id, round_] = None
            return
        await self._ledger.add_entry(job_id, round_, self._engine.now())
        self._announced += 1
        self._is_needed = True

    def start(self) -> None:
        if self._running is None and not self._is_closed:
            self._running = in_background(self._run(), name="deliveries")

    async def close(self) -> None:
        """Calls in progress may end within a short grace; the rest is sent after the next start."""
        self._is_closed = True
        self._leave_bus()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._outgoing.close()
        await self._guard.close()

    def wake(self) -> None:
        """Looks for due deliveries at once."""
        self._is_woken_early = True
        self._woken.set()

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, Fact) or not self._is_needed:
            return
        round_ = (event.job_id, event.round)
        if round_ in self._unwanted:
            if event.kind.is_final:
                del self._unwanted[round_]
        elif len(self._pending_rounds) < _MAX_PENDING_ROUNDS:
            self._pending_rounds[round_] = None
            self._woken.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        look_s, looked_at = self._engine.rules.round_s, float("-inf")
        while True:
            # First, so that no wake-up during the work is lost.
            self._woken.clear()
            some = list(itertools.islice(self._pending_rounds, _BATCH_SIZE))
            for each in some:
                del self._pending_rounds[each]
            await self._guarded(asyncio.gather(*(self._look_at(*each) for each in some)))
            if self._is_woken_early:
                self._is_woken_early, self._due_after = False, ""
                await self._guarded(self._look_at_due())
            if loop.time() - looked_at >= look_s:
                # The first pass reads all entries, because a hub that died may have left any of them.
                await self._guarded(self._look_at_notes(is_whole=looked_at < 0))
                await self._guarded(self._look_at_due())
                await self._guarded(self._prune())
                await self._guarded(self._pending.count())
                looked_at = loop.time()
            if not self._pending_rounds:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, looked_at + look_s - loop.time())):
                        await self._woken.wait()

    async def _guarded(self, step: Awaitable[object]) -> None:
        """A failed step does not stop the others; the next pass repeats it."""
        try:
            await step
        except Exception:
            log_failure(_LOG, "cannot process webhook deliveries; will try again")

    async def _look_at_notes(self, *, is_whole: bool) -> None:
        while True:
            announced, after = self._announced, self._notes_after
            found, self._notes_after = await self._ledger.list_entries(after, _NOTES)
            await _some_at_a_time(self._enter_if_there, found)
            if not after and announced == self._announced:
                self._is_needed = bool(found)
            if not is_whole or not self._notes_after:
                return

    async def _look_at(self, job_id: JobId, round_: int) -> None:
        noted = await self._ledger.get_entry(job_id, round_)
        if noted is not None:
            await self._enter_if_there(noted)

    async def _enter_if_there(self, noted: StoredOutboxEntry) -> None:
        try:
            await self._enter(noted)
        except Fault as fault:
            # The tenant's database is away. A later pass finds the entry; others must not wait.
            _LOG.info("cannot enter deliveries of job %s; will try again: %s", noted.job_id, fault)

    async def _enter(self, noted: StoredOutboxEntry) -> None:
        """Enters deliveries for the facts since the last pass. Two hubs may do this at once."""
        reader, job_id = self._engine.reader, noted.job_id
        facts = await reader.facts(job_id, noted.entry.told)
        job = await reader.records.get(job_id) if facts else None
        if job is None:
            is_old = self._engine.now() - noted.entry.at > _NEVER_CAME_S
            if is_old and await reader.load(job_id) is None:
                await self._ledger.remove_entry(noted)
            return
        facts = [fact for fact in facts if fact.round == noted.round]
        if not facts:
            return
        for delivery in self._wanted(job, facts, await self._webhooks.subscriptions_for(job.tenant)):
            entered = await self._ledger.add(delivery)
            if entered is not None:
                self._outgoing.offer(entered.name, entered.host, entered.owner)
        if facts[-1].kind.is_final:
            await self._ledger.remove_entry(noted)
        else:
            await self._ledger.mark_published(noted, facts[-1].number)

    def _wanted(
        self, job: Job, facts: Iterable[Fact], standing: Iterable[WebhookSubscription]
    ) -> Iterable[Delivery]:
        now, own = self._engine.now(), job.payload.webhook
        subscriptions = list(standing)
        if own is not None:
            subscriptions.insert(0, WebhookSubscription(OF_THE_JOB, own.url, now, job.tenant, own.events))
        for fact in facts:
            for each in subscriptions:
                if fact.kind in each.events:
                    yield Delivery(
                        job.job_id,
                        fact.number,
                        each.webhook_id,
                        each.owner,
                        each.url,
                        fact.kind,
                        fact.round,
                        now,
                        now,
                    )

    async def _look_at_due(self) -> None:
        """Continues where the last pass ended, so that many entries for one host do not hide the others."""
        now = self._engine.now()
        for _ in range(_DUE_PAGES):
            page = await self._ledger.due(self._due_after, _DUE)
            for entry in page:
                if entry.at > now:
                    break
                self._outgoing.offer(entry.name, entry.host, entry.owner)
            if len(page) < _DUE or page[-1].at > now:
                self._due_after = ""
                return
            self._due_after = page[-1].name

    async def _send(self, entry: str) -> None:
        """Sends a due entry. An entry without an attempt may be stale and is repaired."""
        try:
            if not await self._sender.send(delivery_in(entry)):
                await self._ledger.repair(entry)
        except ComfyFleetError as error:
            _LOG.warning("cannot record a webhook delivery; will try again: %s", error)
        except Exception:
            log_failure(_LOG, "a webhook delivery failed unexpectedly; will try again")

    async def _prune(self) -> None:
        """Deletes old deliveries, one page of old jobs in each pass."""
        now, rules = self._engine.now(), self._engine.rules
        if not self._prune_after and now - self._pruned_at < _PRUNE_EVERY_S:
            return
        self._pruned_at = now
        page = await self._ledger.page(self._prune_after, _PRUNE)
        kept_s = min(rules.keep_delivered_s, rules.keep_undelivered_s)
        old = [each for each in page if submitted_at(each[0]) <= now - kept_s]
        self._prune_after = old[-1][0] if len(old) == _PRUNE else ""
        over = [(name, delivery.owner) for name, delivery in old if _ended_before(delivery, now, rules)]
        await _some_at_a_time(self._forget, over)

    async def _forget(self, over: tuple[str, TenantId | None]) -> None:
        await self._ledger.forget(*over)


def _ended_before(delivery: Delivery, now: float, rules: Rules) -> bool:
    is_delivered = delivery.status is DeliveryStatus.DELIVERED
    keep_s = rules.keep_delivered_s if is_delivered else rules.keep_undelivered_s
    return delivery.ended_at is not None and delivery.ended_at < now - keep_s


async def _some_at_a_time(work: Callable[[T], Awaitable[None]], items: Sequence[T]) -> None:
    """Runs a batch together, so that it shares one commit."""
    for start in range(0, len(items), _BATCH_SIZE):
        await asyncio.gather(*map(work, items[start : start + _BATCH_SIZE]))
