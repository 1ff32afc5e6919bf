"""Facts on their way out: from the jobs that somebody wants to hear of, through the book, to their receivers.

Each hub hears the facts of its own engine and enters them at once; what no hub heard (one died, a worker has no engine)
is found by going through the notes. No hub leads: a delivery is claimed before it is sent. How many are sent at a time
is `sender.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.webhooks.sender import OutgoingCalls, OutgoingLimits, PendingDeliveries, WebhookSender
from comfyfleet.model.errors import ComfyFleetError, Fault
from comfyfleet.model.fact import Event, Fact
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.webhook import OF_THE_JOB, Delivery, DeliveryStatus, WebhookSubscription
from comfyfleet.net.url_guard import UrlGuard
from comfyfleet.policy.rules import Rules
from comfyfleet.tenancy.webhook_outbox import StoredOutboxEntry, WebhookOutbox, delivery_in, submitted_at
from comfyfleet.tenancy.webhooks import Webhooks
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_BATCH_SIZE = 32
_MAX_HEARD = 10_000
"""Rounds of jobs whose facts were heard and not looked at yet; more are found by going through the notes."""
_MAX_UNHEARD = 50_000
_NOTES = 200
"""Notes gone through in one look."""
_DUE = 200
_DUE_PAGES = 5
_NEVER_CAME_S = 60.0
"""A note whose job was not written in this time: its submission was refused or died."""
_PRUNE_EVERY_S = 10.0
_PRUNE = 500

T = TypeVar("T")


class WebhookDispatcher:
    """`start` and `close` are its life; both may be called twice."""

    def __init__(
        self,
        engine: Engine,
        ledger: WebhookOutbox,
        webhooks: Webhooks,
        guard: UrlGuard,
        sender: WebhookSender,
        pending: PendingDeliveries,
        bounds: OutgoingLimits | None = None,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._webhooks = webhooks
        self._guard = guard
        self._sender = sender
        self._pending = pending
        self._heard: dict[tuple[JobId, int], None] = {}
        self._unheard: dict[tuple[JobId, int], None] = {}
        """Rounds that were written here and nobody hears of: their facts are not looked at, though others' are."""
        self._announced = 0
        self._is_needed = True
        """Whether anybody wants to hear of any job. Where not, facts cost nothing here."""
        self._woken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._is_asked = False
        self._outgoing = OutgoingCalls(self._send, bounds)
        self._notes_after = ""
        self._due_after = ""
        self._prune_after = ""
        self._pruned_at = 0.0
        self._is_closed = False
        engine.announce_to(self.announce)
        self._leave_bus = engine.bus.listen(self._hear)

    async def announce(self, submission: Submission, job_id: JobId, round_: int) -> None:
        """Before the round is written. Raises `ForbiddenUrl` for a URL never called, `queue_full` where too many
        deliveries of the tenant wait. A job that was taken once may be tried again."""
        hearers = await self._webhooks.hearing(submission.tenant)
        own = submission.webhook
        if round_ == 1:
            if own is not None:
                # What it leads to is looked at before each call.
                self._guard.check(own.url)
            # What operators hear is theirs, however many wait.
            if own is not None or any(each.owner == submission.tenant for each in hearers):
                self._pending.check(submission.tenant)
        if own is None and not hearers:
            if self._is_needed:
                self._unheard[job_id, round_] = None
                if len(self._unheard) > _MAX_UNHEARD:
                    del self._unheard[next(iter(self._unheard))]
            return
        await self._ledger.note(job_id, round_, self._engine.now())
        self._announced += 1
        self._is_needed = True

    def start(self) -> None:
        if self._running is None and not self._is_closed:
            self._running = in_background(self._run(), name="deliveries")

    async def close(self) -> None:
        """What is being sent may end within a short grace; what is not delivered then is tried after the next start."""
        self._is_closed = True
        self._leave_bus()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._outgoing.close()
        await self._guard.close()

    def wake(self) -> None:
        """Something may be due before its time."""
        self._is_asked = True
        self._woken.set()

    # what is heard

    def _hear(self, event: Event) -> None:
        if not isinstance(event, Fact) or not self._is_needed:
            return
        round_ = (event.job_id, event.round)
        if round_ in self._unheard:
            if event.kind.is_final:
                del self._unheard[round_]
        elif len(self._heard) < _MAX_HEARD:
            self._heard[round_] = None
            self._woken.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        look_s, looked_at = self._engine.rules.round_s, float("-inf")
        while True:
            # First, so that whatever comes while something is being done is not slept through.
            self._woken.clear()
            some = list(itertools.islice(self._heard, _BATCH_SIZE))
            for each in some:
                del self._heard[each]
            await self._tried(asyncio.gather(*(self._look_at(*each) for each in some)))
            if self._is_asked:
                self._is_asked, self._due_after = False, ""
                await self._tried(self._look_at_due())
            if loop.time() - looked_at >= look_s:
                # The first time all notes are gone through: a hub that died may have left any of them behind.
                await self._tried(self._look_at_notes(is_whole=looked_at < 0))
                await self._tried(self._look_at_due())
                await self._tried(self._prune())
                await self._tried(self._pending.count())
                looked_at = loop.time()
            if not self._heard:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, looked_at + look_s - loop.time())):
                        await self._woken.wait()

    async def _tried(self, duty: Awaitable[object]) -> None:
        """Whatever is wrong with one duty, the others are done; the next look tries it again."""
        try:
            await duty
        except ComfyFleetError as error:
            _LOG.warning("deliveries could not be looked at; the next look tries again: %s", error)
        except Exception:
            log_failure(_LOG, "deliveries could not be looked at; the next look tries again")

    async def _look_at_notes(self, *, is_whole: bool) -> None:
        while True:
            announced, after = self._announced, self._notes_after
            found, self._notes_after = await self._ledger.notes(after, _NOTES)
            await _some_at_a_time(self._enter_if_there, found)
            if not after and announced == self._announced:
                self._is_needed = bool(found)
            if not is_whole or not self._notes_after:
                return

    async def _look_at(self, job_id: JobId, round_: int) -> None:
        noted = await self._ledger.noted(job_id, round_)
        if noted is not None:
            await self._enter_if_there(noted)

    async def _enter_if_there(self, noted: StoredOutboxEntry) -> None:
        try:
            await self._enter(noted)
        except Fault as fault:
            # Its tenant's database is away: its note is found again, and others' are not kept waiting.
            _LOG.info("what job %s has told is entered later: %s", noted.job_id, fault)

    async def _enter(self, noted: StoredOutboxEntry) -> None:
        """What the round has told since the last look. Two hubs may do so at once."""
        store, job_id = self._engine.store, noted.job_id
        facts = await store.facts(job_id, noted.note.told)
        job = await store.records.get(job_id) if facts else None
        if job is None:
            is_old = self._engine.now() - noted.note.at > _NEVER_CAME_S
            if is_old and await store.load(job_id) is None:
                await self._ledger.forget_note(noted)
            return
        facts = [fact for fact in facts if fact.round == noted.round]
        if not facts:
            return
        for delivery in self._wanted(job, facts, await self._webhooks.hearing(job.tenant)):
            entered = await self._ledger.add(delivery)
            if entered is not None:
                self._outgoing.offer(entered.name, entered.host, entered.owner)
        if facts[-1].kind.is_final:
            await self._ledger.forget_note(noted)
        else:
            await self._ledger.told(noted, facts[-1].number)

    def _wanted(
        self, job: Job, facts: Iterable[Fact], standing: Iterable[WebhookSubscription]
    ) -> Iterable[Delivery]:
        now, own = self._engine.now(), job.payload.webhook
        hearers = list(standing)
        if own is not None:
            hearers.insert(0, WebhookSubscription(OF_THE_JOB, own.url, now, job.tenant, own.events))
        for fact in facts:
            for each in hearers:
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

    # what is due

    async def _look_at_due(self) -> None:
        """Going on where the last look ended, so that many that wait for one host do not hide the others."""
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
        """A due entry by its name. One that did not lead to an attempt may not lead anywhere any more."""
        try:
            if not await self._sender.send(delivery_in(entry)):
                await self._ledger.mend(entry)
        except ComfyFleetError as error:
            _LOG.warning("a delivery could not be noted; it is tried again: %s", error)
        except Exception:
            log_failure(_LOG, "a delivery failed in a way nobody foresaw; it is tried again")

    async def _prune(self) -> None:
        """Only those of old jobs are gone through: a page in each look, and after the last of
        them, later, from the first."""
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
    """Together, so that they wait for one commit and not each for its own."""
    for start in range(0, len(items), _BATCH_SIZE):
        await asyncio.gather(*map(work, items[start : start + _BATCH_SIZE]))
