"""The client for scripts without an event loop: its methods block, and its loop runs in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from comfyfleet.client.client import FleetClient
from comfyfleet.client.options import JobUpdate
from comfyfleet.wire import answers

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[FleetClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncFleetClient, P], T]:
    """The client's method with its signature and docstring, blocking."""

    @functools.wraps(method)
    def call(self: SyncFleetClient, /, *args: P.args, **options: P.kwargs) -> T:
        return self._run(lambda: method(self.client, *args, **options))

    return call


class SyncFleetClient:
    """A `FleetClient` whose methods block. `close()`, or the end of a `with`, ends its thread."""

    __signature__ = inspect.signature(FleetClient)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.client = FleetClient(*args, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._life = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._life:
            is_first, self._is_closed = not self._is_closed, True
            if not is_first or self._loop is None or self._thread is None:
                return
            try:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    async def _end(self) -> None:
        await self.client.close()
        # Calls of other threads must not wait for ever.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._life:
            if self._is_closed:
                raise RuntimeError("the client is closed; make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="comfyfleet client", daemon=True
                )
                self._thread.start()
            return self._loop

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        loop = self._started()
        future = asyncio.run_coroutine_threadsafe(work(), loop)
        try:
            return future.result()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            future.cancel()
            raise

    def watch(self, job_id: str, after: int | None = None) -> Iterator[JobUpdate]:
        watched = self.client.watch(job_id, after)
        yield from self._each(watched)

    def every_job(self, **wanted: Any) -> Iterator[answers.JobBody]:
        yield from self._each(self.client.every_job(**wanted))

    def export(self, tenant_id: str, **wanted: Any) -> Iterator[bytes]:
        yield from self._each(self.client.export(tenant_id, **wanted))

    def _each(self, source: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> T:
            return await anext(source)

        try:
            while True:
                try:
                    yield self._run(following)
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(source, "aclose", None)
            if close is not None and not self._is_closed:
                self._run(close)

    submit = _blocking(FleetClient.submit)
    upload = _blocking(FleetClient.upload)
    submit_many = _blocking(FleetClient.submit_many)
    convert = _blocking(FleetClient.convert)
    get = _blocking(FleetClient.get)
    payload = _blocking(FleetClient.payload)
    result = _blocking(FleetClient.result)
    explain = _blocking(FleetClient.explain)
    jobs = _blocking(FleetClient.jobs)
    wait = _blocking(FleetClient.wait)
    fetch = _blocking(FleetClient.fetch)
    save = _blocking(FleetClient.save)
    cancel = _blocking(FleetClient.cancel)
    delete = _blocking(FleetClient.delete)
    file = _blocking(FleetClient.file)
    files = _blocking(FleetClient.files)
    delete_file = _blocking(FleetClient.delete_file)
    retry = _blocking(FleetClient.retry)
    pause = _blocking(FleetClient.pause)
    resume = _blocking(FleetClient.resume)
    set_priority = _blocking(FleetClient.set_priority)
    stats = _blocking(FleetClient.stats)
    pause_queue = _blocking(FleetClient.pause_queue)
    resume_queue = _blocking(FleetClient.resume_queue)
    dead_letter = _blocking(FleetClient.dead_letter)
    retry_dead = _blocking(FleetClient.retry_dead)
    purge_dead = _blocking(FleetClient.purge_dead)
    workers = _blocking(FleetClient.workers)
    worker = _blocking(FleetClient.worker)
    drain_worker = _blocking(FleetClient.drain_worker)
    pause_worker = _blocking(FleetClient.pause_worker)
    resume_worker = _blocking(FleetClient.resume_worker)
    refresh_worker = _blocking(FleetClient.refresh_worker)
    remove_worker = _blocking(FleetClient.remove_worker)
    blocks = _blocking(FleetClient.blocks)
    lift_block = _blocking(FleetClient.lift_block)
    create_key = _blocking(FleetClient.create_key)
    keys = _blocking(FleetClient.keys)
    audit = _blocking(FleetClient.audit)
    rotate_key = _blocking(FleetClient.rotate_key)
    revoke_key = _blocking(FleetClient.revoke_key)
    invite = _blocking(FleetClient.invite)
    invites = _blocking(FleetClient.invites)
    uninvite = _blocking(FleetClient.uninvite)
    enrol = _blocking(FleetClient.enrol)
    create_webhook = _blocking(FleetClient.create_webhook)
    webhooks = _blocking(FleetClient.webhooks)
    change_webhook = _blocking(FleetClient.change_webhook)
    test_webhook = _blocking(FleetClient.test_webhook)
    delete_webhook = _blocking(FleetClient.delete_webhook)
    rotate_webhook_secret = _blocking(FleetClient.rotate_webhook_secret)
    deliveries = _blocking(FleetClient.deliveries)
    resend_delivery = _blocking(FleetClient.resend_delivery)
    create_tenant = _blocking(FleetClient.create_tenant)
    tenants = _blocking(FleetClient.tenants)
    tenant = _blocking(FleetClient.tenant)
    change_tenant = _blocking(FleetClient.change_tenant)
    suspend_tenant = _blocking(FleetClient.suspend_tenant)
    resume_tenant = _blocking(FleetClient.resume_tenant)
    move_tenant = _blocking(FleetClient.move_tenant)
    delete_tenant = _blocking(FleetClient.delete_tenant)
    balance = _blocking(FleetClient.balance)
    statement = _blocking(FleetClient.statement)
    differences = _blocking(FleetClient.differences)
    reconcile = _blocking(FleetClient.reconcile)
    grants = _blocking(FleetClient.grants)
    grant_credits = _blocking(FleetClient.grant_credits)
    confirm_grant = _blocking(FleetClient.confirm_grant)
    void_grant = _blocking(FleetClient.void_grant)
    adjust_credits = _blocking(FleetClient.adjust_credits)
    usage = _blocking(FleetClient.usage)
    receipt = _blocking(FleetClient.receipt)
    health = _blocking(FleetClient.health)
