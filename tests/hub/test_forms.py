"""A file in one request, as a form: `curl -F file=@x.png`. Streamed, bounded, verified, and nothing is read before the
key is."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import Answer, HubRig, hub_in_process, running_hub, submission
from tests.hub.test_files import left_in
from tests.hub.test_inputs import edit

from comfyfleet.hub.files.uploads import MAX_HEADER_BYTES, Form
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal

BOUNDARY = "x-boundary-x"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def form(content: bytes = b"", filename: str = "a.png", **fields: str) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = f'Content-Disposition: form-data; name="file"; filename="{filename}"\r\nContent-Type: image/png\r\n\r\n'
    parts += [f"--{BOUNDARY}\r\n{head}".encode(), content, f"\r\n--{BOUNDARY}--\r\n".encode()]
    return b"".join(parts)


async def send(rig: HubRig, body: bytes, role: Role | None = Role.TENANT, type_: str = TYPE) -> Answer:
    return await rig.ask("POST", "/api/files", raw=body, role=role, headers={"content-type": type_})


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(folder=tmp_path, max_file_bytes=100_000) as rig:
        yield rig


async def test_one_request_is_a_whole_file_that_a_job_can_bring(rig: HubRig) -> None:
    content = b"a picture\r\n--x-boundary\r\n-x" * 100
    answer = await send(rig, form(content))
    assert answer.status == 201, answer.content
    made = answer.body
    assert (made["name"], made["type"], made["size"]) == ("a.png", "image/png", len(content))
    assert (made["sha256"], made["is_complete"]) == (hashlib.sha256(content).hexdigest(), True)
    assert made["link"]["method"] == "GET"
    assert (await rig.get(made["link"]["url"], role=None)).content == content
    inputs = [{"file": made["id"], "node": "10", "input": "image"}]
    body = submission(workflow=edit(), inputs=inputs)
    assert (await rig.post("/api/jobs", body, role=Role.TENANT)).status == 201


async def test_what_is_said_before_the_file_holds(rig: HubRig) -> None:
    digest = hashlib.sha256(b"abc").hexdigest()
    said = {"name": "b.webp", "type": "image/webp", "size": "3", "sha256": digest}
    made = (await send(rig, form(b"abc", **said))).body
    assert (made["name"], made["type"]) == ("b.webp", "image/webp")
    source = (await send(rig, form(b"abc", source=made["id"]))).body
    assert source["derived_from"] == [made["id"]]
    theirs = await send(rig, form(b"abc", tenant="acme"), role=Role.OPERATOR)
    assert (await rig.get(f"/api/files/{theirs.body['id']}", role=Role.TENANT)).status == 200
    assert (await send(rig, form(b"abc", tenant="other"))).code == "not_allowed"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (form(b"abc", sha256="0" * 64), "invalid_request"),
        (form(b"abc", size="4"), "invalid_request"),
        (form(b"abcd", size="3"), "too_large"),
        (form(b"x" * 100_001), "too_large"),
        (form(b"abc", sha256="no digest"), "invalid_request"),
        (form(b"abc", nonsense="1"), "invalid_request"),
        (form(b"abc", source="nobody"), "invalid_request"),
        (form(b"abc", name="x" * 5_000), "invalid_request"),
        (form(b"abc")[:-20], "invalid_request"),
        (form(b"abc")[: len(form(b"abc")) // 2], "invalid_request"),
        (f"--{BOUNDARY}--\r\n".encode(), "invalid_request"),
        (b"", "invalid_request"),
        (b"x" * 200_000, "invalid_request"),
        (f"--{BOUNDARY}\r\n".encode() + b"A: b\r\n" * 10_000, "invalid_request"),
        (f"--{BOUNDARY}\r\n\r\n".encode() * 1_000, "invalid_request"),
        (form(b"abc")[: -len(BOUNDARY) - 8] + form(b"abc", name="late"), "invalid_request"),
    ],
)
async def test_a_form_that_does_not_hold_leaves_nothing_behind(
    rig: HubRig, tmp_path: Path, body: bytes, code: str
) -> None:
    assert (await send(rig, body)).code == code
    assert left_in(tmp_path) == []
    assert (await rig.get("/api/files")).body["files"] == []


@pytest.mark.parametrize("type_", ["multipart/form-data", "multipart/form-data; boundary=", TYPE + "x" * 80])
async def test_a_form_without_a_boundary_that_can_be_one_is_refused(rig: HubRig, type_: str) -> None:
    assert (await send(rig, form(b"abc"), type_=type_)).code == "invalid_request"


async def test_the_way_of_before_is_the_way_of_today(rig: HubRig) -> None:
    made = await rig.post("/api/files", {"name": "a.png"}, role=Role.TENANT)
    assert (made.status, made.body["link"]["method"]) == (201, "PUT")


@pytest.mark.parametrize(
    "filename", ["../../etc/passwd", "C:\\\\windows\\\\a.png", "a\u202egnp.exe", "ä ö.png", ""]
)
async def test_a_name_is_shown_and_never_a_path(rig: HubRig, tmp_path: Path, filename: str) -> None:
    made = (await send(rig, form(b"abc", filename))).body
    assert "/" not in made["name"] and "\\" not in made["name"] and made["name"]
    assert left_in(tmp_path) == [made["id"]]


async def test_nothing_of_a_form_is_read_before_the_key_is(rig: HubRig) -> None:
    """And of one that is refused for its key, its role or its size nothing is read at all, or little."""
    for role, status in ((None, 401), (Role.VIEWER, 403), (Role.WORKER, 403)):
        asked = 0

        async def receive() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            return {"type": "http.request", "body": b"x" * 65_536, "more_body": True}

        assert await asked_of(rig, receive, None if role is None else rig.keys[role]) == status
        assert asked == 0
    read = 0

    async def endless() -> dict[str, Any]:
        nonlocal read
        read += 65_536
        head = form(b"")[: form(b"").index(b"\r\n\r\n") + 4] if read == 65_536 else b""
        return {"type": "http.request", "body": head + b"x" * 65_536, "more_body": True}

    assert await asked_of(rig, endless, rig.keys[Role.TENANT]) == 413
    assert read <= 3 * 65_536


async def asked_of(rig: HubRig, receive: Any, key: str | None) -> int:
    headers = {"content-type": TYPE} | ({} if key is None else {"authorization": f"Bearer {key}"})
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/api/files",
        "raw_path": b"/api/files",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
    }
    sent: list[Mapping[str, Any]] = []

    async def send_(message: Any) -> None:
        sent.append(message)

    await rig.hub(scope, receive, send_)
    return int(sent[0]["status"])


async def test_whoever_hangs_up_in_the_middle_leaves_nothing(rig: HubRig, tmp_path: Path) -> None:
    whole = form(b"x" * 1_000)
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": whole[:500], "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    with pytest.raises(IndexError):
        # Nobody is there to be answered.
        await asked_of(rig, receive, rig.keys[Role.TENANT])
    assert left_in(tmp_path) == []
    assert (await rig.get("/api/files")).body["files"] == []


@pytest.mark.parametrize("size", [1, 7, 4_096])
async def test_a_form_is_the_same_however_it_is_cut(size: int) -> None:
    content = b"\r\n--x-boundary-" + b"\r\n-" * 50
    whole = b"preamble\r\n" + form(content, name="n", type="image/png")

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), size):
            yield whole[start : start + size]

    found = [
        (part.name, part.filename, b"".join([each async for each in part.content]))
        async for part in Form(pieces(), BOUNDARY.encode()).parts()
    ]
    assert found == [("name", None, b"n"), ("type", None, b"image/png"), ("file", "a.png", content)]


async def test_headers_of_a_part_are_bounded() -> None:
    read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal read
        yield f"--{BOUNDARY}\r\n".encode()
        while True:
            read += 1_024
            yield b"a" * 1_024

    with pytest.raises(Refusal, match="headers"):
        async for _ in Form(pieces(), BOUNDARY.encode()).parts():
            pass
    assert read <= MAX_HEADER_BYTES + 2_048


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_does_it_in_one_line(tmp_path: Path) -> None:
    content = b"\x89PNG" * 300_000
    (tmp_path / "x.png").write_bytes(content)
    async with running_hub(folder=tmp_path / "files") as rig:
        process = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "--max-time", "60", "-F", f"file=@{tmp_path}/x.png"),
            *("-H", f"Authorization: Bearer {rig.keys[Role.TENANT]}", f"{rig.url}/api/files"),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        made = Answer(201, {}, output).body
        assert (made["name"], made["type"], made["size"]) == ("x.png", "image/png", len(content))
        assert made["sha256"] == hashlib.sha256(content).hexdigest()
