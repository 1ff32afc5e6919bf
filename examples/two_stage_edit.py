"""A long run in two stages: pictures are generated on some servers and edited on others.

Generation goes to its servers by an affinity of the workflow, editing by an option of each job; editing has the higher
priority, so that pictures are finished before new ones are begun. Set by environment variables:

    TWO_STAGE_HOSTS           comma-separated ComfyUI servers   (three fake servers)
    TWO_STAGE_RUNTIME_MS      how long it goes on               (21600000: six hours)
    TWO_STAGE_MIN_DELAY_MS    least pause before a picture      (0)
    TWO_STAGE_MAX_DELAY_MS    greatest pause before a picture   (0)
    TWO_STAGE_CONCURRENCY     pictures that are made at a time  (2)
    TWO_STAGE_SEED_STRATEGY   random, auto (the pool draws) or fixed   (random)

Statistics of every server are printed now and then, at the end, and after Ctrl-C.
"""

import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from comfyfleet import Affinity, JobFailed, PoolEvent, Refusal, Server, WorkflowPool, attach, hash_workflow

SEED_STRATEGIES = ("random", "auto", "fixed")
FIXED_SEED = 20_240_501
EDIT_PRIORITY = 5
STATISTICS_EVERY_S = 60.0
LAST_JOBS_S = 60.0
"""After the runtime nothing new is begun, and what was begun gets this long to end."""


class Settings(msgspec.Struct, frozen=True):
    hosts: tuple[str, ...]
    runtime_s: float
    min_delay_s: float
    max_delay_s: float
    concurrency: int
    seed_strategy: str


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Raises `ValueError` with the name of the variable and what it may be."""

    def number(name: str, default: int, least: int) -> int:
        text = environment.get(name, "").strip()
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {text!r}")
        return int(text)

    min_delay_ms = number("TWO_STAGE_MIN_DELAY_MS", 0, 0)
    max_delay_ms = number("TWO_STAGE_MAX_DELAY_MS", min_delay_ms, 0)
    if max_delay_ms < min_delay_ms:
        raise ValueError(
            f"TWO_STAGE_MAX_DELAY_MS ({max_delay_ms}) must not be less than TWO_STAGE_MIN_DELAY_MS ({min_delay_ms})"
        )
    strategy = environment.get("TWO_STAGE_SEED_STRATEGY", "").strip() or "random"
    if strategy not in SEED_STRATEGIES:
        raise ValueError(f"TWO_STAGE_SEED_STRATEGY must be random, auto or fixed, not {strategy!r}")
    hosts = [host.strip() for host in environment.get("TWO_STAGE_HOSTS", "").split(",")]
    return Settings(
        hosts=tuple(dict.fromkeys(host for host in hosts if host)),
        runtime_s=number("TWO_STAGE_RUNTIME_MS", 6 * 3600 * 1000, 1) / 1000,
        min_delay_s=min_delay_ms / 1000,
        max_delay_s=max_delay_ms / 1000,
        concurrency=number("TWO_STAGE_CONCURRENCY", 2, 1),
        seed_strategy=strategy,
    )


def generation(checkpoint: str, text: str, seed: int) -> dict[str, Any]:
    return {
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 512, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": text, "clip": ["4", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurry", "clip": ["4", 1]}},
        "3": {
            "class_type": "KSampler",
            "inputs": {
                "seed": seed,
                "steps": 20,
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
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "two-stage"}},
    }


def edit(checkpoint: str, text: str, seed: int) -> dict[str, Any]:
    """As generation, but it begins with the picture that is attached to node 10."""
    graph = generation(checkpoint, text, seed)
    del graph["5"]
    graph["10"] = {"class_type": "LoadImage", "inputs": {"image": ""}}
    graph["11"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["10", 0], "vae": ["4", 2]}}
    graph["3"]["inputs"] |= {"latent_image": ["11", 0], "denoise": 0.6}
    return graph


async def find_checkpoint(hosts: tuple[str, ...]) -> str:
    """A checkpoint that all servers have, so that the run needs no setting for it. One that is down is not asked."""
    common: set[str] | None = None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as session:
        for host in hosts:
            url = host if "://" in host else f"http://{host}"
            try:
                async with session.get(f"{url.rstrip('/')}/object_info/CheckpointLoaderSimple") as response:
                    response.raise_for_status()
                    info = await response.json()
                declared = info["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"]
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
                print(f"{host} does not answer as a ComfyUI server does: {error}", file=sys.stderr)
                continue
            # Newer releases print a list of choices as ["COMBO", {"options": [...]}].
            names = declared[0] if isinstance(declared[0], list) else declared[1]["options"]
            common = set(names) if common is None else common & set(names)
    if common is None:
        raise ValueError(
            "no server of TWO_STAGE_HOSTS answers: are they running, and are the addresses right?"
        )
    if not common:
        raise ValueError(
            "the servers of TWO_STAGE_HOSTS have no checkpoint in common: install one on all of them"
        )
    return min(common)


class Simulation:
    def __init__(
        self, settings: Settings, pool: WorkflowPool, checkpoint: str, editors: tuple[str, ...]
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.checkpoint = checkpoint
        self.editors = editors
        self.ended: Counter[str] = Counter()
        self.began_at = time.monotonic()

    def seed(self) -> int:
        match self.settings.seed_strategy:
            case "fixed":
                return FIXED_SEED
            case "auto":
                return -1
            case _:
                return random.getrandbits(48)

    async def run(self) -> None:
        deadline = self.began_at + self.settings.runtime_s
        telling = asyncio.create_task(self.tell_now_and_then())
        try:
            async with asyncio.timeout(self.settings.runtime_s + LAST_JOBS_S), asyncio.TaskGroup() as group:
                for _ in range(self.settings.concurrency):
                    group.create_task(self.make_pictures(deadline))
        except TimeoutError:
            print("some jobs did not end in time and are cancelled", file=sys.stderr)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            await self.print_statistics()

    async def make_pictures(self, deadline: float) -> None:
        number = 0
        while time.monotonic() < deadline:
            pause_s = random.uniform(self.settings.min_delay_s, self.settings.max_delay_s)
            await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            number += 1
            try:
                picture = await self.generate(f"landscape {number}")
                await self.edit(f"landscape {number}, oil painting", picture)
            except JobFailed as failed:
                print(failed, file=sys.stderr)

    async def generate(self, text: str) -> bytes:
        """Goes to the generating servers by the affinity that the pool has for this workflow."""
        job_id = await self.pool.enqueue(
            generation(self.checkpoint, text, self.seed()), metadata={"stage": "generation"}
        )
        with self.counted("generation"):
            result = await self.pool.wait(job_id)
        return await self.pool.fetch(result.files[0])

    async def edit(self, text: str, picture: bytes) -> None:
        """Goes to the editing servers because this job says so."""
        job_id = await self.pool.enqueue(
            edit(self.checkpoint, text, self.seed()),
            priority=EDIT_PRIORITY,
            metadata={"stage": "edit"},
            preferred_client_ids=self.editors,
            attachments=[attach(picture, "10", "image", "generated.png")],
        )
        with self.counted("edit"):
            await self.pool.wait(job_id)

    @contextlib.contextmanager
    def counted(self, stage: str) -> Any:
        try:
            yield
        except JobFailed:
            self.ended[f"{stage} failed"] += 1
            raise
        self.ended[f"{stage} completed"] += 1

    async def tell_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(min(STATISTICS_EVERY_S, self.settings.runtime_s / 2))
            await self.print_statistics()

    async def print_statistics(self) -> None:
        stats = await self.pool.stats()
        print(
            f"\nafter {time.monotonic() - self.began_at:.1f} s: {stats.queued} waiting, {stats.running} running"
        )
        for stage in ("generation", "edit"):
            completed, failed = self.ended[f"{stage} completed"], self.ended[f"{stage} failed"]
            print(f"  {stage}: {completed} completed, {failed} failed")
        print(
            f"  {'server':<24}{'stage':<12}{'jobs':>6}{'success':>9}{'failure':>9}{'used':>7}{'disconnects':>13}"
        )
        for server in stats.servers:
            success, failure = "–", "–"
            if server.success_rate is not None:
                success, failure = f"{server.success_rate:.0%}", f"{1 - server.success_rate:.0%}"
            print(
                f"  {server.id:<24}{self.stage_of(server.id):<12}{server.completed + server.failed:>6}"
                f"{success:>9}{failure:>9}{server.utilisation:>7.0%}{server.disconnects:>13}",
                flush=True,
            )

    def stage_of(self, server_id: str) -> str:
        if server_id not in self.editors:
            return "generation"
        return "both" if len(self.editors) == 1 and len(self.settings.hosts) == 1 else "edit"


def print_state(event: PoolEvent) -> None:
    if event.state not in ("draining", "stopped"):
        print(f"{event.client_id} is {event.state} {event.message}")


async def simulate(settings: Settings) -> None:
    """The first half of the servers generates, the others edit; a single one does both."""
    checkpoint = await find_checkpoint(settings.hosts)
    servers = [Server(host, id=f"server{number}") for number, host in enumerate(settings.hosts, 1)]
    names = [str(server.id) for server in servers]
    half = max(1, len(names) // 2)
    generators, editors = tuple(names[:half]), tuple(names[half:] or names)
    affinity = Affinity(hash_workflow(generation(checkpoint, "", 0)), preferred_client_ids=generators)
    async with WorkflowPool(servers, workflow_affinities=[affinity]) as pool:
        pool.on("client:state", print_state)
        pool.on(
            "client:blocked_workflow", lambda event: print(f"{event.client_id} is blocked: {event.reason}")
        )
        for server in servers:
            # An address may hold a password.
            print(f"{server.id} is {str(server.url).rpartition('@')[2]}")
        await Simulation(settings, pool, checkpoint, editors).run()


async def main(settings: Settings) -> None:
    if settings.hosts:
        await simulate(settings)
        return
    from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings

    async with contextlib.AsyncExitStack() as stack:
        hosts = []
        models = {"checkpoints": {"sd15.safetensors": 2.0}}
        for seed in range(3):
            fake = FakeComfyUI(FakeSettings(models=models, time_scale=0.5, speed=1.0 + seed / 2, seed=seed))
            hosts.append((await stack.enter_async_context(fake)).url)
        await simulate(msgspec.structs.replace(settings, hosts=tuple(hosts)))


if __name__ == "__main__":
    try:
        asyncio.run(main(read_settings(os.environ)))
    except (ValueError, Refusal) as problem:
        sys.exit(f"two_stage_edit: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
