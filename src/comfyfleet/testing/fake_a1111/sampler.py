"""Runs one request of the fake A1111 server: loads the checkpoint, counts steps, draws the pictures.

What a request asks for was checked by `generation.py`. The errors are those of the real server, as exceptions with a
name and a text.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

from comfyfleet.testing.fake_a1111.faults import A1111Faults
from comfyfleet.testing.fake_a1111.pictures import FakeSubject, draw_subject, infotext
from comfyfleet.testing.fake_a1111.settings import VERSIONS, FakeA1111Settings, FakeCheckpoint
from comfyfleet.testing.fake_a1111.tasks import FakeA1111Run, FakeProcess
from comfyfleet.testing.fake_comfyui.clock import FakeClock

MEMORY_TEXT = (
    "CUDA out of memory. Tried to allocate 4.50 GiB. "
    "GPU 0 has a total capacity of 7.79 GiB of which 1.20 GiB is free."
)
KNOWN_OPTIONS = frozenset(
    {
        "sd_model_checkpoint",
        "sd_vae",
        "CLIP_stop_at_last_layers",
        "eta_noise_seed_delta",
        "samples_format",
        "forge_additional_modules",
    }
)


class RunError(Exception):
    """An exception inside a run: its class name and its text, which become a status 500."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name
        self.text = text


class FakeSampler:
    def __init__(
        self,
        settings: FakeA1111Settings,
        faults: A1111Faults,
        clock: FakeClock,
        process: FakeProcess,
        chance: random.Random,
        crash: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._faults = faults
        self._clock = clock
        self._process = process
        self._chance = chance
        self._crash = crash

    async def sample(self, run: FakeA1111Run, sources: tuple[str, ...]) -> dict[str, Any]:
        """The answer to the request. The caller holds the lock and has begun the state."""
        body, flags = run.body, self._process.flags
        self._raise_as_told(str(body.get("prompt") or ""))
        override = body.get("override_settings") or {}
        for name in override:
            if name not in KNOWN_OPTIONS:
                raise RunError("KeyError", repr(name))
        checkpoint = await self._load(override.get("sd_model_checkpoint"))
        run.model = checkpoint.short_name if checkpoint is not None else ""
        rounds, batch = int(body["n_iter"]), int(body["batch_size"])
        steps = int(body["steps"])
        flags.job_count = rounds
        first_seed = int(body.get("seed") or 0)
        if first_seed == -1:
            first_seed = self._chance.randrange(2**32 - 1)
        seeds: list[int] = []
        pictures: list[bytes] = []
        texts: list[str] = []
        for number in range(rounds):
            if flags.interrupted or flags.stopping_generation:
                break
            flags.sampling_steps = steps
            done = await self._count_steps(run, steps)
            for index in range(batch):
                seed = first_seed + number * batch + index
                subject = FakeSubject(
                    route=run.route,
                    prompt=str(body.get("prompt") or ""),
                    negative_prompt=str(body.get("negative_prompt") or ""),
                    seed=seed,
                    model=run.model,
                    sampler=str(body.get("sampler_name") or body.get("sampler_index") or "Euler"),
                    steps=steps,
                    width=int(body["width"]),
                    height=int(body["height"]),
                    sources=sources,
                    steps_done=None if done == steps else done,
                )
                texts.append(infotext(subject, self.version, checkpoint.hash if checkpoint else ""))
                pictures.append(self._drawn(subject, texts[-1]))
                seeds.append(seed)
            flags.next_job()
        run.outcome = "interrupted" if flags.interrupted else "completed"
        pictures = pictures[: max(0, len(pictures) - self._faults.drop_pictures)]
        texts = texts[: len(pictures)]
        first = 0
        if self._settings.returns_grid and len(pictures) > 1:
            pictures.insert(0, pictures[0])
            texts.insert(0, texts[0])
            first = 1
        if "controlnet" in {name.lower() for name in body.get("alwayson_scripts") or {}}:
            pictures.append(draw_subject(FakeSubject(prompt="map"), "", "png", 8))
        return {
            "images": [base64.b64encode(picture).decode() for picture in pictures]
            if body.get("send_images", True)
            else [],
            "parameters": {name: value for name, value in body.items() if value is not None},
            "info": json.dumps(self._info(run, checkpoint, seeds, texts, first)),
        }

    @property
    def version(self) -> str:
        return VERSIONS[self._settings.flavour]

    async def upscale(self, route: str, sources: list[bytes], body: dict[str, Any]) -> dict[str, Any]:
        for field in ("upscaler_1", "upscaler_2"):
            name = body.get(field)
            if name and name not in self._settings.upscalers:
                raise RunError("AssertionError", f"could not find upscaler named {name}")
        self._raise_as_told("")
        await self._clock.sleep(self._settings.extras_seconds)
        drawn = [
            base64.b64encode(
                self._drawn(FakeSubject(route=route, sources=(digest(source),), model=""), "")
            ).decode()
            for source in sources
        ]
        if route == "extra-single-image":
            return {"html_info": "<p>done</p>", "image": drawn[0]}
        return {"html_info": "<p>done</p>", "images": drawn}

    def _drawn(self, subject: FakeSubject, text: str) -> bytes:
        return draw_subject(subject, text, self._settings.image_format, self._settings.longest_edge)

    def _raise_as_told(self, prompt: str) -> None:
        faults = self._faults
        if faults.out_of_memory > 0 or prompt == "oom":
            faults.out_of_memory = max(0, faults.out_of_memory - 1)
            raise RunError("OutOfMemoryError", MEMORY_TEXT)
        if faults.fail_runs > 0 or prompt == "raise":
            faults.fail_runs = max(0, faults.fail_runs - 1)
            raise RunError("ValueError", "something inside broke")

    async def _load(self, wanted: Any) -> FakeCheckpoint | None:
        process = self._process
        missing = self._faults.missing_checkpoints
        known = [each for each in self._settings.checkpoints if each.file not in missing]
        found = next((each for each in known if wanted in each.aliases), None)
        if found is None or self._faults.loads_wrong_model:
            # As the real server: a name that is not there is ignored, and the checkpoint of the options is used.
            found = next((each for each in known if each.title == process.option), None)
        if found is not None and process.loaded != found.title:
            await self._clock.sleep(self._settings.load_seconds)
            process.loaded = found.title
        return found

    async def _count_steps(self, run: FakeA1111Run, steps: int) -> int:
        flags, faults, process = self._process.flags, self._faults, self._process
        for step in range(steps):
            while faults.stall_at_step == step and not self._is_interrupted():
                process.changed.clear()
                await process.changed.wait()
            if faults.crash_at_step == step:
                faults.crash_at_step = None
                await self._crash()
            if self._is_interrupted() or flags.skipped:
                return step
            await self._clock.sleep(self._settings.step_seconds)
            flags.sampling_step = step + 1
            run.steps_done += 1
            if flags.preview is None or step % 5 == 4:
                flags.preview_id += 1
                flags.preview = draw_subject(FakeSubject(prompt=f"preview {step}"), "", "png", 8)
        return steps

    def _is_interrupted(self) -> bool:
        return self._process.flags.interrupted and not self._faults.ignores_interrupts

    def _info(
        self,
        run: FakeA1111Run,
        checkpoint: FakeCheckpoint | None,
        seeds: list[int],
        texts: list[str],
        first: int,
    ) -> dict[str, Any]:
        body = run.body
        return {
            "prompt": body.get("prompt") or "",
            "all_prompts": [body.get("prompt") or ""] * max(1, len(seeds)),
            "negative_prompt": body.get("negative_prompt") or "",
            "seed": seeds[0] if seeds else -1,
            "all_seeds": seeds,
            "subseed": body.get("subseed"),
            "all_subseeds": [body.get("subseed")] * len(seeds),
            "width": body["width"],
            "height": body["height"],
            "sampler_name": body.get("sampler_name") or body.get("sampler_index") or "Euler",
            "cfg_scale": body.get("cfg_scale"),
            "steps": body["steps"],
            "batch_size": body["batch_size"],
            "sd_model_name": checkpoint.short_name if checkpoint else "",
            "sd_model_hash": checkpoint.hash if checkpoint else "",
            "index_of_first_image": first,
            "infotexts": texts,
            "job_timestamp": self._process.flags.job_timestamp,
            "version": self.version,
        }


def digest(source: bytes) -> str:
    return sha256(source).hexdigest()
