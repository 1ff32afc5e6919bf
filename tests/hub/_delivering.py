"""Jobs whose facts are delivered, and what became of the deliveries: for tests of webhooks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.hub._hub import HubRig
from tests.hub._watching import complete, lease

from comfyfleet.model.access import Role
from comfyfleet.net.url_guard import AllowedHosts, UrlGuard
from comfyfleet.policy.rules import Rules

QUICK = Rules(round_s=0.05, delivery_base_s=0.02, delivery_tries=3, max_attempts=1)


def guard(limit_s: float = 5.0) -> UrlGuard:
    return UrlGuard(AllowedHosts(["127.0.0.0/8"]), limit_s=limit_s)


async def run_one(rig: HubRig, **fields: Any) -> str:
    job_id = await rig.submit(**fields)
    await complete(rig, await lease(rig, poll_id=job_id))
    return job_id


async def deliveries(rig: HubRig, job_id: str, role: Role = Role.ADMIN) -> list[dict[str, Any]]:
    answer = await rig.get(f"/api/jobs/{job_id}/deliveries", role=role)
    assert answer.status == 200, answer.content
    found: list[dict[str, Any]] = answer.body["deliveries"]
    return found


async def settled(rig: HubRig, job_id: str, status: str) -> dict[str, Any]:
    """The only delivery of a job, once it has that status."""
    async with asyncio.timeout(60):
        while True:
            found = await deliveries(rig, job_id)
            if [each["status"] for each in found] == [status]:
                return found[0]
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)
