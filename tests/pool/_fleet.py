"""Fake servers and a pool in front of them, quick enough for tests, with everything the pool told."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from comfyfleet import PoolEvent, Rules, WorkflowPool
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings
from comfyfleet.worker.connectors.comfyui import ComfyUISettings
from comfyfleet.worker.settings import AgentSettings

QUICK_COMFYUI = ComfyUISettings(
    poll_s=0.2,
    settle_s=0.05,
    refused_s=0.3,
    unreachable_s=0.5,
    reconnect_min_s=0.02,
    reconnect_max_s=0.1,
    idle_queue_s=0.6,
    cancel_interval_s=0.02,
    stop_s=0.3,
    quiet_s=0.5,
    end_news_s=0.1,
)
# On a busy machine a check of health takes its time, and a server that counts as away is not waited for. One that is
# gone refuses connections, which is noticed at once.
QUICK_AGENT = AgentSettings(
    backoff_base_s=0.02, backoff_cap_s=0.1, missed_checks=1, health_timeout_s=30, inventory_interval_s=60
)
QUICK_RULES = Rules(retry_base_s=0.02, retry_cap_s=0.05)


def text_to_image(model: str = "sd15.safetensors", *, steps: int = 4, text: str = "a cat") -> dict[str, Any]:
    return {
        "3": {
            "class_type": "KSampler",
            "inputs": {
                "seed": -1,
                "steps": steps,
                "cfg": 7.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
                "model": ["4", 0],
                "positive": ["6", 0],
                "negative": ["7", 0],
                "latent_image": ["5", 0],
            },
        },
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": model}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": text, "clip": ["4", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["4", 1]}},
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "cat"}},
    }


def invert(filename: str = "picture.png") -> dict[str, Any]:
    return {
        "1": {"class_type": "LoadImage", "inputs": {"image": filename}},
        "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "inverted"}},
    }


class Told:
    """Every event of a pool, and a way to wait for one."""

    def __init__(self, pool: WorkflowPool) -> None:
        self.events: list[PoolEvent] = []
        self._changed = asyncio.Event()
        pool.on("*", self._hear)

    def _hear(self, event: PoolEvent) -> None:
        self.events.append(event)
        self._changed.set()

    def of(self, name: str, job_id: str | None = None) -> list[PoolEvent]:
        return [event for event in self.events if event.name == name and job_id in (None, event.job_id)]

    def names(self, job_id: str) -> list[str]:
        return [event.name for event in self.events if event.job_id == job_id]

    async def until(
        self, name: str, job_id: str | None = None, *, count: int = 1, within_s: float = 90
    ) -> PoolEvent:
        async with asyncio.timeout(within_s):
            while len(found := self.of(name, job_id)) < count:
                self._changed.clear()
                await self._changed.wait()
        return found[count - 1]


async def eventually(condition: Callable[[], bool], within_s: float = 60) -> None:
    """For what no event tells of: a fake server's own state."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


class Fleet:
    def __init__(self, pool: WorkflowPool, servers: list[FakeComfyUI], told: Told) -> None:
        self.pool = pool
        self.servers = servers
        self.told = told

    def id_of(self, number: int) -> str:
        return f"127.0.0.1:{self.servers[number].port}"

    def starts(self) -> list[int]:
        return [sum(server.stats.prompts_run.values()) for server in self.servers]


@asynccontextmanager
async def fleet(
    *settings: FakeSettings, comfyui: ComfyUISettings = QUICK_COMFYUI, **options: Any
) -> AsyncIterator[Fleet]:
    """As many fakes as settings (one plain one without any), and a pool on all of them."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(FakeComfyUI(each))
            for each in settings or (FakeSettings(time_scale=0.02),)
        ]
        options = {
            "health_check_interval": 0.1,
            "reconnection_grace": 0.05,
            "cooldown": 0.4,
            "rules": QUICK_RULES,
            "agent": QUICK_AGENT,
            **copy.copy(options),
        }
        pool = WorkflowPool([server.url for server in servers], comfyui=comfyui, **options)
        told = Told(pool)
        await stack.enter_async_context(pool)
        yield Fleet(pool, servers, told)


def quick(**changes: Any) -> FakeSettings:
    return msgspec.structs.replace(FakeSettings(time_scale=0.02), **changes)
