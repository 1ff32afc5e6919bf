"""Sends webhook deliveries: claims one, signs and posts it, and records the result.

`OutgoingCalls` limits concurrent calls per host, per owner and in total, so a slow receiver delays only
itself. `PendingDeliveries` counts what waits for each tenant. `dispatcher.py` decides when to send, and
`policy/webhook_delivery.py` what follows from an attempt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.http.limits import subtract
from comfyfleet.hub.local_worker_api import sanitized
from comfyfleet.model.errors import ComfyFleetError, Fault, Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.job import Job
from comfyfleet.model.webhook import Delivery, DeliveryStatus, WebhookSubscription
from comfyfleet.net.url_guard import FetchedAnswer, ForbiddenUrl, UrlGuard
from comfyfleet.policy.webhook_delivery import DeliveryAttempt, abandoned, after_attempt, check_pending
from comfyfleet.ports import RandomSource
from comfyfleet.tenancy.webhook_outbox import WebhookOutbox, host_of
from comfyfleet.tenancy.webhooks import Webhooks
from comfyfleet.tracing import in_background, log_failure
from comfyfleet.wire.webhooks import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIME_HEADER,
    WebhookTested,
    event,
    new_secret,
    shown,
    signatures,
    test_event,
)

_MAX_WAITING = 5_000
_MAX_WAITING_OF_HOST = 500
_GRACE_S = 2.0
_RETRY_S = 2.0


class OutgoingLimits(msgspec.Struct, frozen=True):
    total: int = 64
    per_owner: int = 16
    per_host: int = 4


class _CallCounts:
    def __init__(self, bounds: OutgoingLimits) -> None:
        self.bounds = bounds
        self.hosts: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()

    def fit(self, host: str, owner: str) -> bool:
        return (
            self.hosts.total() < self.bounds.total
            and self.hosts[host] < self.bounds.per_host
            and self._owners[owner] < self.bounds.per_owner
        )

    def add(self, host: str, owner: str) -> None:
        self.hosts[host] += 1
        self._owners[owner] += 1

    def remove(self, host: str, owner: str) -> None:
        subtract(self.hosts, host)
        subtract(self._owners, owner)


TESTS = OutgoingLimits(total=16, per_owner=4, per_host=4)
"""Tests have their own limits, so that tests and deliveries do not wait for each other."""


class ConcurrentTests:
    """Limits calls whose caller waits for the result: a call beyond a limit is refused, not queued."""

    def __init__(self, bounds: OutgoingLimits = TESTS) -> None:
        self._calls = _CallCounts(bounds)

    @contextmanager
    def slot(self, host: str, owner: str) -> Iterator[None]:
        bounds = self._calls.bounds
        if not self._calls.fit(host, owner):
            raise Refusal(
                RefusalCode.RATE_LIMITED,
                f"at most {bounds.total} test deliveries run at a time, {bounds.per_owner} of one owner and "
                f"{bounds.per_host} to one host: wait for the earlier ones",
                retry_after_s=_RETRY_S,
            )
        self._calls.add(host, owner)
        try:
            yield
        finally:
            self._calls.remove(host, owner)


class OutgoingCalls:
    """`work` makes the call of that name and must not raise. Calls beyond a limit wait in bounded queues;
    the caller offers a call again that did not fit."""

    def __init__(
        self, work: Callable[[str], Coroutine[Any, Any, None]], bounds: OutgoingLimits | None = None
    ) -> None:
        self._work = work
        self._calls = _CallCounts(bounds or OutgoingLimits())
        self._running: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, dict[str, str]] = {}
        """By host: names of calls and their owners."""
        self._count = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._running)

    def offer(self, name: str, host: str, owner: str) -> None:
        """Starts or queues the call, unless it runs or waits already."""
        line = self._waiting.get(host)
        if self._is_closed or name in self._running or (line is not None and name in line):
            return
        if self._calls.fit(host, owner):
            self._start(name, host, owner)
        elif self._count < _MAX_WAITING and len(line or ()) < _MAX_WAITING_OF_HOST:
            self._waiting.setdefault(host, {})[name] = owner
            self._count += 1

    async def close(self) -> None:
        """Calls in progress may end within a short grace."""
        self._is_closed = True
        self._waiting.clear()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=_GRACE_S)
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _start(self, name: str, host: str, owner: str) -> None:
        self._calls.add(host, owner)
        task = in_background(self._work(name), name="outgoing")
        self._running[name] = task
        task.add_done_callback(lambda _: self._ended(name, host, owner))

    def _ended(self, name: str, host: str, owner: str) -> None:
        del self._running[name]
        self._calls.remove(host, owner)
        if self._is_closed:
            return
        # One call for each host in turn, so that a long queue does not delay short ones.
        for each in list(self._waiting):
            if len(self._running) >= self._calls.bounds.total:
                return
            self._take_from(each)

    def _take_from(self, host: str) -> None:
        if self._calls.hosts[host] >= self._calls.bounds.per_host:
            return
        line = self._waiting.pop(host)
        # Not always the first: its owner may be busy with other hosts.
        name = next((name for name, owner in line.items() if self._calls.fit(host, owner)), None)
        if name is not None:
            self._count -= 1
            self._start(name, host, line.pop(name))
        if line:
            self._waiting[host] = line


_LOG = logging.getLogger(__name__)

CLAIM_S = 30.0
"""Longer than any attempt. After this time, another hub may send the delivery of a hub that died."""


def make_secret() -> str:
    return new_secret(secrets.token_bytes(32))


class WebhookSender:
    def __init__(
        self,
        engine: Engine,
        ledger: WebhookOutbox,
        webhooks: Webhooks,
        guard: UrlGuard,
        rng: RandomSource,
        *,
        claim_s: float = CLAIM_S,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._webhooks = webhooks
        self._guard = guard
        self._chance = rng
        self._claim_s = claim_s
        self._tests = ConcurrentTests()

    async def send(self, name: str) -> bool:
        """False if there was nothing to send."""
        now = self._engine.now()
        claimed = await self._ledger.claim(name, now, now + self._claim_s)
        if claimed is None:
            return False
        delivery, version = claimed
        try:
            after = await self._attempt(delivery)
        except asyncio.CancelledError:
            # The hub stops: the next hub need not wait for the claim to expire.
            await self._give_back(delivery, version)
            raise
        if after.status is DeliveryStatus.GIVEN_UP:
            _LOG.warning(
                "delivery %s to %s is given up after %d attempts: %s",
                delivery.delivery_id,
                # Only the host: many receivers have a secret in the path.
                host_of(delivery.url),
                after.attempts,
                after.last_error,
            )
        await self._ledger.settle(delivery, after, version)
        return True

    async def _attempt(self, delivery: Delivery) -> Delivery:
        reader = self._engine.reader
        facts = await reader.facts(delivery.job_id, delivery.number - 1)
        job = await reader.records.get(delivery.job_id)
        if job is None or not facts or facts[0].number != delivery.number:
            return abandoned(delivery, "the job was deleted", self._engine.now())
        keys = await self._webhooks.signing(delivery.owner, make_secret())
        try:
            body = event(facts[0], await _made_safe(job))
            attempted = await self._post(delivery.url, delivery.delivery_id, body, keys)
        except Exception:
            # The error may persist, so it counts as an attempt.
            log_failure(_LOG, "cannot make the call of webhook delivery %s", delivery.delivery_id)
            attempted = DeliveryAttempt(error="the hub failed to make the call; see the hub's log")
        return after_attempt(
            delivery,
            attempted,
            now=self._engine.now(),
            fraction=self._chance.fraction(),
            rules=self._engine.rules,
        )

    async def send_test(self, webhook: WebhookSubscription) -> WebhookTested:
        """Sends one test delivery. Refused while too many run, because a receiver may take long."""
        with self._tests.slot(host_of(webhook.url), "" if webhook.owner is None else webhook.owner):
            return await self._try_out(webhook)

    async def _try_out(self, webhook: WebhookSubscription) -> WebhookTested:
        delivery_id = f"test_{secrets.token_hex(12)}"
        keys = await self._webhooks.signing(webhook.owner, make_secret())
        body = test_event(webhook.webhook_id, self._engine.now())
        began = time.monotonic()
        attempted = await self._post(webhook.url, delivery_id, body, keys)
        status = attempted.status
        return WebhookTested(
            delivery_id,
            webhook.webhook_id,
            shown(webhook.url),
            status is not None and 200 <= status < 300,
            round(time.monotonic() - began, 3),
            status,
            attempted.error,
        )

    async def _post(self, url: str, delivery_id: str, body: bytes, keys: tuple[str, ...]) -> DeliveryAttempt:
        timestamp = int(self._engine.now())
        headers = {
            "content-type": "application/json",
            "user-agent": "comfyfleet",
            ID_HEADER: delivery_id,
            TIME_HEADER: str(timestamp),
            SIGNATURE_HEADER: signatures(keys, delivery_id, timestamp, body),
        }
        try:
            answer = await self._guard.post(url, body, headers)
        except ForbiddenUrl as forbidden:
            return DeliveryAttempt(error=forbidden.message)
        except Fault as fault:
            return DeliveryAttempt(error=str(fault))
        return DeliveryAttempt(answer.status, retry_after_s=_retry_after_s(answer))

    async def _give_back(self, delivery: Delivery, version: int) -> None:
        free = msgspec.structs.replace(delivery, claimed_until=None)
        try:
            await self._ledger.settle(delivery, free, version)
        except ComfyFleetError as error:
            _LOG.info("cannot release the claim of a delivery; it will expire: %s", error)


async def _made_safe(job: Job) -> Job:
    return job if job.result is None else msgspec.structs.replace(job, result=await sanitized(job.result))


def _retry_after_s(answer: FetchedAnswer) -> float | None:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


_EVERY_S = 5.0
_SHARE = 20
"""The pause after a count is at least this many times its duration."""
_PAGE = 1_000


class PendingDeliveries:
    def __init__(self, ledger: WebhookOutbox, most: int) -> None:
        self._ledger = ledger
        self._most = most
        self._by_owner: Counter[str] = Counter()
        self._count_at = float("-inf")

    def check(self, tenant: TenantId) -> None:
        check_pending(self._by_owner[tenant], self._most)

    async def count(self) -> None:
        """Counts again if it is time."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        if began_at < self._count_at:
            return
        found: Counter[str] = Counter()
        after = ""
        while True:
            page = await self._ledger.due(after, _PAGE)
            found.update(entry.owner for entry in page)
            if len(page) < _PAGE:
                break
            after = page[-1].name
        self._by_owner = found
        ended_at = loop.time()
        self._count_at = ended_at + max(_EVERY_S, _SHARE * (ended_at - began_at))
