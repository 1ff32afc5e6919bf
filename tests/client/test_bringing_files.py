"""A program that brings files with its jobs: uploaded and wired in one call, and nothing done twice."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from tests.hub._hub import HubRig, running_hub
from tests.hub.test_files import left_in
from tests.hub.test_inputs import agent_at, edit
from tests.worker._comfyui import picture

from comfyfleet import Fault, FleetClient, Refusal, RefusalCode, SyncFleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.job import OutputFile
from comfyfleet.testing.fake_comfyui import FakeComfyUI


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with running_hub(folder=tmp_path / "files") as rig:
        yield rig


@pytest_asyncio.fixture
async def client(rig: HubRig) -> AsyncIterator[FleetClient]:
    async with FleetClient(rig.url, rig.keys[Role.TENANT], patience_s=2.0) as client:
        yield client


async def test_a_picture_is_made_fetched_and_brought_back_with_another_job(
    rig: HubRig, client: FleetClient, tmp_path: Path
) -> None:
    async with FakeComfyUI() as fake, agent_at(rig, fake):
        made = await client.wait((await client.submit(picture())).id, timeout=60)
        assert made.result is not None
        path = tmp_path / "photo.png"
        await asyncio.to_thread(path.write_bytes, await client.fetch(made.result.files[0]))
        job = await client.submit(edit(), attach={"10.image": path}, priority=3)
        ended = await client.wait(job.id, timeout=60)
        assert ended.status == "completed", ended.error
        many = await client.submit_many([edit(prefix="a"), edit(prefix="b")], attach={"10.image": path})
        assert not any(isinstance(each, Refusal) for each in many)
        uploads = {each.file for each in (await client.get(job.id)).inputs}
        assert len(uploads) == 1


async def test_a_file_is_uploaded_once_for_any_number_of_jobs(client: FleetClient) -> None:
    file = await client.upload(b"\x89PNG", name="a.png")
    assert (file.is_complete, file.type, file.size) == (True, "image/png", 4)
    for _ in range(2):
        job = await client.submit(edit(), inputs=[{"file": file.id, "node": "10", "input": "image"}])
        assert (await client.get(job.id)).inputs[0].file == file.id


async def test_scripts_without_a_loop_upload_too(rig: HubRig) -> None:
    def script() -> None:
        with SyncFleetClient(rig.url, rig.keys[Role.TENANT]) as client:
            job = client.submit(edit(), attach={"10.image": b"x"})
            assert client.get(job.id).inputs[0].size == 1
            assert client.upload(b"y").is_complete

    await asyncio.to_thread(script)


async def test_a_wrong_name_leaves_no_file_behind(client: FleetClient, tmp_path: Path) -> None:
    for attach in ({"10.image": tmp_path / "nowhere.png"}, {"image": b"x"}, {"10.": b"x"}):
        with pytest.raises(Refusal) as refused:
            await client.submit(edit(), attach=attach)
        assert refused.value.code is RefusalCode.INVALID_REQUEST
    with pytest.raises(Refusal, match="the inputs are not valid"):
        await client.submit(edit(), inputs=[{"node": "10"}])
    assert left_in(tmp_path / "files") == []


async def test_a_repeat_with_the_same_reference_brings_the_same_job(client: FleetClient) -> None:
    jobs = [await client.submit(edit(), attach={"10.image": b"x"}, reference="r") for _ in range(2)]
    assert jobs[0].id == jobs[1].id and jobs[1].is_repeat


async def test_a_hub_without_files_says_so() -> None:
    async with running_hub() as rig, FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
        with pytest.raises(Refusal, match="keeps no files"):
            await client.submit(edit(), attach={"10.image": b"x"})


async def test_an_answer_that_was_lost_does_not_lose_the_upload() -> None:
    """The first PUT is taken and its answer is lost; the second is told that the file is there."""
    puts = 0

    async def put(request: web.Request) -> web.StreamResponse:
        nonlocal puts
        puts += 1
        assert "authorization" not in request.headers, "the link is the proof"
        assert await request.read() == b"x"
        if puts == 1:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        problem = {"code": "wrong_phase", "status": 409, "detail": "received already"}
        return web.json_response(problem, status=409, content_type="application/problem+json")

    async def said(request: web.Request) -> web.Response:
        view: dict[str, Any] = {
            "id": "f_1",
            "name": "file",
            "type": "a/b",
            "kind": "input",
            "created_at": 1.0,
        }
        view["link"] = {"method": "PUT", "url": "/put", "expires_at": 2.0}
        return web.json_response(view)

    app = web.Application()
    app.add_routes([web.post("/api/files", said), web.put("/put", put)])
    app.add_routes([web.post("/api/files/f_1/complete", said)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with FleetClient(f"http://127.0.0.1:{port}", "cfk_1", patience_s=5.0) as client:
            assert (await client.upload(b"x")).id == "f_1"
            assert puts == 2
    finally:
        await runner.cleanup()
    async with FleetClient(f"http://127.0.0.1:{port}", patience_s=0.1) as client:
        with pytest.raises(Fault):
            await client.upload(b"x")


async def test_a_file_that_breaks_off_goes_on_where_it_was_and_is_seen_whole_or_not_at_all(
    tmp_path: Path,
) -> None:
    content = bytes(range(256)) * 4096
    asked: list[str | None] = []
    breaks = {1: 300_000, 2: 500_000}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        found = re.search(
            r"range: bytes=(\d+)-\r\nif-range: \"v1\"|if-range: \"v1\"\r\nrange: bytes=(\d+)-", head
        )
        start = 0 if found is None else int(found[1] or found[2])
        asked.append(None if found is None else str(start))
        status = "200 OK" if found is None else "206 Partial Content"
        writer.write(
            f'HTTP/1.1 {status}\r\netag: "v1"\r\ncontent-length: {len(content) - start}\r\n\r\n'.encode()
        )
        writer.write(content[start : breaks.get(len(asked), len(content))])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/view"
    file, path = OutputFile("9", "images", "large.bin", url=url), tmp_path / "large.bin"
    path.write_bytes(b"before")
    async with server, FleetClient("http://127.0.0.1:9") as client:
        assert await client.save(file, path) == len(content)
        assert await asyncio.to_thread(path.read_bytes) == content
        first, second, third = asked
        # What came and was not read yet when the way broke may be asked for again; never from the beginning.
        assert first is None and second is not None and third is not None
        assert 0 < int(second) <= 300_000 and int(second) < int(third) <= 500_000
        path.write_bytes(b"before")
        # The next try brings nothing more: then it is over.
        breaks.update({4: 300_000, 5: 0, 6: 0})
        with pytest.raises(Fault, match=r"large\.bin"):
            await client.save(file, path)
        assert left_in(tmp_path) == ["large.bin"]
        assert await asyncio.to_thread(path.read_bytes) == b"before"
