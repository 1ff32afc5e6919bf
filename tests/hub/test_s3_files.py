"""Files of jobs in S3-compatible storage, from the caller by way of the worker and back: every byte goes past the hub,
and nothing is believed that it has not looked at. What holds for a folder of the hub as well is shown there too."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.hub._hub import HubRig, running_hub, submission
from tests.hub.test_inputs import OFFERS, PICTURE, brings, ended, submitted
from tests.servers.s3_server import CREDENTIALS, S3Server, s3_server
from tests.worker._comfyui import QUICK, picture
from tests.worker._scripted import quick
from yarl import URL

from comfyfleet.client.client import FleetClient
from comfyfleet.files.s3 import S3FileStore
from comfyfleet.files.s3_storage import S3Bucket, S3Storage, presigned
from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker, Release
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.ports import Clock, DocumentStore, FileStore
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.wire import files
from comfyfleet.wire.files import resolved
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

MIB = 1 << 20
AHub = Callable[[], AbstractAsyncContextManager[HubRig]]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@asynccontextmanager
async def s3_hub(bucket: S3Bucket, prefix: str = "hub", **options: Any) -> AsyncIterator[HubRig]:
    made: list[S3FileStore] = []

    def assets_on(documents: DocumentStore, clock: Clock) -> FileStore:
        made.append(S3FileStore(bucket, CREDENTIALS, documents, clock, prefix=prefix, **options))
        return made[0]

    try:
        async with running_hub(assets_on=assets_on) as rig:
            yield rig
    finally:
        for assets in made:
            await assets.close()


@pytest.fixture(params=["s3", "local"])
def a_hub(request: pytest.FixtureRequest, server: S3Server, tmp_path: Path) -> AHub:
    """Files in a storage, or in the hub's own folder."""
    if request.param == "s3":
        return lambda: s3_hub(server.bucket)
    return lambda: running_hub(folder=tmp_path / "files")


class OnDisk:
    """A connector's half of an upload: the file is there already."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def save(self, file: OutputFile, path: Path) -> int:
        await asyncio.to_thread(shutil.copyfile, self._path, path)
        return 0


def a_file(path: Path, size: int) -> Path:
    with path.open("wb") as target:
        for start in range(0, size, MIB):
            target.write(os.urandom(min(MIB, size - start)))
    return path


def sha(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


async def a_lease(api: HttpWorkerApi, poll: str = "1") -> LeasedJob:
    await api.register(RegisterWorker(WorkerId("gpu"), OFFERS))
    job = await api.poll(Poll(WorkerId("gpu"), PollId(poll), 5))
    assert job is not None
    # Taken up: a large file on a busy machine may take longer than a lease that nobody has heard of lasts.
    await api.heartbeat(WorkerId("gpu"), [job.ref])
    return job


def result_with(file_id: str | None) -> JobResult:
    return JobResult(files=(OutputFile("2", "images", "out.png", file_id=file_id),))


async def a_grant(api: HttpWorkerApi, job: LeasedJob, content: bytes) -> files.FileView:
    said = files.output_body("out.png", len(content), hashlib.sha256(content).hexdigest())
    asked = files.GrantsBody(job.ref, (said,))
    (view,) = (await api._ask("grants", asked, files.FileGrants)).files
    return view


async def put(view: files.FileView, content: bytes, hub: str = "") -> int:
    assert view.link is not None
    url = URL(resolved(hub, view.link.url), encoded=True)
    async with (
        aiohttp.ClientSession() as session,
        session.put(url, data=io.BytesIO(content), headers=view.link.headers) as response,
    ):
        return response.status


# the whole way


class Tapped:
    """Passes everything on, and keeps what was said: the beginning of each request."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self.heard = bytearray()

    async def __aenter__(self) -> Tapped:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_asked: bool) -> None:
            try:
                while piece := await source.read(65536):
                    if is_asked:
                        self.heard += piece
                    sink.write(piece)
                    await sink.drain()
            except ConnectionError:
                pass
            finally:
                sink.close()

        await asyncio.gather(pump(reader, far_writer, True), pump(far_reader, writer, False))


async def test_a_picture_goes_to_a_worker_and_back_and_no_key_goes_to_the_storage(server: S3Server) -> None:
    async with (
        Tapped(server.port) as tapped,
        s3_hub(S3Bucket(f"http://127.0.0.1:{tapped.port}", server.bucket.region, server.bucket.name)) as rig,
        FakeComfyUI() as fake,
        FleetClient(rig.url, rig.keys[Role.TENANT]) as client,
    ):
        first = await submitted(rig, submission(workflow=picture()))
        async with (
            HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
            Agent(api, WorkerId("gpu-a"), [ComfyUI(fake.url, QUICK)], quick()),
        ):
            (made,) = (await ended(rig, first))["result"]["files"]
            png = await client.fetch(msgspec.convert(made, OutputFile))
            assert png.startswith(b"\x89PNG")
            uploaded = await client.upload(png, name="photo.png")
            assert uploaded.is_complete and uploaded.sha256 == hashlib.sha256(png).hexdigest()
            second = await submitted(rig, brings(uploaded.id))
            answer = await ended(rig, second)
            assert answer["status"] == "completed", answer
        (out,) = answer["result"]["files"]
        await fake.stop()
        assert out["url"].startswith(f"http://127.0.0.1:{tapped.port}/"), "it comes from the storage itself"
        assert (await client.fetch(msgspec.convert(out, OutputFile))).startswith(b"\x89PNG")
        local = f"/api/files/{uploaded.id}/content?expires=99999999999&signature=0"
        assert (await rig.get(local, role=None)).code == "unauthenticated"
        heard = bytes(tapped.heard).lower()
        assert heard.count(b"http/1.1") > 8 and b"if-none-match: *" in heard
        assert b"authorization" not in heard and b"cfk_" not in heard


@pytest.mark.parametrize("size", [1024, 64 * MIB])
async def test_files_of_any_size_pass_through_little_memory(a_hub: AHub, tmp_path: Path, size: int) -> None:
    source = a_file(tmp_path / "source", size)
    digest = sha(source)
    async with (
        a_hub() as rig,
        FleetClient(rig.url, rig.keys[Role.TENANT]) as client,
        HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
    ):
        tracemalloc.start()
        try:
            uploaded = await client.upload(source)
            await submitted(rig, brings(uploaded.id))
            job = await a_lease(api)
            (file,) = job.inputs
            await api.fetch_input(job, file, tmp_path / "fetched")
            kept = await api.store_output(
                job.ref, OutputFile("2", "images", "out.png"), OnDisk(tmp_path / "fetched")
            )
            await api.complete(Completion(job.ref, result_with(kept), 1.0))
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sha(tmp_path / "fetched") == digest
        seen = await rig.get(f"/api/files/{kept}", role=Role.TENANT)
        assert (seen.body["size"], seen.body["sha256"], seen.body["is_complete"]) == (size, digest, True)
        assert most < 12 * MIB, f"{most / MIB:.1f} MiB of memory for {size / MIB:.1f} MiB of file"


async def test_a_link_that_has_expired_is_renewed_with_the_lease(server: S3Server, tmp_path: Path) -> None:
    async with (
        s3_hub(server.bucket) as rig,
        FleetClient(rig.url, rig.keys[Role.TENANT]) as client,
    ):
        await submitted(rig, brings((await client.upload(PICTURE, name="in.png")).id))
        async with HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api:
            job = await a_lease(api)
            (file,) = job.inputs
            key, then = f"hub/acme/inputs/{file.file_id}", time.time() - 3600
            url = presigned(server.bucket, CREDENTIALS, "GET", key, now=then, expires_s=900)
            old = msgspec.structs.replace(file, url=url)
            await api.fetch_input(job, old, tmp_path / "fetched")
            assert (tmp_path / "fetched").read_bytes() == PICTURE


# what is not believed


Spoil = Callable[[S3Storage, str, files.FileView], Any]


async def _nothing(storage: S3Storage, key: str, view: files.FileView) -> None:
    """Never uploaded."""


async def _altered(storage: S3Storage, key: str, view: files.FileView) -> None:
    await put(view, b"right")
    await storage.remove(key)
    await _written(storage, key, b"wrong")


async def _short(storage: S3Storage, key: str, view: files.FileView) -> None:
    await _written(storage, key, b"rig")


async def _written(storage: S3Storage, key: str, content: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield content

    await storage.write(key, pieces(), {"content-length": str(len(content))})


@pytest.mark.parametrize("spoil", [_nothing, _altered, _short])
async def test_an_upload_that_is_missing_short_or_altered_completes_nothing(
    server: S3Server, spoil: Spoil
) -> None:
    storage = S3Storage(server.bucket, CREDENTIALS)
    async with s3_hub(server.bucket) as rig, HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api:
        job_id = await submitted(rig, submission())
        job = await a_lease(api)
        view = await a_grant(api, job, b"right")
        await spoil(storage, f"hub/acme/{job.attempt_id}/{view.id}", view)
        with pytest.raises(Refusal) as refused:
            await api.complete(Completion(job.ref, result_with(view.id), 1.0))
        assert refused.value.code is RefusalCode.INVALID_REQUEST
        assert (await rig.get(f"/api/jobs/{job_id}", role=Role.TENANT)).body["status"] == "leased"
        again = await a_grant(api, job, b"right")
        assert await put(again, b"right") == 200
        await api.complete(Completion(job.ref, result_with(again.id), 1.0))
        assert (await ended(rig, job_id))["status"] == "completed"
    await storage.close()


@pytest.mark.parametrize("content", [b"rig", b"wrong", b"right and more"])
async def test_what_an_attempt_uploads_short_altered_or_long_is_not_taken(
    a_hub: AHub, content: bytes
) -> None:
    async with a_hub() as rig, HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api:
        job_id = await submitted(rig, submission())
        job = await a_lease(api)
        view = await a_grant(api, job, b"right")
        assert view.link is not None
        # An honest length: a sender that lies about it is hung up on.
        free = {name: value for name, value in view.link.headers.items() if name != "content-length"}
        honest = msgspec.structs.replace(view, link=msgspec.structs.replace(view.link, headers=free))
        assert await put(honest, content, rig.url) >= 400
        with pytest.raises(Refusal) as refused:
            await api.complete(Completion(job.ref, result_with(view.id), 1.0))
        assert refused.value.code is RefusalCode.INVALID_REQUEST
        assert (await rig.get(f"/api/jobs/{job_id}", role=Role.TENANT)).body["status"] == "leased"
        assert await put(view, b"right", rig.url) == 200
        await api.complete(Completion(job.ref, result_with(view.id), 1.0))


async def test_an_agent_whose_uploads_get_lost_fails_its_attempt(
    a_hub: AHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_hub() as rig, FakeComfyUI() as fake:
        async with HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api:

            async def lost(*_: object) -> None:
                """As if a storage had said yes and kept nothing."""

            monkeypatch.setattr(api._links, "put", lost)
            body = submission(workflow=picture(), max_attempts=1)
            job_id = await submitted(rig, body)
            async with Agent(api, WorkerId("gpu-a"), [ComfyUI(fake.url, QUICK)], quick()):
                answer = await ended(rig, job_id)
        assert answer["status"] == "failed" and "the file has not been received" in answer["error"]["message"]


async def test_a_late_upload_of_a_zombie_changes_nothing(a_hub: AHub) -> None:
    async with a_hub() as rig, HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api:
        job_id = await submitted(rig, submission())
        zombie = await a_lease(api)
        stale = await a_grant(api, zombie, b"zombie")
        await api.release(Release(zombie.ref, "retry"))
        job = await a_lease(api, "2")
        assert job.ref.number > zombie.ref.number
        view = await a_grant(api, job, b"fresh!")
        assert await put(view, b"fresh!", rig.url) == 200
        assert await put(stale, b"zombie", rig.url) == 200, "no storage knows of leases"
        with pytest.raises(Refusal):
            await api.complete(Completion(job.ref, result_with(stale.id), 1.0))
        await api.complete(Completion(job.ref, result_with(view.id), 1.0))
        with pytest.raises(Refusal) as refused:
            await api.complete(Completion(zombie.ref, result_with(stale.id), 1.0))
        assert refused.value.code is RefusalCode.LEASE_LOST
        assert await put(view, b"zombie", rig.url) >= 400
        # A storage refuses what is there; a hub answers the same bytes alike. Neither changes anything.
        assert await put(stale, b"zombie", rig.url) in (200, 409, 412)
        (file,) = (await ended(rig, job_id))["result"]["files"]
        assert file["file_id"] == view.id
        async with FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
            assert await client.fetch(msgspec.convert(file, OutputFile)) == b"fresh!"
        assert len((await rig.engine.get(JobId(job_id))).attempts) == 2
