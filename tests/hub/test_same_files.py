"""A program brings, fetches, lists and deletes files alike, whether its hub keeps them in a folder or in a storage."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.hub._hub import running_hub
from tests.hub.test_s3_files import AHub, s3_hub
from tests.servers.s3_server import S3Server, s3_server

from comfyfleet import FleetClient, Refusal, RefusalCode
from comfyfleet.model.access import Role

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["s3", "s3 in parts", "folder"])
def a_hub(request: pytest.FixtureRequest, server: S3Server, tmp_path: Path) -> AHub:
    if request.param == "folder":
        return lambda: running_hub(folder=tmp_path / "files")
    if request.param == "s3":
        return lambda: s3_hub(server.bucket, "same")
    return lambda: s3_hub(server.bucket, "parts", part_bytes=5 * MIB, max_put_bytes=6 * MIB)


async def test_the_same_program_does_it_with_every_kind_of_hub(a_hub: AHub, tmp_path: Path) -> None:
    content = bytes(range(256)) * (7 * MIB // 256)
    path = tmp_path / "photo.png"
    await asyncio.to_thread(path.write_bytes, content)
    async with a_hub() as rig, FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
        large, small = await client.upload(path), await client.upload(b"small", name="small.txt")
        assert (large.size, large.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert [each.id async for each in client.every_file()] == [large.id, small.id]
        # By what was answered, however long ago, or by its id alone.
        assert await client.fetch(small) == await client.fetch(small.id) == b"small"
        assert await client.save(large, tmp_path / "back.png") == len(content)
        assert await asyncio.to_thread((tmp_path / "back.png").read_bytes) == content
        await client.delete_file(large.id)
        for again in (client.fetch(large), client.fetch(large.id)):
            with pytest.raises(Refusal) as refused:
                await again
            assert refused.value.code is RefusalCode.NOT_FOUND
        assert [each.id async for each in client.every_file()] == [small.id]


async def test_the_same_form_does_it_with_every_kind_of_hub(a_hub: AHub) -> None:
    """Nobody says the size: a storage that wants it is told by the hub."""
    content = b"a picture" * MIB
    async with a_hub() as rig, FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
        headers = {"authorization": f"Bearer {rig.keys[Role.TENANT]}"}
        for said in ({}, {"size": str(len(content)), "sha256": hashlib.sha256(content).hexdigest()}):
            form = aiohttp.FormData(said)
            form.add_field("file", io.BytesIO(content), filename="a.png", content_type="image/png")
            async with rig.session.post(f"{rig.url}/api/files", data=form, headers=headers) as answer:
                assert answer.status == 201, await answer.text()
                made = await answer.json()
            assert (made["size"], made["is_complete"]) == (len(content), True)
            assert await client.fetch(made["id"]) == content
        wrong = aiohttp.FormData({"sha256": "0" * 64})
        wrong.add_field("file", b"x", filename="a.png")
        async with rig.session.post(f"{rig.url}/api/files", data=wrong, headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (400, "invalid_request")
        assert len((await client.files()).files) == 2
