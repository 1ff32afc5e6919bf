"""What the node classes do when they run.

One short function per behaviour, found by name in a table. They compute stand-in values, take simulated time
and write real small files; order, caching and messages are left to `execution`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from comfyfleet.testing.fake_comfyui import pictures
from comfyfleet.testing.fake_comfyui.disk import SavePlace
from comfyfleet.testing.fake_comfyui.errors import NodeError
from comfyfleet.testing.fake_comfyui.run import NodeCall, NodeResult
from comfyfleet.testing.fake_comfyui.settings import GIGABYTE
from comfyfleet.testing.fake_comfyui.values import (
    Anything,
    FakeAudio,
    FakeConditioning,
    FakeImage,
    FakeLatent,
    FakeModel,
    FakeVideo,
)

Behaviour = Callable[[NodeCall], Awaitable[NodeResult]]


async def generic(call: NodeCall) -> NodeResult:
    """A class known only by its declaration: takes its time and passes on values of the right type."""
    if call.node_class.uses_gpu:
        await put_on_card(call, *call.inputs.values())
    await call.work(call.node_class.cost_s)
    given = list(call.inputs.values())
    values = [_first(given, output) for output in call.node_class.outputs]
    images = next((value for value in given if isinstance(value, FakeImage)), None)
    if call.node_class.output_node and images is not None:
        return NodeResult(
            ui={"images": save_pictures(call, images, call.inputs.get("filename_prefix", "ComfyUI"))}
        )
    return NodeResult(values=tuple(values))


def _first(given: list[Any], output: str) -> Any:
    wanted: dict[str, tuple[type, ...]] = {
        "IMAGE": (FakeImage,),
        "LATENT": (FakeLatent,),
        "MODEL": (FakeModel,),
        "CONDITIONING": (FakeConditioning,),
    }
    found = next((value for value in given if isinstance(value, wanted.get(output, ()))), None)
    if found is not None:
        return found
    return FakeImage(width=64, height=64, seed=1) if output == "IMAGE" else Anything(output)


async def empty_image(call: NodeCall) -> NodeResult:
    given = call.inputs
    size = given["width"] * given["height"] * given["batch_size"] * 4
    if size > call.machine.settings.ram_gb * GIGABYTE:
        raise NodeError(
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
            f"you tried to allocate {size} bytes. Error code 12 (Cannot allocate memory)",
        )
    image = FakeImage(
        width=given["width"], height=given["height"], batch=given["batch_size"], color=given["color"]
    )
    return NodeResult(values=(image,))


async def invert(call: NodeCall) -> NodeResult:
    image: FakeImage = call.inputs["image"]
    return NodeResult(values=(msgspec.structs.replace(image, is_inverted=not image.is_inverted),))


async def scale(call: NodeCall) -> NodeResult:
    image: FakeImage = call.inputs["image"]
    factor = call.inputs.get("scale_by", 1.0)
    width = call.inputs.get("width") or max(1, round(image.width * factor))
    height = call.inputs.get("height") or max(1, round(image.height * factor))
    return NodeResult(values=(msgspec.structs.replace(image, width=width, height=height),))


async def scale_to_pixels(call: NodeCall) -> NodeResult:
    image: FakeImage = call.inputs["image"]
    factor = math.sqrt(call.inputs["megapixels"] * 1024 * 1024 / (image.width * image.height))
    step = call.inputs.get("resolution_steps", 1)
    width, height = (max(1, round(edge * factor / step) * step) for edge in (image.width, image.height))
    return NodeResult(values=(msgspec.structs.replace(image, width=width, height=height),))


async def scale_latent(call: NodeCall) -> NodeResult:
    latent: FakeLatent = call.inputs["samples"]
    width, height = call.inputs["width"] or latent.width, call.inputs["height"] or latent.height
    return NodeResult(values=(msgspec.structs.replace(latent, width=width, height=height),))


async def load_image(call: NodeCall) -> NodeResult:
    path = call.machine.disk.find_input(call.inputs["image"])
    if path is None:
        raise NodeError("FileNotFoundError", f"[Errno 2] No such file or directory: '{call.inputs['image']}'")
    source = path.read_bytes()
    try:
        width, height = pictures.size_of(source)
    except OSError as error:
        raise NodeError("PIL.UnidentifiedImageError", f"cannot identify image file '{path.name}'") from error
    return NodeResult(values=(FakeImage(width=width, height=height, source=source), Anything("MASK")))


async def save_image(call: NodeCall) -> NodeResult:
    return NodeResult(
        ui={"images": save_pictures(call, call.inputs["images"], call.inputs["filename_prefix"])}
    )


async def preview_image(call: NodeCall) -> NodeResult:
    prefix = f"ComfyUI_temp_{call.memory.temp_name}"
    return NodeResult(ui={"images": save_pictures(call, call.inputs["images"], prefix, kind="temp")})


async def save_image_websocket(call: NodeCall) -> NodeResult:
    images: FakeImage = call.inputs["images"]
    for index in range(images.batch):
        picture = pictures.draw(images, index, call.machine.settings.picture_edge_max)
        call.progress(index, images.batch, png=pictures.png(picture))
    return NodeResult()


async def load_model(call: NodeCall) -> NodeResult:
    named = [
        (name, spec.folder) for name, spec in call.node_class.required.items() if spec.folder is not None
    ]
    models = [find_model(call, folder, call.inputs[name]) for name, folder in named]
    for model in models:
        await read_model(call, model)
    return NodeResult(values=(models[0],) * len(call.node_class.outputs))


async def apply_lora(call: NodeCall) -> NodeResult:
    lora = find_model(call, "loras", call.inputs["lora_name"])
    bases = [call.inputs[name] for name in ("model", "clip") if name in call.inputs]
    values = [
        msgspec.structs.replace(base, loras=(*base.loras, (lora.name, lora.size_gb)))
        if isinstance(base, FakeModel)
        else base
        for base in bases
    ]
    # Like ComfyUI's, the node's object keeps the file: another model or strength does not read it again.
    if call.memory.lora != lora.key:
        await read_model(call, lora)
        call.memory.lora = lora.key
    return NodeResult(values=tuple(values))


async def encode_text(call: NodeCall) -> NodeResult:
    await put_on_card(call, call.inputs["clip"])
    await call.work(call.node_class.cost_s)
    return NodeResult(values=(FakeConditioning(call.inputs["text"]),))


async def empty_latent(call: NodeCall) -> NodeResult:
    given = call.inputs
    latent = FakeLatent(width=given["width"], height=given["height"], batch=given["batch_size"])
    return NodeResult(values=(latent,))


async def sample(call: NodeCall) -> NodeResult:
    latent: FakeLatent = call.inputs["latent_image"]
    steps: int = call.inputs["steps"]
    await put_on_card(call, call.inputs["model"], megapixels=latent.megapixels)
    step_seconds = call.machine.settings.step_seconds * max(latent.megapixels, 0.05)
    given_seed: int = call.inputs["seed"] if "seed" in call.inputs else call.inputs["noise_seed"]
    for step in range(1, steps + 1):
        if step == steps // 2 + 1:
            await call.stall_if_switched_on()
        await call.work(step_seconds)
        call.progress(step, steps, preview_seed=given_seed)
    seed = (given_seed * 31 + latent.seed + _text_number(call.inputs["positive"])) & 0xFFFFFFFF
    return NodeResult(values=(msgspec.structs.replace(latent, seed=seed),))


async def decode(call: NodeCall) -> NodeResult:
    latent: FakeLatent = call.inputs["samples"]
    await put_on_card(call, call.inputs["vae"], megapixels=latent.megapixels)
    await call.work(call.node_class.cost_s * max(latent.megapixels, 0.05))
    image = FakeImage(width=latent.width, height=latent.height, batch=latent.batch, seed=latent.seed)
    return NodeResult(values=(image,))


async def encode_image(call: NodeCall) -> NodeResult:
    image: FakeImage = call.inputs["pixels"]
    await put_on_card(call, call.inputs["vae"])
    await call.work(call.node_class.cost_s)
    latent = FakeLatent(
        width=image.width, height=image.height, batch=image.batch, seed=image.seed or image.color
    )
    return NodeResult(values=(latent,))


async def save_latent(call: NodeCall) -> NodeResult:
    place = _place(call, "output", call.inputs["filename_prefix"])
    return NodeResult(ui={"latents": [_write(place, "latent", pictures.latent_file(call.inputs["samples"]))]})


async def save_animation(call: NodeCall) -> NodeResult:
    images: FakeImage = call.inputs["images"]
    content = pictures.animated_webp(images, call.inputs["fps"], call.machine.settings.picture_edge_max)
    place = _place(call, "output", call.inputs["filename_prefix"], images)
    return NodeResult(ui={"images": [_write(place, "webp", content)], "animated": [images.batch != 1]})


async def create_video(call: NodeCall) -> NodeResult:
    return NodeResult(values=(FakeVideo(images=call.inputs["images"], frame_rate=call.inputs["fps"]),))


async def save_video(call: NodeCall) -> NodeResult:
    video: FakeVideo = call.inputs["video"]
    place = _place(call, "output", call.inputs["filename_prefix"], video.images)
    saved = _write(place, "mp4", pictures.mp4(video.images, video.frame_rate))
    return NodeResult(ui={"images": [saved], "animated": [True]})


async def video_combine(call: NodeCall) -> NodeResult:
    images: FakeImage = call.inputs["images"]
    kind = "output" if call.inputs["save_output"] else "temp"
    place = _place(call, kind, call.inputs["filename_prefix"], images)
    name = f"{place.name}_{place.counter:05}.mp4"
    (place.folder / name).write_bytes(pictures.mp4(images, call.inputs["frame_rate"]))
    saved = {
        "filename": name,
        "subfolder": place.subfolder,
        "type": kind,
        "format": "video/h264-mp4",
        "frame_rate": call.inputs["frame_rate"],
    }
    return NodeResult(ui={"gifs": [saved]})


async def empty_audio(call: NodeCall) -> NodeResult:
    given = call.inputs
    audio = FakeAudio(seconds=given["duration"], sample_rate=given["sample_rate"], channels=given["channels"])
    return NodeResult(values=(audio,))


async def save_audio(call: NodeCall) -> NodeResult:
    place = _place(call, "output", call.inputs["filename_prefix"])
    return NodeResult(ui={"audio": [_write(place, "flac", pictures.flac(call.inputs["audio"]))]})


async def preview_text(call: NodeCall) -> NodeResult:
    source = call.inputs["source"]
    if isinstance(source, str | int | float):
        text = str(source)
    else:
        try:
            text = json.dumps(source, indent=4)
        except TypeError:
            text = str(source)
    return NodeResult(ui={"text": [text]})


def save_pictures(
    call: NodeCall, images: FakeImage, prefix: str, kind: str = "output"
) -> list[dict[str, Any]]:
    """Write a batch as PNG files that carry the graph, as ComfyUI's do."""
    place = _place(call, kind, prefix, images)
    texts = {"prompt": json.dumps(call.run.graph)}
    for name, value in (call.run.extra_data.get("extra_pnginfo") or {}).items():
        texts[name] = json.dumps(value)
    saved = []
    for index in range(images.batch):
        picture = pictures.draw(images, index, call.machine.settings.picture_edge_max)
        saved.append(_write(place, "png", pictures.png(picture, texts), index))
    return saved


def find_model(call: NodeCall, folder: str, name: str) -> FakeModel:
    """A loader's model file. It may be gone or broken since the prompt was accepted."""
    size_gb = call.machine.models().get(folder, {}).get(name)
    if size_gb is None:
        raise NodeError("FileNotFoundError", f"Model in folder '{folder}' with filename '{name}' not found.")
    if name in call.machine.faults.corrupt_models:
        raise NodeError(
            "safetensors._safetensors_rust.SafetensorError",
            "Error while deserializing header: header too large",
        )
    return FakeModel(folder=folder, name=name, size_gb=size_gb)


async def read_model(call: NodeCall, model: FakeModel) -> None:
    """Reads a model file into the server's memory and waits for it."""
    seconds = call.machine.load_seconds(model.size_gb)
    call.machine.stats.loads(seconds)
    if seconds:
        await call.sleep(seconds)


async def put_on_card(call: NodeCall, *values: Any, megapixels: float = 0.0) -> None:
    """Puts the models among these values on the card, with working memory, and waits for it."""
    settings = call.machine.settings
    models = [value for value in values if isinstance(value, FakeModel)]
    moved_gb = call.machine.gpu.put(models, megapixels * settings.working_gb_per_megapixel)
    if moved_gb * settings.transfer_seconds_per_gb:
        await call.sleep(moved_gb * settings.transfer_seconds_per_gb)


def _place(call: NodeCall, kind: str, prefix: str, images: FakeImage | None = None) -> SavePlace:
    width, height = (images.width, images.height) if images is not None else (0, 0)
    place = call.machine.disk.save_place(kind, prefix, width, height)
    if place is None:
        raise NodeError("Exception", "**** ERROR: Saving image outside the output folder is not allowed.")
    return place


def _write(place: SavePlace, ending: str, content: bytes, index: int = 0) -> dict[str, Any]:
    name = f"{place.name.replace('%batch_num%', str(index))}_{place.counter + index:05}_.{ending}"
    (place.folder / name).write_bytes(content)
    return {"filename": name, "subfolder": place.subfolder, "type": place.kind}


def _text_number(value: Any) -> int:
    text = value.text if isinstance(value, FakeConditioning) else str(value)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def core_behaviours() -> dict[str, Behaviour]:
    """The table: behaviour name to function."""
    functions: list[Behaviour] = [
        generic, empty_image, invert, scale, scale_to_pixels, scale_latent, load_image, save_image, preview_image,
        save_image_websocket, load_model, apply_lora, encode_text, empty_latent, sample, decode, encode_image,
        save_latent, save_animation, create_video, save_video, video_combine, empty_audio, save_audio, preview_text,
    ]  # fmt: skip
    return {getattr(function, "__name__", ""): function for function in functions}
