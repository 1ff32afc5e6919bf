"""One attempt at one delivery: claim it, make what is sent from the job, sign it, send it, note what came of it.

When an attempt is made is `delivering.py`'s, what follows from it `policy/delivering.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.outgoing import Waited
from comfyfleet.hub.safe_reports import made_safe
from comfyfleet.model.errors import ComfyFleetError, Fault
from comfyfleet.model.job import Job
from comfyfleet.model.webhook import Delivery, DeliveryStatus, StandingWebhook
from comfyfleet.outbound.guard import Fetched, Forbidden, Guard
from comfyfleet.policy.delivering import Attempted, after_attempt, given_up
from comfyfleet.ports import Chance
from comfyfleet.tenancy.deliveries import Deliveries, host_of
from comfyfleet.tenancy.webhooks import Webhooks
from comfyfleet.tracing import log_failure
from comfyfleet.wire.signing import ID_HEADER, SIGNATURE_HEADER, TIME_HEADER, new_secret, signatures
from comfyfleet.wire.webhooks import WebhookTested, event, shown, test_event

_LOG = logging.getLogger(__name__)

CLAIM_S = 30.0
"""Longer than any attempt takes. A delivery whose hub died is sent by another, or the same again, after this."""


def make_secret() -> str:
    return new_secret(secrets.token_bytes(32))


class Sender:
    def __init__(
        self,
        engine: Engine,
        book: Deliveries,
        webhooks: Webhooks,
        guard: Guard,
        chance: Chance,
        *,
        claim_s: float = CLAIM_S,
    ) -> None:
        self._engine = engine
        self._book = book
        self._webhooks = webhooks
        self._guard = guard
        self._chance = chance
        self._claim_s = claim_s
        self._tests = Waited()

    async def send(self, name: str) -> bool:
        """False: there was nothing to send now."""
        now = self._engine.now()
        claimed = await self._book.claim(name, now, now + self._claim_s)
        if claimed is None:
            return False
        delivery, version = claimed
        try:
            after = await self._attempt(delivery)
        except asyncio.CancelledError:
            # The hub stops: whoever comes next need not wait for the claim to end.
            await self._give_back(delivery, version)
            raise
        if after.status is DeliveryStatus.GIVEN_UP:
            _LOG.warning(
                "delivery %s to %s is given up after %d attempts: %s",
                delivery.delivery_id,
                # No more of it: many a receiver has its secret in the path.
                host_of(delivery.url),
                after.attempts,
                after.last_error,
            )
        await self._book.settle(delivery, after, version)
        return True

    async def _attempt(self, delivery: Delivery) -> Delivery:
        store = self._engine.store
        facts = await store.facts(delivery.job_id, delivery.number - 1)
        job = await store.records.get(delivery.job_id)
        if job is None or not facts or facts[0].number != delivery.number:
            return given_up(delivery, "the job is not kept any more", self._engine.now())
        keys = await self._webhooks.signing(delivery.owner, make_secret())
        try:
            body = event(facts[0], await _made_safe(job))
            attempted = await self._post(delivery.url, delivery.delivery_id, body, keys)
        except Exception:
            # It may well be the same the next time: counted, it has an end like any other.
            log_failure(_LOG, "delivery %s could not be made", delivery.delivery_id)
            attempted = Attempted(error="the hub could not make the call; its log says why")
        return after_attempt(
            delivery,
            attempted,
            now=self._engine.now(),
            fraction=self._chance.fraction(),
            rules=self._engine.rules,
        )

    async def try_out(self, webhook: StandingWebhook) -> WebhookTested:
        """A test delivery, once. Refused while too many are under way: each may last as long as its receiver likes."""
        with self._tests.room(host_of(webhook.url), "" if webhook.owner is None else webhook.owner):
            return await self._try_out(webhook)

    async def _try_out(self, webhook: StandingWebhook) -> WebhookTested:
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

    async def _post(self, url: str, delivery_id: str, body: bytes, keys: tuple[str, ...]) -> Attempted:
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
        except Forbidden as forbidden:
            return Attempted(error=forbidden.message)
        except Fault as fault:
            return Attempted(error=str(fault))
        return Attempted(answer.status, retry_after_s=_retry_after_s(answer))

    async def _give_back(self, delivery: Delivery, version: int) -> None:
        free = msgspec.structs.replace(delivery, claimed_until=None)
        try:
            await self._book.settle(delivery, free, version)
        except ComfyFleetError as error:
            _LOG.info("a claim could not be given back; it ends by itself: %s", error)


async def _made_safe(job: Job) -> Job:
    return job if job.result is None else msgspec.structs.replace(job, result=await made_safe(job.result))


def _retry_after_s(answer: Fetched) -> float | None:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
