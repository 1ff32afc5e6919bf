"""Every kind of output is a real file that /view serves."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from PIL import Image
from tests.sim import _mp4
from tests.sim._client import Client, Graph, fake, plain, text_to_image

from comfyfleet.testing.fake_comfyui import pictures
from comfyfleet.testing.fake_comfyui.values import FakeImage

IMAGES = {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 3, "color": 255}}


async def view(client: Client, record: dict[str, Any], more: str = "") -> tuple[str, bytes]:
    query = f"filename={record['filename']}&subfolder={record['subfolder']}&type={record['type']}{more}"
    async with client.session.get(f"{client.server.url}/view?{query}") as answer:
        assert answer.status == 200
        return answer.headers["Content-Type"], await answer.read()


def with_images(class_type: str, **inputs: Any) -> Graph:
    return {"1": IMAGES, "2": {"class_type": class_type, "inputs": {"images": ["1", 0], **inputs}}}


VIDEO: Graph = {
    "1": IMAGES,
    "3": {"class_type": "CreateVideo", "inputs": {"images": ["1", 0], "fps": 8.0}},
    "2": {
        "class_type": "SaveVideo",
        "inputs": {"video": ["3", 0], "filename_prefix": "v/clip", "format": "auto", "codec": "auto"},
    },
}
AUDIO: Graph = {
    "1": {"class_type": "EmptyAudio", "inputs": {"duration": 0.5, "sample_rate": 44100, "channels": 2}},
    "2": {"class_type": "SaveAudio", "inputs": {"audio": ["1", 0], "filename_prefix": "a/s"}},
}
LATENT: Graph = {
    "1": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    "2": {"class_type": "SaveLatent", "inputs": {"samples": ["1", 0], "filename_prefix": "l/x"}},
}
ANIMATION = with_images(
    "SaveAnimatedWEBP", filename_prefix="anim", fps=6.0, lossless=True, quality=80, method="default"
)
GIFS = with_images("VHS_VideoCombine", frame_rate=8.0, filename_prefix="combined", save_output=True)


@pytest.mark.parametrize(
    ("graph", "key", "content_type", "magic"),
    [
        (with_images("SaveImage", filename_prefix="i/p"), "images", "image/png", b"\x89PNG"),
        (with_images("PreviewImage"), "images", "image/png", b"\x89PNG"),
        (ANIMATION, "images", "image/webp", b"RIFF"),
        (VIDEO, "images", "video/mp4", b"\0\0\0\x1cftypisom"),
        (GIFS, "gifs", "video/mp4", b"\0\0\0\x1cftypisom"),
        (AUDIO, "audio", "audio/", b"fLaC"),
        (LATENT, "latents", "application/octet-stream", b""),
    ],
)
async def test_an_output_is_reported_under_its_key_and_served(
    graph: Graph, key: str, content_type: str, magic: bytes
) -> None:
    async with fake() as client:
        shown = (await client.run(graph))["outputs"]["2"]
        for record in shown[key]:
            kind, content = await view(client, record)
            assert kind.startswith(content_type) and content.startswith(magic) and len(content) > 40
        assert ("animated" in shown) is (graph in (VIDEO, ANIMATION))


async def test_an_animation_has_all_its_frames() -> None:
    async with fake() as client:
        graph = text_to_image("sd15.safetensors")
        graph["2"]["inputs"]["batch_size"] = 3
        graph["6"] = {
            "class_type": "SaveAnimatedWEBP",
            "inputs": {**ANIMATION["2"]["inputs"], "images": ["5", 0]},
        }
        record = (await client.run(graph))["outputs"]["6"]["images"][0]
        _, content = await view(client, record)
        assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 3


@pytest.mark.parametrize(("graph", "key"), [(VIDEO, "images"), (GIFS, "gifs")])
async def test_a_video_plays_with_its_length_its_size_and_its_colours(graph: Graph, key: str) -> None:
    async with fake() as client:
        (record,) = (await client.run(graph))["outputs"]["2"][key]
        _, content = await view(client, record)
    video = _mp4.read(content)
    assert (video.width, video.height, video.seconds) == (16, 16, 3 / 8)
    assert len(video.frames) == 3
    for frame in video.frames:
        # Blue in the range of video (BT.601).
        assert frame.is_key and frame.bright == [bytes((41,)) * 16] * 16
        assert (frame.blue, frame.red) == (240, 110)


@pytest.mark.parametrize(
    ("width", "height", "shown"), [(100, 50, (64, 32)), (17, 33, (16, 32)), (1, 1, (2, 2))]
)
async def test_a_video_of_any_size_and_length_is_small_and_all_of_its_frames_are_there(
    width: int, height: int, shown: tuple[int, int]
) -> None:
    image = FakeImage(width=width, height=height, batch=100, seed=7)
    content = pictures.mp4(image, 24.0)
    assert len(content) < 200_000
    video = _mp4.read(content)
    assert (video.width, video.height) == shown
    assert len(video.frames) == 100 and abs(video.seconds - 100 / 24) < 0.001
    assert all(one.idr_id != next_.idr_id for one, next_ in itertools.pairwise(video.frames)), (
        "two key frames in a row are told apart"
    )
    if width > 2:
        assert video.frames[0].bright != video.frames[1].bright, "it moves"


async def test_text_is_reported_as_text() -> None:
    async with fake() as client:
        graph = {"1": {"class_type": "PreviewAny", "inputs": {"source": "hello"}}}
        assert (await client.run(graph))["outputs"] == {"1": {"text": ["hello"]}}


async def test_a_picture_carries_its_graph_but_no_secrets() -> None:
    async with fake() as client:
        extra = {"extra_pnginfo": {"workflow": {"id": "w"}, "note": "kept"}, "api_key_comfy_org": "secret"}
        record = (await client.run(plain(), extra_data=extra))["outputs"]["2"]["images"][0]
        _, content = await view(client, record)
        texts = Image.open(io.BytesIO(content)).info
        assert {name: json.loads(text) for name, text in texts.items()} == {
            "prompt": plain(),
            "workflow": {"id": "w"},
            "note": "kept",
        }
        assert b"secret" not in content


async def test_equal_seeds_draw_equal_pictures_and_others_do_not() -> None:
    async with fake() as client:
        drawn = []
        for seed in (1, 2, 1):
            entry = await client.run(text_to_image("sd15.safetensors", seed=seed))
            _, content = await view(client, entry["outputs"]["6"]["images"][0])
            drawn.append(Image.open(io.BytesIO(content)).tobytes())
        assert drawn[0] == drawn[2] != drawn[1]


async def test_view_serves_channels_and_previews() -> None:
    async with fake() as client:
        record = (await client.run(plain()))["outputs"]["2"]["images"][0]
        assert (await view(client, record, "&preview=jpeg;50"))[0] == "image/jpeg"
        kind, alpha = await view(client, record, "&channel=a")
        assert (kind, Image.open(io.BytesIO(alpha)).mode) == ("image/png", "RGBA")
        _, colors = await view(client, record, "&channel=rgb")
        assert Image.open(io.BytesIO(colors)).mode == "RGB"


async def test_a_mask_becomes_the_transparency_of_its_original() -> None:
    async with fake() as client:
        record = (await client.run(plain()))["outputs"]["2"]["images"][0]
        buffer = io.BytesIO()
        Image.new("RGBA", (8, 8), (0, 0, 0, 7)).save(buffer, format="PNG")
        from aiohttp import FormData

        form = FormData()
        form.add_field("image", buffer.getvalue(), filename="mask.png")
        form.add_field("original_ref", json.dumps(record))
        async with client.session.post(f"{client.server.url}/upload/mask", data=form) as answer:
            assert await answer.json() == {"name": "mask.png", "subfolder": "", "type": "input"}
        stored = Image.open(client.server.disk.base / "input" / "mask.png")
        assert stored.getchannel("A").getextrema() == (7, 7)


def test_silence_is_a_sound_flac_file() -> None:
    from comfyfleet.testing.fake_comfyui.pictures import flac
    from comfyfleet.testing.fake_comfyui.values import FakeAudio

    content = flac(FakeAudio(seconds=0.2, sample_rate=44100, channels=2))
    packed = int.from_bytes(content[18:26], "big")
    assert (packed >> 44, (packed >> 41 & 7) + 1, (packed >> 36 & 31) + 1) == (44100, 2, 16)
    # 8820 samples are three blocks, each with sync code, header, checksum, two constant subframes and checksum.
    assert content[42:].count(b"\xff\xf8") == 3
