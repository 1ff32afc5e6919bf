"""Helpers for the tests of the A1111 connector: quick settings, payloads, leased jobs, expected pictures."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import msgspec
from tests.worker._comfyui import Attempt, leased

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.job import JobResult
from comfyfleet.testing.fake_a1111 import (
    FakeA1111,
    FakeA1111Run,
    FakeA1111Settings,
    FakeSubject,
    drawn_pixels,
    pixels_of,
)
from comfyfleet.worker.connectors.a1111 import A1111, A1111Settings

TRACES = Path(__file__).parents[1] / "data" / "a1111_traces"

QUICK = A1111Settings(
    request_s=5.0,
    connect_s=2.0,
    poll_s=0.02,
    settle_s=0.1,
    refused_s=0.2,
    unresponsive_s=2.0,
    accept_s=30.0,
    cancel_s=30.0,
    stop_s=2.0,
    close_s=0.1,
    occupied_s=0.5,
    min_free_bytes=0,
)
FAST = FakeA1111Settings(step_seconds=0.01, load_seconds=0.01, extras_seconds=0.01)
LONG: dict[str, Any] = {"steps": 100_000}
"""A run that only ends when it is stopped."""


def tuned(**changes: Any) -> A1111Settings:
    return msgspec.structs.replace(QUICK, **changes)


def payload(route: str = "txt2img", **body: Any) -> dict[str, Any]:
    if route in ("txt2img", "img2img"):
        body = {"prompt": "a lighthouse", "seed": 7, "steps": 3, "sampler_name": "Euler", **body}
    return {"route": route, "body": body}


def job_of(route: str = "txt2img", **body: Any) -> LeasedJob:
    return leased(payload(route, **body))


def attempt(connector: A1111, job: LeasedJob) -> Attempt:
    return Attempt(cast(Any, connector), job)


def subject(
    job: LeasedJob, number: int = 0, model: str = "base", sources: tuple[bytes, ...] = ()
) -> FakeSubject:
    """What picture `number` of the job shows."""
    body = job.workflow["body"]
    return FakeSubject(
        route=job.workflow["route"],
        prompt=body["prompt"],
        negative_prompt=body.get("negative_prompt", ""),
        seed=body["seed"] + number,
        model=model,
        sampler=body["sampler_name"],
        steps=body["steps"],
        width=body.get("width", 512),
        height=body.get("height", 512),
        sources=tuple(sha256(each).hexdigest() for each in sources),
    )


async def saved(connector: A1111, result: JobResult, folder: Path) -> list[bytes]:
    """The content of every file of the result."""
    found = []
    for number, file in enumerate(result.files):
        path = folder / f"{number}"
        size = await connector.save(file, path)
        found.append(path.read_bytes())
        assert size == len(found[-1])
        assert await connector.fetch(file) == found[-1]
    return found


async def check_made_from(
    job: LeasedJob, connector: A1111, result: JobResult, folder: Path, **more: Any
) -> None:
    """The only picture of the result was made from this job's payload."""
    (content,) = await saved(connector, result, folder)
    assert pixels_of(content) == drawn_pixels(subject(job, **more))


def picture(color: int = 9) -> bytes:
    """A small real picture."""
    from comfyfleet.testing.fake_a1111.pictures import draw_subject

    return draw_subject(FakeSubject(prompt=f"input {color}"), "", "png", 8)


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


@asynccontextmanager
async def server_and_connector(
    settings: A1111Settings = QUICK, **fake_settings: Any
) -> AsyncIterator[tuple[FakeA1111, A1111]]:
    fake_settings = {
        **{name: getattr(FAST, name) for name in ("step_seconds", "load_seconds", "extras_seconds")},
        **fake_settings,
    }
    async with FakeA1111(FakeA1111Settings(**fake_settings)) as fake, A1111(fake.url, settings) as connector:
        yield fake, connector


async def ran(fake: FakeA1111, is_so: Callable[[FakeA1111Run], object], number: int = 0) -> FakeA1111Run:
    """Waits until run `number` of the server is as described."""
    async with asyncio.timeout(60):
        while len(fake.runs) <= number or not is_so(fake.runs[number]):
            await asyncio.sleep(0.002)
    return fake.runs[number]


def recorded(name: str, to: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Recorded requests that begin so, each with its answer."""
    (path,) = TRACES.glob(f"{name}*.jsonl")
    sent: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["dir"] == "send":
            sent.append(event)
        elif event["dir"] == "recv" and event["for"].startswith(to):
            label = event["for"]
            request = next(each for each in sent if f"{each['method']} {each['path']}" == label)
            sent.remove(request)
            yield request, event
