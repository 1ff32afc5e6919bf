"""Draws the pictures of the fake A1111 server from the request, so that a test can tell what a picture was made of.

The pixels are a hash of the subject; the text `parameters` of a PNG has the form of the web UI. A test computes the
same pixels with `drawn_pixels` and reads those of a file with `pixels_of`.
"""

from __future__ import annotations

import io
from hashlib import sha256

import msgspec

from comfyfleet.testing.fake_comfyui.pictures import png, require_pillow

_GRAIN = 4
"""The pattern has this many cells in each direction."""


class FakeSubject(msgspec.Struct, frozen=True, kw_only=True):
    """All that a picture depends on."""

    route: str = "txt2img"
    prompt: str = ""
    negative_prompt: str = ""
    seed: int = 0
    model: str = "base"
    sampler: str = "Euler"
    steps: int = 50
    width: int = 512
    height: int = 512
    sources: tuple[str, ...] = ()
    """The SHA-256 of each input picture, in order."""
    steps_done: int | None = None
    """Less than `steps` for a picture that was interrupted."""


def drawn_pixels(subject: FakeSubject) -> bytes:
    """The colours of the pattern, row by row, three bytes each."""
    digest = sha256(msgspec.json.encode(subject)).digest()
    needed = _GRAIN * _GRAIN * 3
    return b"".join(sha256(digest + bytes((number,))).digest() for number in range(needed // 32 + 1))[:needed]


def pixels_of(content: bytes) -> bytes:
    """The colours of the pattern in a picture file. Exact for PNG, near for the others."""
    require_pillow()
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        flat = picture.convert("RGB")
        cell_x, cell_y = flat.width / _GRAIN, flat.height / _GRAIN
        found = bytearray()
        for row in range(_GRAIN):
            for column in range(_GRAIN):
                pixel = flat.getpixel((int((column + 0.5) * cell_x), int((row + 0.5) * cell_y)))
                assert isinstance(pixel, tuple)
                found += bytes(pixel[:3])
    return bytes(found)


def infotext(subject: FakeSubject, version: str, model_hash: str) -> str:
    negative = f"\nNegative prompt: {subject.negative_prompt}" if subject.negative_prompt else ""
    return (
        f"{subject.prompt}{negative}\nSteps: {subject.steps}, Sampler: {subject.sampler}, Seed: {subject.seed}, "
        f"Size: {subject.width}x{subject.height}, Model hash: {model_hash}, Model: {subject.model}, "
        f"Version: {version}"
    )


def draw_subject(subject: FakeSubject, text: str, image_format: str, longest_edge: int) -> bytes:
    require_pillow()
    from PIL import Image

    factor = min(1.0, longest_edge / max(subject.width, subject.height, 1))
    size = max(_GRAIN, round(subject.width * factor)), max(_GRAIN, round(subject.height * factor))
    small = Image.frombytes("RGB", (_GRAIN, _GRAIN), drawn_pixels(subject))
    picture = small.resize(size, Image.Resampling.NEAREST)
    if image_format == "png":
        return png(picture, {"parameters": text})
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG" if image_format == "jpg" else "WEBP", quality=95)
    return buffer.getvalue()


def check_picture(content: bytes) -> bool:
    """Whether the bytes are a picture."""
    require_pillow()
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()
    except (UnidentifiedImageError, OSError, ValueError):
        return False
    return True
