"""Draws real, small media: pictures, previews, animations, video, audio and latents.

It draws the objects of `values`. Pillow is imported only to draw, so the rest of ComfyFleet runs without it.
"""

from __future__ import annotations

import importlib.util
import io
import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from comfyfleet.testing.fake_comfyui import video
from comfyfleet.testing.fake_comfyui.values import FakeAudio, FakeImage, FakeLatent

if TYPE_CHECKING:
    from PIL import Image as PillowImage

_PREVIEW_EDGE = 64
_VIDEO_EDGE = 64
_ANIMATION_FRAMES_MAX = 24
_FLAC_BLOCK = 4096


class PillowMissing(RuntimeError):
    """Pillow is not installed."""


def require_pillow() -> None:
    """Say clearly what to install when Pillow is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise PillowMissing(
            "the fake ComfyUI draws its pictures with Pillow, which is not installed: pip install 'comfyfleet[fake]', "
            "or in a checkout pip install '.[fake]'"
        )


def draw(image: FakeImage, index: int, edge_max: int) -> PillowImage.Image:
    """One picture of a batch, no larger than `edge_max` on its longer side."""
    require_pillow()
    from PIL import Image, ImageOps

    width, height = _fit(image.width, image.height, edge_max)
    if image.source is not None:
        picture = Image.open(io.BytesIO(image.source)).convert("RGB").resize((width, height))
    elif image.seed is not None:
        picture = _pattern(image.seed + index, 1.0).resize((width, height))
    else:
        picture = Image.new("RGB", (width, height), _rgb(image.color))
    return ImageOps.invert(picture) if image.is_inverted else picture


def png(picture: PillowImage.Image, texts: Mapping[str, str] | None = None) -> bytes:
    """A PNG file with text chunks."""
    from PIL.PngImagePlugin import PngInfo

    chunks = PngInfo()
    for name, text in (texts or {}).items():
        chunks.add_text(name, text)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", pnginfo=chunks, compress_level=1)
    return buffer.getvalue()


def preview(seed: int, progress: float) -> bytes:
    """A small JPEG that grows clearer with the progress (0 to 1)."""
    require_pillow()
    buffer = io.BytesIO()
    _pattern(seed, progress).resize((_PREVIEW_EDGE, _PREVIEW_EDGE)).save(buffer, format="JPEG", quality=80)
    return buffer.getvalue()


def animated_webp(image: FakeImage, frames_per_second: float, edge_max: int) -> bytes:
    """An animation of the batch."""
    frames = [draw(image, index, edge_max) for index in range(min(image.batch, _ANIMATION_FRAMES_MAX))]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        format="WEBP",
        save_all=True,
        append_images=frames[1:],
        duration=max(1, round(1000 / frames_per_second)),
    )
    return buffer.getvalue()


def reencode(source: bytes, image_format: str, quality: int, channel: str) -> bytes:
    """A picture for `/view?preview=...`."""
    require_pillow()
    from PIL import Image

    with Image.open(io.BytesIO(source)) as opened:
        picture = opened.convert("RGB") if image_format == "jpeg" or channel == "rgb" else opened.copy()
    buffer = io.BytesIO()
    picture.save(buffer, format=image_format, quality=quality)
    return buffer.getvalue()


def one_channel(source: bytes, channel: str) -> bytes:
    """A picture for `/view?channel=rgb` (without transparency) or `channel=a` (the transparency alone)."""
    require_pillow()
    from PIL import Image

    with Image.open(io.BytesIO(source)) as opened:
        if channel == "rgb":
            return png(opened.convert("RGB"))
        alpha = opened.convert("RGBA").getchannel("A")
    mask = Image.new("RGBA", alpha.size)
    mask.putalpha(alpha)
    return png(mask)


def with_mask(original: bytes, mask: bytes) -> bytes:
    """The original with the transparency of the mask."""
    require_pillow()
    from PIL import Image

    with Image.open(io.BytesIO(original)) as opened, Image.open(io.BytesIO(mask)) as opened_mask:
        picture = opened.convert("RGBA")
        picture.putalpha(opened_mask.convert("RGBA").resize(picture.size).getchannel("A"))
    return png(picture)


def size_of(source: bytes) -> tuple[int, int]:
    """Width and height of a picture file."""
    require_pillow()
    from PIL import Image

    with Image.open(io.BytesIO(source)) as opened:
        return opened.size


def mp4(image: FakeImage, frames_per_second: float) -> bytes:
    """A video of the batch, small enough to be quick."""
    frames = [draw(image, index, _VIDEO_EDGE) for index in range(min(image.batch, _ANIMATION_FRAMES_MAX))]
    return video.mp4(frames, image.batch, frames_per_second)


def flac(audio: FakeAudio) -> bytes:
    """Silence as a FLAC file: one constant subframe per channel and block."""
    total = round(audio.seconds * audio.sample_rate)
    packed = audio.sample_rate << 44 | (audio.channels - 1) << 41 | 15 << 36 | total
    info = struct.pack(">HH", _FLAC_BLOCK, _FLAC_BLOCK) + bytes(6) + struct.pack(">Q", packed) + bytes(16)
    frames = bytearray()
    for number, start in enumerate(range(0, min(total, _FLAC_BLOCK * 2000), _FLAC_BLOCK)):
        frames += _flac_frame(number, min(_FLAC_BLOCK, total - start), audio.channels)
    return b"fLaC\x80" + len(info).to_bytes(3, "big") + info + bytes(frames)


def latent_file(latent: FakeLatent) -> bytes:
    """A latent in safetensors form: length, JSON header, zeros."""
    shape = [latent.batch, 4, max(1, latent.height // 8), max(1, latent.width // 8)]
    # A latent of the full size would be megabytes of zeros, so it is at most one small picture.
    shape = [1, 4, min(shape[2], 16), min(shape[3], 16)]
    size = 4 * shape[1] * shape[2] * shape[3]
    header = json.dumps(
        {"latent_tensor": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def _fit(width: int, height: int, edge_max: int) -> tuple[int, int]:
    factor = min(1.0, edge_max / max(width, height, 1))
    return max(1, round(width * factor)), max(1, round(height * factor))


def _rgb(color: int) -> tuple[int, int, int]:
    return color >> 16 & 255, color >> 8 & 255, color & 255


def _pattern(seed: int, progress: float) -> PillowImage.Image:
    from PIL import Image

    edge = 16
    pixels = bytearray()
    state = (seed * 2654435761 + 12345) & 0xFFFFFFFF
    tint = (state & 255, state >> 8 & 255, state >> 16 & 255)
    for index in range(edge * edge):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        noise = state >> 24
        slope = 255 * (index % edge + index // edge) // (2 * edge)
        for channel in tint:
            pixels.append(int(noise * (1 - progress) + progress * (channel + slope) / 2))
    return Image.frombytes("RGB", (edge, edge), bytes(pixels))


def _flac_frame(number: int, samples: int, channels: int) -> bytes:
    # Fixed block size; block length in 16 bits at the end of the header; 16 bits a sample; rate as in the file header.
    header = (
        bytes((0xFF, 0xF8, 0x70, (channels - 1) << 4 | 0x08))
        + chr(number).encode()
        + struct.pack(">H", samples - 1)
    )
    header += bytes((_crc(header, 0x07, 8),))
    frame = header + b"\x00\x00\x00" * channels
    return frame + struct.pack(">H", _crc(frame, 0x8005, 16))


def _crc(content: bytes, polynomial: int, bits: int) -> int:
    mask, top = (1 << bits) - 1, 1 << (bits - 1)
    value = 0
    for byte in content:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & mask
    return value
