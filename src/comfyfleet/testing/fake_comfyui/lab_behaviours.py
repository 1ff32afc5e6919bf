"""What the test node classes do: be slow, block, fail and report odd things.

Companion of `lab_nodes`; the texts are those of the recorded conversations.
"""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from pathlib import Path
from typing import Any

from comfyfleet.testing.fake_comfyui import pictures
from comfyfleet.testing.fake_comfyui.behaviours import Behaviour
from comfyfleet.testing.fake_comfyui.errors import Interrupted, NodeError, OutOfMemory
from comfyfleet.testing.fake_comfyui.run import NodeCall, NodeResult
from comfyfleet.testing.fake_comfyui.values import Blocker, FakeImage

_PIECE = 1 << 20
_FAILURES: dict[str, tuple[str, str]] = {
    "ValueError": ("ValueError", "lab: bad value"),
    "MemoryError": ("MemoryError", "lab: host memory"),
    "FileNotFoundError": (
        "FileNotFoundError",
        "lab: Model in folder 'checkpoints' with filename 'x.safetensors' not found.",
    ),
    "RuntimeError": ("RuntimeError", "lab: CUDA error: an illegal memory access was encountered"),
}


def _picture(call: NodeCall) -> NodeResult:
    return NodeResult(values=(FakeImage(width=64, height=64, seed=int(call.inputs.get("seed", 0))),))


async def lab_picture(call: NodeCall) -> NodeResult:
    return _picture(call)


async def lab_slow(call: NodeCall) -> NodeResult:
    steps: int = call.inputs["steps"]
    for step in range(1, steps + 1):
        if step == steps // 2 + 1:
            await call.stall_if_switched_on()
        await call.sleep(call.inputs["step_seconds"])
        call.progress(step, steps, preview_seed=call.inputs["seed"] if call.inputs["preview"] else None)
    return _picture(call)


async def lab_block(call: NodeCall) -> NodeResult:
    await call.sleep(call.inputs["seconds"])
    return _picture(call)


async def lab_block_out(call: NodeCall) -> NodeResult:
    await call.sleep(call.inputs["seconds"])
    return NodeResult(ui={"text": ["slept"]})


async def lab_async(call: NodeCall) -> NodeResult:
    await call.sleep(call.inputs["seconds"])
    return _picture(call)


async def lab_fail(call: NodeCall) -> NodeResult:
    kind = call.inputs["kind"]
    if kind == "Interrupt":
        raise Interrupted
    if kind == "torch OOM":
        raise OutOfMemory("lab: Allocation on device")
    raise NodeError(*_FAILURES[kind])


async def lab_blocker(call: NodeCall) -> NodeResult:
    return NodeResult(values=(Blocker(call.inputs["message"]),))


async def lab_expand(call: NodeCall) -> NodeResult:
    slow, show = f"{call.node_id}.0.0.1", f"{call.node_id}.0.0.2"
    slow_inputs = {"steps": 2, "step_seconds": 0.05, "preview": False, "seed": call.inputs["seed"]}
    made = {
        slow: {"class_type": "LabSlow", "inputs": slow_inputs},
        show: {"class_type": "PreviewImage", "inputs": {"images": [slow, 0]}},
    }
    return NodeResult(values=([slow, 0],), expand=made)


async def lab_ui(call: NodeCall) -> NodeResult:
    kind = call.inputs["kind"]
    if kind == "progress text":
        call.text("working...")
    return NodeResult(ui=_shown(call, kind))


def _shown(call: NodeCall, kind: str) -> dict[str, Any]:
    match kind:
        case "gifs":
            folder = call.machine.disk.base / "output" / "v"
            folder.mkdir(parents=True, exist_ok=True)
            clip = FakeImage(width=64, height=64, batch=8, color=call.inputs["seed"])
            (folder / "clip_00001.mp4").write_bytes(pictures.mp4(clip, 8.0))
            saved = {"filename": "clip_00001.mp4", "subfolder": "v", "type": "output"}
            return {"gifs": [{**saved, "format": "video/h264-mp4", "frame_rate": 8.0}]}
        case "nested":
            return {"value": [{"a": [1, 2.5, None, True]}], "string": ["one"]}
        case "progress text":
            return {"text": ["done"]}
        case "nan":
            return {"value": [math.nan, math.inf]}
        case "bytes":
            # Bytes in a list cannot become JSON, which ends the server, as on a real one.
            return {"value": [b"not for JSON"]}
        case "big":
            return {"text": ["x" * call.inputs["size"]]}
        case _:
            return {}


async def lab_file(call: NodeCall) -> NodeResult:
    """A file of any size from the seed, or a copy of an uploaded one, without holding it in memory."""
    place = call.machine.disk.save_place("output", call.inputs["filename_prefix"])
    if place is None:
        raise NodeError("Exception", "lab: saving outside the output folder")
    path = place.folder / f"{place.name}_{place.counter:05}_.bin"
    given = call.inputs.get("file", "")
    source = call.machine.disk.find_input(given) if given else None
    if given and source is None:
        raise NodeError("FileNotFoundError", f"lab: no input {given}")
    if source is not None:
        await asyncio.to_thread(shutil.copyfile, source, path)
    else:
        await asyncio.to_thread(_fill, path, call.inputs["size"], call.inputs["seed"])
    return NodeResult(ui={"files": [{"filename": path.name, "subfolder": place.subfolder, "type": "output"}]})


def _fill(path: Path, size: int, seed: int) -> None:
    chance = random.Random(seed)
    with path.open("wb") as target:
        for start in range(0, size, _PIECE):
            target.write(chance.randbytes(min(_PIECE, size - start)))


def lab_behaviours() -> dict[str, Behaviour]:
    """The table: behaviour name to function."""
    functions: list[Behaviour] = [
        lab_picture, lab_slow, lab_block, lab_block_out, lab_async, lab_fail, lab_blocker, lab_expand, lab_ui,
        lab_file,
    ]  # fmt: skip
    return {getattr(function, "__name__", ""): function for function in functions}
