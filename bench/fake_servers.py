"""Fake ComfyUI servers in a process of their own, with the times of real cards.

    python -m bench.fake_servers <count>

Prints one line of JSON, the addresses, when all of them answer, and ends when its input does. Checkpoints of SDXL and
of Stable Diffusion 1.5 load in 2.8 s and 1.2 s and make a picture in about 0.95 s and 0.5 s, as on a real card with the
files in the page cache of its machine. Each server keeps what its last prompt used: ComfyUI's default.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from bench._report import ROOT
from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings

WEIGHTS = {
    "sdxl-1.safetensors": 30,
    "sdxl-2.safetensors": 20,
    "sdxl-3.safetensors": 12,
    "sdxl-4.safetensors": 8,
    "sd15-1.safetensors": 20,
    "sd15-2.safetensors": 7,
    "sd15-3.safetensors": 3,
}
"""How often each of seven checkpoints is asked for."""
_GB = {"sdxl": 6.9, "sd15": 2.1}
# Edge and steps: with the decoding and the text, 0.95 s and 0.51 s.
_PICTURE = {"sdxl": (1024, 8), "sd15": (768, 5)}
_STEP_S = 0.0389


class Wanted(msgspec.Struct, frozen=True):
    """What a picture is to be made from."""

    checkpoint: str
    seed: int
    text: str

    def workflow(self) -> dict[str, Any]:
        edge, steps = _PICTURE[self.checkpoint.partition("-")[0]]
        sampler = {
            "seed": self.seed,
            "steps": steps,
            "cfg": 7.0,
            "sampler_name": "euler",
            "scheduler": "normal",
            "denoise": 1.0,
            "model": ["1", 0],
            "positive": ["3", 0],
            "negative": ["4", 0],
            "latent_image": ["2", 0],
        }
        return {
            "1": _node("CheckpointLoaderSimple", ckpt_name=self.checkpoint),
            "2": _node("EmptyLatentImage", width=edge, height=edge, batch_size=1),
            "3": _node("CLIPTextEncode", text=self.text, clip=["1", 1]),
            "4": _node("CLIPTextEncode", text="blurry", clip=["1", 1]),
            "5": _node("KSampler", **sampler),
            "6": _node("VAEDecode", samples=["5", 0], vae=["1", 2]),
            "7": _node("SaveImage", images=["6", 0], filename_prefix="picture"),
        }


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def made_from(graph: dict[str, Any]) -> Wanted:
    """What the graph in a picture says."""
    inputs = {node_id: node["inputs"] for node_id, node in graph.items()}
    return Wanted(inputs["1"]["ckpt_name"], inputs["5"]["seed"], inputs["3"]["text"])


def wanted(count: int, seed: int) -> list[Wanted]:
    """Pictures of checkpoints drawn by their weights."""
    drawn = random.Random(seed).choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [Wanted(name, 1000 * seed + number, f"picture {number}") for number, name in enumerate(drawn)]


def settings_of(number: int) -> FakeSettings:
    """The fake server of this number."""
    return FakeSettings(
        name=f"server-{number}",
        seed=number,
        vram_gb=12.0,
        models={"checkpoints": {name: _GB[name.partition("-")[0]] for name in WEIGHTS}},
        load_seconds=0.5,
        load_seconds_per_gb=1 / 3,
        transfer_seconds_per_gb=0.0,
        step_seconds=_STEP_S,
        picture_edge_max=64,
    )


@asynccontextmanager
async def fake_servers(count: int) -> AsyncIterator[list[str]]:
    """The addresses of fresh servers, which are cold."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.fake_servers", str(count)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        line = await child.stdout.readline()
        if not line:
            raise SystemExit("the process of the fake servers ended before they answered")
        yield msgspec.json.decode(line, type=list[str])
    finally:
        child.stdin.close()
        await child.wait()


async def _serve(count: int) -> None:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(FakeComfyUI(settings_of(number))) for number in range(count)
        ]
        print(msgspec.json.encode([server.url for server in servers]).decode(), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
