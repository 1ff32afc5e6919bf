"""The tenant's side of the file: jobs with payload and result, read when asked for; in memory are the last to come."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.stores.sqlite.reading import Disk, closed


class SqliteRecords:
    def __init__(
        self,
        disk: Disk,
        find: Callable[[TenantId, str], JobId | None],
        wait: Callable[[JobId | None], Awaitable[None]],
        at_hand: Callable[[JobId], Job | None],
    ) -> None:
        self._disk = disk
        self._find = find
        self._wait = wait
        """Until what is being written of a job (None: of any) is on the disk."""
        self._at_hand = at_hand
        """A job that need not be read from the file."""
        self._lists = Disk()
        """Read by one thread of its own: a page of jobs has whole payloads in it, and nobody waits for them."""
        self._thread: ThreadPoolExecutor | None = None

    def open(self, database: sqlite3.Connection) -> None:
        self._lists.open(database)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lists")

    def close(self) -> None:
        """Waits for what is being read."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        self._lists.close()

    async def get(self, job_id: JobId) -> Job | None:
        await self._wait(job_id)
        return self._at_hand(job_id) or self._disk.job(job_id)

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        job_id = self._find(tenant, reference)
        return None if job_id is None else await self.get(job_id)

    async def listing(
        self,
        *,
        tenant: TenantId | None,
        phase: Phase | None,
        limit: int,
        after: JobId | None,
        newest_first: bool = False,
    ) -> list[Job]:
        await self._wait(None)
        if self._thread is None:
            raise closed()
        read = partial(self._lists.listing, tenant, phase, limit, after, newest_first=newest_first)
        return await asyncio.get_running_loop().run_in_executor(self._thread, read)
