"""Large files in S3-compatible storage: sent in parts, a few at a time, and put together by the hub alone."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from tests.hub._hub import HubRig, submission
from tests.hub.test_inputs import brings, ended, submitted
from tests.hub.test_s3_files import MIB, OnDisk, a_file, a_lease, put, result_with, s3_hub, sha
from tests.servers.s3_server import CREDENTIALS, S3Server, s3_server

from comfyfleet.client.client import FleetClient
from comfyfleet.engine.system import SystemClock
from comfyfleet.files.s3 import S3FileStore
from comfyfleet.files.s3_storage import S3Multipart, S3Storage
from comfyfleet.hub.local_worker_api import LocalWorkerApi
from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, LeasedJob, Release
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.model.job import OutputFile
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.testing.time import ManualClock
from comfyfleet.wire import files
from comfyfleet.worker.transports.http import HttpWorkerApi

PART = 5 * MIB
CONTENT = bytes(range(256)) * (4 * 1024) * 12 + b"and a little more"
"""Three parts, the last one shorter."""
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PARTS = [CONTENT[start : start + PART] for start in range(0, len(CONTENT), PART)]
OUT = OutputFile("2", "images", "out.png")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


async def under_way(server: S3Server, prefix: str = "hub/") -> int:
    storage = S3Storage(server.bucket, CREDENTIALS)
    found = await S3Multipart(storage).uploads(prefix, None, 100)
    await storage.close()
    return len(found)


def body_of(number: int, content: bytes) -> dict[str, Any]:
    return {"parts": [{"number": number, "sha256": hashlib.sha256(content).hexdigest()}]}


async def announced(rig: HubRig, **more: Any) -> dict[str, Any]:
    said = {"name": "large.bin", "size": len(CONTENT), "sha256": DIGEST, **more}
    answer = await rig.post("/api/files", said, role=Role.TENANT)
    assert answer.status == 201, answer.content
    return dict(answer.body)


async def part_view(rig: HubRig, file_id: str, number: int, content: bytes) -> files.FileView:
    answer = await rig.post(f"/api/files/{file_id}/parts", body_of(number, content), role=Role.TENANT)
    assert answer.status == 200, answer.content
    return msgspec.convert(
        {
            "id": file_id,
            "name": "",
            "type": "",
            "kind": "input",
            "created_at": 0.0,
            "link": answer.body["links"][0],
        },
        files.FileView,
    )


async def test_large_files_go_up_in_parts_both_ways_and_nothing_is_left_under_way(
    server: S3Server, tmp_path: Path
) -> None:
    source = a_file(tmp_path / "source", 17 * MIB)
    digest = sha(source)
    async with (
        s3_hub(server.bucket, part_bytes=PART) as rig,
        FleetClient(rig.url, rig.keys[Role.TENANT]) as client,
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
    ):
        uploaded = await client.upload(source)
        assert (uploaded.size, uploaded.sha256, uploaded.is_complete) == (17 * MIB, digest, True)
        job_id = await submitted(rig, brings(uploaded.id))
        job = await a_lease(api)
        await api.fetch_input(job, job.inputs[0], tmp_path / "fetched")
        kept = await api.store_output(job.ref, OUT, OnDisk(tmp_path / "fetched"))
        assert await under_way(server) == 1, "it is the hub that puts it together"
        await api.complete(Completion(job.ref, result_with(kept), 1.0))
        (file,) = (await ended(rig, job_id))["result"]["files"]
        await client.save(msgspec.convert(file, OutputFile), tmp_path / "back")
        assert sha(tmp_path / "back") == digest
        assert await under_way(server) == 0
        assert "file_parts" not in await rig.documents.collections()


async def test_a_part_that_is_missing_is_asked_for_and_the_others_need_not_be_sent_again(
    server: S3Server,
) -> None:
    async with s3_hub(server.bucket, part_bytes=PART) as rig:
        file = await announced(rig)
        assert file["parts"] == {"size": PART, "count": 3} and file["link"]["method"] == "PUT"
        for number in (3, 1):
            view = await part_view(rig, file["id"], number, PARTS[number - 1])
            assert await put(view, PARTS[number - 1]) == 200
        short = await rig.post(f"/api/files/{file['id']}/complete", role=Role.TENANT)
        assert short.code == "wrong_phase" and "2 of 3 parts" in short.body["detail"]
        view = await part_view(rig, file["id"], 2, PARTS[1])
        assert await put(view, PARTS[1]) == 200
        done = await rig.post(f"/api/files/{file['id']}/complete", role=Role.TENANT)
        assert done.status == 200 and done.body["sha256"] == DIGEST
        assert await put(view, PARTS[1]) == 404, "there is nothing left to put it to"
        late = await rig.post(f"/api/files/{file['id']}/parts", body_of(2, b""), role=Role.TENANT)
        assert late.code == "wrong_phase"


async def test_a_link_to_a_part_takes_that_part_alone(server: S3Server) -> None:
    async with s3_hub(server.bucket, part_bytes=PART) as rig:
        file = await announced(rig)
        view = await part_view(rig, file["id"], 1, PARTS[0])
        assert view.link is not None
        free = {name: value for name, value in view.link.headers.items() if name != "content-length"}
        honest = msgspec.structs.replace(view, link=msgspec.structs.replace(view.link, headers=free))
        for wrong in (PARTS[0][:-1], PARTS[0] + b"+", b"x" * PART, b""):
            assert await put(honest, wrong) in (400, 403)
        moved = view.link.url.replace("partNumber=1", "partNumber=2")
        elsewhere = msgspec.structs.replace(view, link=msgspec.structs.replace(view.link, url=moved))
        assert await put(elsewhere, PARTS[0]) == 403
        assert [await put(view, PARTS[0]) for _ in range(2)] == [200, 200], "the same once more"
        for number, code in ((0, "invalid_request"), (4, "invalid_request")):
            wrong_number = await rig.post(
                f"/api/files/{file['id']}/parts", body_of(number, b""), role=Role.TENANT
            )
            assert wrong_number.code == code
        other = (await rig.post("/api/keys", {"role": "tenant", "tenant": "other"})).body["key"]
        theirs = await rig.post(f"/api/files/{file['id']}/parts", body_of(1, PARTS[0]), key=other)
        assert theirs.code == "not_found"
        small = await announced(rig, size=10)
        assert "parts" not in small
        whole = await rig.post(f"/api/files/{small['id']}/parts", body_of(1, b""), role=Role.TENANT)
        assert whole.code == "invalid_request" and "one piece" in whole.body["detail"]


async def test_parts_that_are_not_the_file_that_was_announced_complete_nothing(server: S3Server) -> None:
    async with s3_hub(server.bucket, part_bytes=PART) as rig:
        file = await announced(rig)
        for number, content in enumerate((PARTS[0], PARTS[0][::-1], PARTS[2]), start=1):
            assert await put(await part_view(rig, file["id"], number, content), content) == 200
        answer = await rig.post(f"/api/files/{file['id']}/complete", role=Role.TENANT)
        assert answer.code == "invalid_request" and "SHA-256" in answer.body["detail"]
        assert not (await rig.get(f"/api/files/{file['id']}", role=Role.TENANT)).body.get("is_complete")


async def asked(api: HttpWorkerApi, job: LeasedJob, file_id: str) -> RefusalCode:
    part = files.PartBody(1, hashlib.sha256(PARTS[0]).hexdigest())
    with pytest.raises(Refusal) as refused:
        await api._ask("parts", files.WorkerPartsBody(job.ref, file_id, (part,)), files.PartGrants)
    return refused.value.code


async def test_links_to_parts_are_for_the_attempt_whose_file_it_is(server: S3Server) -> None:
    async with (
        s3_hub(server.bucket, part_bytes=PART) as rig,
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
    ):
        mine = await announced(rig)
        await submitted(rig, submission())
        zombie = await a_lease(api)
        said = files.output_body("out.bin", len(CONTENT), DIGEST)
        asking = files.GrantsBody(zombie.ref, (said,))
        (stale,) = (await api._ask("grants", asking, files.FileGrants)).files
        assert await asked(api, zombie, mine["id"]) is RefusalCode.NOT_FOUND
        await api.release(Release(zombie.ref, "retry"))
        assert await asked(api, zombie, stale.id) is RefusalCode.LEASE_LOST
        job = await a_lease(api, "2")
        assert await asked(api, job, stale.id) is RefusalCode.NOT_FOUND


async def test_a_part_that_gets_lost_is_sent_again_and_no_other(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").write_bytes(CONTENT)
    async with (
        s3_hub(server.bucket, part_bytes=PART) as rig,
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
    ):
        await submitted(rig, submission())
        job = await a_lease(api)
        as_it_is, sent = api._links.put, list[int]()

        async def put_badly(link: str, path: Path, headers: Any, part: Any) -> None:
            sent.append(part.number)
            if sent.count(2) == 1 and part.number == 2:
                raise Fault("the way broke")
            await as_it_is(link, path, headers, part)

        monkeypatch.setattr(api._links, "put", put_badly)
        kept = await api.store_output(job.ref, OUT, OnDisk(tmp_path / "made"))
        assert sorted(sent) == [1, 2, 2, 3]
        await api.complete(Completion(job.ref, result_with(kept), 1.0))


async def test_a_look_that_takes_long_is_asked_for_again_and_made_once(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, go_on = 0, asyncio.Event()
    as_it_is = S3FileStore._digest

    async def slowly(self: S3FileStore, record: FileRecord) -> str:
        nonlocal looks
        looks += 1
        await go_on.wait()
        return await as_it_is(self, record)

    monkeypatch.setattr(S3FileStore, "_digest", slowly)
    async with (
        s3_hub(server.bucket, part_bytes=PART, look_s=0.05) as rig,
        FleetClient(rig.url, rig.keys[Role.TENANT], patience_s=1.0) as client,
    ):
        uploading = asyncio.create_task(client.upload(CONTENT))
        while not looks:
            await asyncio.sleep(0.01)
        (record,) = await rig.documents.listing("files")
        answer = await rig.post(f"/api/files/{record.name}/complete", role=Role.TENANT)
        assert answer.code == "unavailable" and "retry-after" in answer.headers
        go_on.set()
        assert (await uploading).is_complete and looks == 1


async def test_an_agent_in_the_hubs_own_process_waits_for_the_look_and_sends_nothing_again(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").write_bytes(CONTENT)
    asked, go_on = 0, asyncio.Event()
    as_it_is = S3FileStore.complete

    async def counted(self: S3FileStore, file_id: str) -> FileRecord:
        nonlocal asked
        asked += 1
        if asked == 2:
            go_on.set()
        return await as_it_is(self, file_id)

    async def slowly(self: S3FileStore, record: FileRecord) -> str:
        await go_on.wait()
        return DIGEST

    monkeypatch.setattr(S3FileStore, "complete", counted)
    monkeypatch.setattr(S3FileStore, "_digest", slowly)
    options: dict[str, Any] = {"part_bytes": PART, "max_put_bytes": PART}
    async with s3_hub(server.bucket) as rig:
        await submitted(rig, submission())
        async with HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as far:
            job = await a_lease(far)
        assets = S3FileStore(server.bucket, CREDENTIALS, rig.documents, SystemClock(), look_s=0.05, **options)
        inside = LocalWorkerApi(rig.engine, assets)
        kept = await inside.store_output(job.ref, OUT, OnDisk(tmp_path / "made"))
        assert asked == 2 and [each.name for each in await rig.documents.listing("files")] == [kept]
        await assets.close()


async def test_a_thumbnail_lies_in_the_storage_beside_its_picture(server: S3Server) -> None:
    target = io.BytesIO()
    Image.new("RGB", (600, 300)).save(target, "PNG")
    async with (
        s3_hub(server.bucket, "pictures") as rig,
        FleetClient(rig.url, rig.keys[Role.TENANT]) as client,
    ):
        picture = await client.upload(target.getvalue(), name="p.png")
        small = (await rig.get(f"/api/files/{picture.id}/thumbnail?size=64", role=Role.TENANT)).body
        link = OutputFile("", "", "small.webp", file_id=small["id"], url=small["link"]["url"])
        assert Image.open(io.BytesIO(await client.fetch(link))).size == (64, 32)
        storage = S3Storage(server.bucket, CREDENTIALS)
        assert await storage.keys("pictures/acme/thumbnails/", "", 10) == [
            f"pictures/acme/thumbnails/{small['id']}"
        ]
        await storage.close()


async def test_a_file_that_is_too_large_for_one_piece_has_no_such_link(
    server: S3Server, tmp_path: Path
) -> None:
    async with s3_hub(server.bucket, part_bytes=PART, max_put_bytes=PART + 1) as rig:
        file = await announced(rig)
        assert file["parts"] == {"size": PART, "count": 3, "is_required": True} and "link" not in file
        async with FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
            assert (await client.upload(CONTENT)).sha256 == DIGEST


# in the hub's own process, and the end of uploads


@pytest.fixture
async def assets(server: S3Server) -> AsyncIterator[S3FileStore]:
    async with S3FileStore(
        server.bucket,
        CREDENTIALS,
        MemoryDocumentStore(),
        ManualClock(time.time()),
        prefix="inside",
        keep_s=1000.0,
        part_bytes=PART,
        max_put_bytes=PART,
    ) as assets:
        yield assets


async def pieces(content: bytes, step: int = 777_777) -> AsyncIterator[bytes]:
    for start in range(0, len(content), step):
        yield content[start : start + step]


async def test_whoever_is_inside_sends_a_large_file_as_one(server: S3Server, assets: S3FileStore) -> None:
    record = await assets.reserve(TenantId("acme"), size=len(CONTENT), sha256=DIGEST)
    wrong = (
        (CONTENT[:-1], RefusalCode.INVALID_REQUEST),
        (CONTENT[: PART + 1], RefusalCode.INVALID_REQUEST),
        (CONTENT + b"+", RefusalCode.TOO_LARGE),
    )
    for content, code in wrong:
        with pytest.raises(Refusal) as refused:
            await assets.receive(record, pieces(content))
        assert refused.value.code is code
        assert await under_way(server, "inside/") == 0
    await assets.receive(record, pieces(CONTENT))
    assert (await assets.complete(record.file_id)).sha256 == DIGEST
    assert b"".join([piece async for piece in assets.read(record)]) == CONTENT


async def test_uploads_that_nobody_ended_go_with_their_time(server: S3Server, assets: S3FileStore) -> None:
    clock = assets._clock
    assert isinstance(clock, ManualClock)
    known, lost = [await assets.reserve(TenantId("acme"), size=len(CONTENT), sha256=DIGEST) for _ in range(2)]
    for record in (known, lost):
        await assets.part_grants(record, {1: DIGEST})
    await assets._documents.remove("files", lost.file_id)
    for seconds, left in ((500, 2), (600, 0)):
        await clock.advance(seconds)
        await assets.reserve(TenantId("acme"), size=1)
        await assets.swept()
        assert await under_way(server, "inside/") == left
    assert await assets.get(known.file_id) is None


async def test_of_two_who_begin_an_upload_at_once_one_is_begun(server: S3Server, assets: S3FileStore) -> None:
    record = await assets.reserve(TenantId("acme"), size=len(CONTENT), sha256=DIGEST)
    before = await under_way(server, "inside/")
    grants = await asyncio.gather(*(assets.part_grants(record, {number: DIGEST}) for number in (1, 2, 3)))
    assert len({grant.url.partition("uploadId=")[2].partition("&")[0] for (grant,) in grants}) == 1
    assert await under_way(server, "inside/") == before + 1
