"""The client for scripts without an event loop: its methods block, and its loop runs in a thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from comfyfleet.blocking_facade import BlockingFacade, blocking
from comfyfleet.client.client import FleetClient
from comfyfleet.client.options import JobUpdate
from comfyfleet.wire import answers
from comfyfleet.wire.files import FileView


class SyncFleetClient(BlockingFacade):
    """A `FleetClient` whose methods block. `close()`, or the end of a `with`, ends its thread."""

    __signature__ = inspect.signature(FleetClient)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.client = FleetClient(*args, **options)
        super().__init__(self.client, "client")

    def on_away(self, listener: Callable[[Exception | None], object]) -> None:
        self.client.on_away(listener)

    def watch(self, job_id: str, after: int | None = None) -> Iterator[JobUpdate]:
        yield from self._each(self.client.watch(job_id, after))

    def every_job(self, **wanted: Any) -> Iterator[answers.JobBody]:
        yield from self._each(self.client.every_job(**wanted))

    def every_file(self, **wanted: Any) -> Iterator[FileView]:
        yield from self._each(self.client.every_file(**wanted))

    def export_credits(self, tenant_id: str, **wanted: Any) -> Iterator[bytes]:
        yield from self._each(self.client.export_credits(tenant_id, **wanted))

    submit = blocking(FleetClient.submit)
    upload = blocking(FleetClient.upload)
    submit_many = blocking(FleetClient.submit_many)
    quote = blocking(FleetClient.quote)
    convert = blocking(FleetClient.convert)
    get = blocking(FleetClient.get)
    payload = blocking(FleetClient.payload)
    result = blocking(FleetClient.result)
    explain = blocking(FleetClient.explain)
    jobs = blocking(FleetClient.jobs)
    wait = blocking(FleetClient.wait)
    fetch = blocking(FleetClient.fetch)
    save = blocking(FleetClient.save)
    cancel = blocking(FleetClient.cancel)
    delete = blocking(FleetClient.delete)
    file = blocking(FleetClient.file)
    files = blocking(FleetClient.files)
    delete_file = blocking(FleetClient.delete_file)
    retry = blocking(FleetClient.retry)
    pause = blocking(FleetClient.pause)
    resume = blocking(FleetClient.resume)
    set_priority = blocking(FleetClient.set_priority)
    stats = blocking(FleetClient.stats)
    capacity = blocking(FleetClient.capacity)
    pause_queue = blocking(FleetClient.pause_queue)
    resume_queue = blocking(FleetClient.resume_queue)
    dead_letter = blocking(FleetClient.dead_letter)
    retry_dead = blocking(FleetClient.retry_dead)
    purge_dead = blocking(FleetClient.purge_dead)
    services = blocking(FleetClient.services)
    workers = blocking(FleetClient.workers)
    worker = blocking(FleetClient.worker)
    drain_worker = blocking(FleetClient.drain_worker)
    drain_workers = blocking(FleetClient.drain_workers)
    pause_worker = blocking(FleetClient.pause_worker)
    pause_workers = blocking(FleetClient.pause_workers)
    resume_worker = blocking(FleetClient.resume_worker)
    resume_workers = blocking(FleetClient.resume_workers)
    refresh_worker = blocking(FleetClient.refresh_worker)
    remove_worker = blocking(FleetClient.remove_worker)
    blocks = blocking(FleetClient.blocks)
    lift_block = blocking(FleetClient.lift_block)
    create_key = blocking(FleetClient.create_key)
    keys = blocking(FleetClient.keys)
    audit = blocking(FleetClient.audit)
    rotate_key = blocking(FleetClient.rotate_key)
    revoke_key = blocking(FleetClient.revoke_key)
    invite = blocking(FleetClient.invite)
    invites = blocking(FleetClient.invites)
    uninvite = blocking(FleetClient.uninvite)
    enrol = blocking(FleetClient.enrol)
    create_webhook = blocking(FleetClient.create_webhook)
    webhooks = blocking(FleetClient.webhooks)
    change_webhook = blocking(FleetClient.change_webhook)
    test_webhook = blocking(FleetClient.test_webhook)
    delete_webhook = blocking(FleetClient.delete_webhook)
    rotate_webhook_secret = blocking(FleetClient.rotate_webhook_secret)
    deliveries = blocking(FleetClient.deliveries)
    resend_delivery = blocking(FleetClient.resend_delivery)
    create_tenant = blocking(FleetClient.create_tenant)
    tenants = blocking(FleetClient.tenants)
    tenant = blocking(FleetClient.tenant)
    change_tenant = blocking(FleetClient.change_tenant)
    suspend_tenant = blocking(FleetClient.suspend_tenant)
    resume_tenant = blocking(FleetClient.resume_tenant)
    move_tenant = blocking(FleetClient.move_tenant)
    delete_tenant = blocking(FleetClient.delete_tenant)
    balance = blocking(FleetClient.balance)
    statement = blocking(FleetClient.statement)
    differences = blocking(FleetClient.differences)
    reconcile = blocking(FleetClient.reconcile)
    grants = blocking(FleetClient.grants)
    grant_credits = blocking(FleetClient.grant_credits)
    confirm_grant = blocking(FleetClient.confirm_grant)
    void_grant = blocking(FleetClient.void_grant)
    adjust_credits = blocking(FleetClient.adjust_credits)
    usage = blocking(FleetClient.usage)
    receipt = blocking(FleetClient.receipt)
    health = blocking(FleetClient.health)
