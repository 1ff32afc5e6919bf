"""Files in S3-compatible storage keep the contract, on a real server that checks what is signed."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.contract._assets import (
    ACME,
    CONTENT,
    AssetsContract,
    MakeAssets,
    Moved,
    apart,
    read,
    refusal,
    uploaded,
)
from tests.servers.s3_server import CREDENTIALS, S3Server, s3_server
from yarl import URL

from comfyfleet.files.s3 import S3FileStore
from comfyfleet.files.s3_storage import S3Bucket, S3Credentials, S3Storage
from comfyfleet.model.errors import Fault, RefusalCode
from comfyfleet.model.file import FileGrant
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.ports import DocumentStore
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.testing.time import ManualClock


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


class _Bench:
    def __init__(self, assets: S3FileStore, clock: ManualClock, session: aiohttp.ClientSession) -> None:
        self.assets = assets
        self.clock = clock
        self._session = session

    async def move(
        self, grant: FileGrant, content: bytes | None = None, *, method: str = "", **headers: str
    ) -> Moved:
        sent = {**grant.headers, **headers}
        if content is None:
            sent.pop("content-length", None)
        async with self._session.request(
            method or grant.method,
            URL(grant.url, encoded=True),
            data=content,
            headers=sent,
            skip_auto_headers=("content-type",),
        ) as response:
            return Moved(response.status, response.headers, await response.read())

    async def swept(self) -> None:
        await self.assets.swept()


class TestS3Assets(AssetsContract):
    answers_the_same_bytes_again = False
    refuses_other_bytes_as = RefusalCode.WRONG_PHASE

    @pytest.fixture(params=["central", "apart"])
    def make_assets(self, server: S3Server, request: pytest.FixtureRequest) -> MakeAssets:
        @asynccontextmanager
        async def make(**options: Any) -> AsyncIterator[_Bench]:
            clock, documents = ManualClock(time.time()), MemoryDocumentStore()
            if request.param == "apart":
                options["documents_of"] = apart(documents)
            prefix = f"of tests/{secrets.token_hex(4)}"
            async with (
                S3FileStore(server.bucket, CREDENTIALS, documents, clock, prefix=prefix, **options) as assets,
                aiohttp.ClientSession() as session,
            ):
                yield _Bench(assets, clock, session)

        return make


@asynccontextmanager
async def some_assets(server: S3Server, **options: Any) -> AsyncIterator[tuple[_Bench, S3Storage, str]]:
    clock = ManualClock(time.time())
    prefix = secrets.token_hex(4)
    storage = S3Storage(server.bucket, CREDENTIALS)
    async with (
        S3FileStore(
            server.bucket, CREDENTIALS, MemoryDocumentStore(), clock, prefix=prefix, **options
        ) as assets,
        aiohttp.ClientSession() as session,
    ):
        yield _Bench(assets, clock, session), storage, f"{prefix}/"
    await storage.close()


async def test_keys_carry_tenant_job_and_lease_and_no_name_leads_out_of_the_prefix(server: S3Server) -> None:
    async with some_assets(server) as (bench, storage, prefix):
        one = await uploaded(bench, kind="output", job_id=JobId("j"), attempt_id="j/2/7/1", name="../../x")
        assert await storage.keys(prefix, "", 10) == [f"{prefix}acme/j/2/7/1/{one.file_id}"]
        two = await uploaded(bench, tenant=TenantId(".."), name="a/ü b?.png")
        three = await uploaded(bench, tenant=TenantId("a/b c&é"))
        assert await storage.keys(f"{prefix}%2E%2E/", "", 10) == [f"{prefix}%2E%2E/inputs/{two.file_id}"]
        assert len(await storage.keys(prefix, "", 10)) == 3
        for record in (one, two, three):
            got = await bench.move(await bench.assets.grant(record, "GET"))
            assert (got.status, got.content) == (200, CONTENT)


async def test_a_link_to_write_is_good_for_the_announced_length_type_and_sha256_alone(
    server: S3Server,
) -> None:
    async with some_assets(server) as (bench, storage, prefix):
        record = await bench.assets.reserve(ACME, content_type="image/png", size=4, sha256="0" * 64)
        put = await bench.assets.grant(record, "PUT")
        assert put.headers.keys() == {
            "content-type",
            "content-length",
            "if-none-match",
            "x-amz-checksum-sha256",
        }
        for name, other in (
            ("content-type", "text/html"),
            ("if-none-match", '"x"'),
            ("x-amz-checksum-sha256", "iNQmb9TmM40TuEX88olXnVS6KtBWTTFSCJdHJGVb0rE="),
        ):
            assert (await bench.move(put, b"1234", **{name: other})).status == 403
        assert (await bench.move(put, b"1234")).status == 400
        assert await storage.keys(prefix, "", 10) == []
        assert await refusal(bench.assets.reserve(ACME)) is RefusalCode.INVALID_REQUEST


async def test_objects_that_no_record_tells_of_are_swept_once_they_are_old(server: S3Server) -> None:
    async with some_assets(server, keep_s=1000.0) as (bench, storage, prefix):
        orphan = await uploaded(bench)
        await bench.assets._documents.remove("files", orphan.file_id)

        async def content() -> AsyncIterator[bytes]:
            yield b"x"

        await storage.write(f"{prefix}somebody's/notes.txt", content(), {"content-length": "1"})
        for seconds, left in ((500, 2), (600, 1)):
            await bench.clock.advance(seconds)
            await bench.assets.reserve(ACME, size=1)
            await bench.swept()
            assert len(await storage.keys(prefix, "", 10)) == left
        assert await storage.keys(prefix, "", 10) == [f"{prefix}somebody's/notes.txt"]


async def test_an_object_whose_record_lies_with_its_tenant_is_no_orphan_while_that_is_away_or_the_stub_is_lost(
    server: S3Server,
) -> None:
    tenants, is_away = MemoryDocumentStore(), False

    async def documents_of(_: TenantId) -> DocumentStore:
        if is_away:
            raise Fault("the database is away")
        return tenants

    async with some_assets(server, keep_s=1000.0, documents_of=documents_of) as (bench, storage, prefix):
        mine = await uploaded(bench, tenant=TenantId("a b/é"))
        assets, key = bench.assets, (await storage.keys(prefix, "", 10))[0]

        async def in_use(_: str) -> bool:
            return True

        assets.in_use = in_use
        await bench.clock.advance(1100)
        assert await assets._documents.remove("files", mine.file_id), "as after a lost store"
        for is_away in (True, False):  # noqa: B007
            await assets._remove_orphans()
            assert await storage.keys(prefix, "", 10) == [key]
        await tenants.remove("files", mine.file_id)
        await assets._remove_orphans()
        assert await storage.keys(prefix, "", 10) == []


async def test_a_storage_that_is_away_or_refuses_is_told_without_a_secret(server: S3Server) -> None:
    clock = ManualClock(time.time())
    wrong = S3Credentials(CREDENTIALS.access_key, "guessed")
    nowhere = S3Bucket("http://127.0.0.1:9", "eu", "fleet")
    no_bucket = S3Bucket(server.bucket.endpoint, server.bucket.region, "none-such")
    told = []
    for bucket, credentials in ((server.bucket, wrong), (nowhere, CREDENTIALS), (no_bucket, CREDENTIALS)):
        async with S3FileStore(bucket, credentials, MemoryDocumentStore(), clock) as assets:
            record = await assets.reserve(ACME, size=1)
            for work in (assets.look(), assets.complete(record.file_id), read(assets, record)):
                try:
                    await work
                except Exception as error:
                    told.append(f"{error!r} {error}")
                    if bucket is not no_bucket:
                        assert isinstance(error, Fault)
    assert "credentials" in told[0] and "cannot reach" in told[3] and "create the bucket" in told[6]
    for text in told:
        assert "ignature=" not in text and "guessed" not in text and CREDENTIALS.secret_key not in text
    assert CREDENTIALS.secret_key not in repr(CREDENTIALS)
