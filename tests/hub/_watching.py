"""Somebody who watches a stream with plain HTTP, and a worker that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from tests.hub._hub import HubRig

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, LeasedJob, Poll, ProgressReport, RegisterWorker
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service

GPU = WorkerId("gpu-a")


class Seen(msgspec.Struct, frozen=True):
    kind: str
    data: Any
    id: int | None = None


class Stream:
    """Events as they come; comments are counted."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.seen: list[Seen] = []
        self.comments = 0
        self.is_over = False

    @property
    def facts(self) -> list[Seen]:
        return [each for each in self.seen if each.id is not None]

    async def next(self) -> Seen | None:
        """The next event; None when the stream has ended."""
        fields: dict[str, str] = {}
        while line := await self.response.content.readline():
            text = line.decode().rstrip("\n")
            if text.startswith(":"):
                self.comments += 1
            elif text:
                name, _, value = text.partition(": ")
                fields[name] = value
            elif "data" in fields:
                number = int(fields["id"]) if "id" in fields else None
                self.seen.append(Seen(fields["event"], msgspec.json.decode(fields["data"]), number))
                return self.seen[-1]
        self.is_over = True
        return None

    async def until(self, kind: str) -> Seen:
        async with asyncio.timeout(60):
            while (seen := await self.next()) is not None:
                if seen.kind == kind:
                    return seen
        raise AssertionError(f"the stream ended without {kind}: {[each.kind for each in self.seen]}")

    async def rest(self) -> list[Seen]:
        async with asyncio.timeout(60):
            while await self.next() is not None:
                pass
        return self.seen


@asynccontextmanager
async def watching(
    rig: HubRig, path: str, *, after: int | None = None, role: Role = Role.ADMIN, **headers: str
) -> AsyncIterator[Stream]:
    sent = {"authorization": f"Bearer {rig.keys[role]}", **headers}
    if after is not None:
        sent["last-event-id"] = str(after)
    async with rig.session.get(rig.url + path, headers=sent) as response:
        assert response.status == 200, await response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response)


async def register(rig: HubRig, worker_id: WorkerId = GPU) -> None:
    await rig.engine.register(RegisterWorker(worker_id, Capabilities((Service("comfyui"),))))


async def lease(rig: HubRig, worker_id: WorkerId = GPU, poll_id: str = "1") -> LeasedJob:
    leased = await rig.engine.poll(Poll(worker_id, PollId(poll_id), 5))
    assert leased is not None
    await rig.engine.heartbeat(worker_id, [leased.ref])
    return leased


async def report(
    rig: HubRig,
    job: LeasedJob,
    kind: ProgressKind = ProgressKind.PROGRESS,
    image: bytes | None = None,
    **data: Any,
) -> None:
    await rig.engine.progress([ProgressReport(job.ref, kind, data, image)])


async def complete(rig: HubRig, job: LeasedJob, seconds: float = 0.0) -> None:
    await rig.engine.complete(Completion(job.ref, JobResult(outputs={"2": {"images": []}}), seconds))
