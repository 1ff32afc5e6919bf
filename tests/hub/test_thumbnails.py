"""Thumbnails: small pictures of pictures, made once and kept; and what would not be good for a hub is refused."""

from __future__ import annotations

import asyncio
import struct
import sys
import zlib
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image, PngImagePlugin
from tests.hub._hub import Answer, HubRig, hub_in_process
from tests.hub.test_files import left_in
from tests.hub.test_inputs import uploaded

from comfyfleet.files import thumbnail_process, thumbnails
from comfyfleet.model.access import Role


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(folder=tmp_path) as rig:
        yield rig


def picture(width: int = 600, height: int = 300, kind: str = "PNG", **how: Any) -> bytes:
    target = BytesIO()
    Image.new(how.pop("mode", "RGB"), (width, height), how.pop("color", (200, 30, 30))).save(
        target, kind, **how
    )
    return target.getvalue()


def bomb() -> bytes:
    """A few hundred bytes that say they are a picture of 3.6 thousand million pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


async def asked(rig: HubRig, file_id: str, size: int | str = 256, **who: Any) -> Answer:
    return await rig.get(f"/api/files/{file_id}/thumbnail?size={size}", **(who or {"role": Role.TENANT}))


async def shown(rig: HubRig, file_id: str, size: int = 256) -> Image.Image:
    answer = await asked(rig, file_id, size)
    assert answer.status == 200, answer.content
    got = await rig.get(answer.body["link"]["url"], role=None)
    assert got.headers["content-type"] == "image/webp"
    return Image.open(BytesIO(got.content))


async def test_a_thumbnail_fits_its_square_and_keeps_its_shape(rig: HubRig) -> None:
    file_id = await uploaded(rig, picture())
    assert (await shown(rig, file_id)).size == (256, 128)
    assert (await shown(rig, file_id, 100)).size == (128, 64), "the next larger one that is kept"
    small = await uploaded(rig, picture(20, 10))
    assert (await shown(rig, small)).size == (20, 10), "nothing is blown up"


@pytest.mark.parametrize(
    ("content", "mode"),
    [
        (picture(kind="JPEG"), "RGB"),
        (picture(kind="WEBP"), "RGB"),
        (picture(kind="GIF"), "RGB"),
        (picture(mode="RGBA", color=(1, 2, 3, 100)), "RGBA"),
        (picture(mode="L", color=7), "RGB"),
        (picture(mode="I;16", color=7), "RGB"),
    ],
)
async def test_pictures_of_every_kind_have_thumbnails(rig: HubRig, content: bytes, mode: str) -> None:
    seen = await shown(rig, await uploaded(rig, content))
    assert (seen.size, seen.mode) == ((256, 128), mode)


async def test_a_picture_is_turned_as_it_says_and_what_else_it_says_is_left_out(rig: HubRig) -> None:
    told = Image.Exif()
    told[0x0112] = 6
    told[0x010E] = "taken at home"
    turned = await uploaded(rig, picture(kind="JPEG", exif=told))
    assert (await shown(rig, turned)).size == (128, 256)
    words = PngImagePlugin.PngInfo()
    words.add_text("workflow", "a secret prompt")
    spoken = await uploaded(rig, picture(pnginfo=words))
    for file_id in (turned, spoken):
        answer = await asked(rig, file_id)
        content = (await rig.get(answer.body["link"]["url"], role=None)).content
        assert b"secret" not in content and b"home" not in content


async def test_a_thumbnail_is_made_once_and_is_a_file_that_goes_with_its_picture(
    rig: HubRig, tmp_path: Path
) -> None:
    file_id = await uploaded(rig, picture())
    first, second = await asyncio.gather(asked(rig, file_id), asked(rig, file_id, 200))
    again = await asked(rig, file_id)
    assert first.body["id"] == second.body["id"] == again.body["id"]
    assert first.body["kind"] == "thumbnail" and first.body["is_complete"]
    assert len(left_in(tmp_path)) == 2
    seen = (await rig.get(f"/api/files/{file_id}", role=Role.TENANT)).body
    assert "derived" not in seen, "it is no result of anybody's work"
    assert rig.assets is not None
    record = await rig.assets.get(file_id)
    assert record is not None
    await rig.assets._forget(record)
    assert left_in(tmp_path) == [] and await rig.assets.get(first.body["id"]) is None


async def test_what_is_no_picture_is_refused_in_words(rig: HubRig, tmp_path: Path) -> None:
    for content in (b"plain words", b"", b"\x89PNG\r\n\x1a\n and then nothing", picture()[:200], b"<svg/>"):
        answer = await asked(rig, await uploaded(rig, content))
        assert answer.code == "invalid_request" and "PNG, JPEG, WebP or GIF" in answer.body["detail"]
    for size in ("0", "1025", "x"):
        assert (await asked(rig, "f_" + "0" * 32, size)).code == "invalid_request"
    unfinished = await uploaded(rig, picture(), is_complete=False)
    assert (await asked(rig, unfinished)).code == "wrong_phase"
    small = (await asked(rig, await uploaded(rig, picture()))).body["id"]
    assert (await asked(rig, small)).code == "invalid_request"


async def test_a_picture_that_is_a_bomb_does_not_go_off(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await asked(rig, await uploaded(rig, bomb()))
    assert answer.code == "too_large" and "pixels" in answer.body["detail"]
    monkeypatch.setattr(thumbnails, "MAX_BYTES", 100)
    assert (await asked(rig, await uploaded(rig, picture()))).code == "too_large"


async def test_a_decoder_that_never_ends_is_ended(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "_DRAWN_WITHIN_S", 0.05)
    file_id = await uploaded(rig, picture(4000, 4000))
    assert (await asked(rig, file_id)).code == "invalid_request"


async def test_another_tenants_picture_is_not_there_and_its_thumbnail_neither(rig: HubRig) -> None:
    other = (await rig.post("/api/keys", {"role": "tenant", "tenant": "other"})).body["key"]
    file_id = await uploaded(rig, picture())
    small = (await asked(rig, file_id)).body["id"]
    assert (await asked(rig, file_id, key=other)).code == "not_found"
    assert (await rig.get(f"/api/files/{small}", key=other)).code == "not_found"


def test_without_the_library_the_hub_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert thumbnail_process.draw(str(tmp_path / "picture"), 64) == thumbnail_process.HAS_NO_PILLOW
