"""A file that is deleted while the hub answers is sent whole: the hub opened it before it said 200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from comfyfleet.hub.files.handlers import OpenFileResponse, open_file

CONTENT = bytes(range(256)) * 1024


async def _sent(response: OpenFileResponse, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "asgi": {"spec_version": "2.4"},
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is left to receive")

    await response(scope, receive, send)
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages)


async def _answer(path: Path) -> OpenFileResponse:
    return OpenFileResponse(await open_file(path), "a.png", "image/png", {})


async def test_a_file_deleted_before_its_first_byte_is_sent_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(CONTENT)
    response = await _answer(path)
    path.unlink()
    assert await _sent(response) == (200, CONTENT)


async def test_a_range_of_a_deleted_file_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(CONTENT)
    response = await _answer(path)
    path.unlink()
    assert await _sent(response, range="bytes=1000-1999") == (206, CONTENT[1000:2000])


@pytest.mark.parametrize(
    ("method", "headers"),
    [("HEAD", {}), ("GET", {}), ("GET", {"range": "bytes=9999999-"}), ("GET", {"range": "x"})],
)
async def test_the_file_is_closed_after_every_answer(
    tmp_path: Path, method: str, headers: dict[str, str]
) -> None:
    path = tmp_path / "f"
    path.write_bytes(CONTENT)
    file = await open_file(path)
    await _sent(OpenFileResponse(file, "a.png", "image/png", {}), method, **headers)
    assert file.closed
