"""What every place for files keeps to: grants that are good for one file, one method and a while; files that are what
was said of them, and are never written over."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import FileGrant, FileRecord
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.ports import DocumentStore, FileStore
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.testing.time import ManualClock

ACME, OTHER = TenantId("acme"), TenantId("other")
CONTENT = bytes(range(256)) * 4


class Moved(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes


class AssetsBench(Protocol):
    """A place for files, and somebody outside who has nothing but links."""

    clock: ManualClock

    @property
    def assets(self) -> FileStore: ...

    async def move(
        self, grant: FileGrant, content: bytes | None = None, *, method: str = "", **headers: str
    ) -> Moved: ...
    async def swept(self) -> None: ...


MakeAssets = Callable[..., AbstractAsyncContextManager[AssetsBench]]


def apart(central: DocumentStore) -> Callable[[TenantId], Awaitable[DocumentStore]]:
    """The records of one tenant lie in a database of its own."""
    own = MemoryDocumentStore()

    async def documents_of(tenant: TenantId) -> DocumentStore:
        return own if tenant == ACME else central

    return documents_of


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def reserved(bench: AssetsBench, content: bytes = CONTENT, **more: Any) -> FileRecord:
    said: dict[str, Any] = {
        "name": "in.png",
        "content_type": "image/png",
        "size": len(content),
        "sha256": sha(content),
    }
    return await bench.assets.reserve(more.pop("tenant", ACME), **(said | more))


async def uploaded(bench: AssetsBench, content: bytes = CONTENT, **more: Any) -> FileRecord:
    record = await reserved(bench, content, **more)
    moved = await bench.move(await bench.assets.grant(record, "PUT"), content)
    assert moved.status == 200, moved.content
    return await bench.assets.complete(record.file_id)


async def read(assets: FileStore, record: FileRecord) -> bytes:
    async with aclosing(assets.read(record)) as pieces:
        return b"".join([piece async for piece in pieces])


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for each in content:
        yield each


async def refusal(work: Any) -> RefusalCode:
    with pytest.raises(Refusal) as refused:
        await work
    return refused.value.code


def elsewhere(grant: FileGrant, old: str, new: str) -> FileGrant:
    assert old in grant.url
    return msgspec.structs.replace(grant, url=grant.url.replace(old, new))


class AssetsContract:
    answers_the_same_bytes_again = True
    """Whether a sender inside that repeats itself gets the same answer. A storage takes an object only once."""
    refuses_other_bytes_as = RefusalCode.INVALID_REQUEST

    """`make_assets(clock, **options)`; the clock starts at the true time, which a storage compares with its own."""

    async def test_a_file_goes_up_by_one_link_and_comes_down_by_another(
        self, make_assets: MakeAssets
    ) -> None:
        async with make_assets() as bench:
            record = await reserved(bench)
            assert not record.is_complete and record.received_at is None
            assert await refusal(bench.assets.complete(record.file_id)) is RefusalCode.WRONG_PHASE
            put = await bench.assets.grant(record, "PUT")
            assert (await bench.move(put, CONTENT)).status == 200
            done = await bench.assets.complete(record.file_id)
            assert done.is_complete and (done.size, done.sha256) == (len(CONTENT), sha(CONTENT))
            assert done.received_at == bench.clock.now()
            assert await bench.assets.complete(record.file_id) == done, "asked again, the same answer"
            assert await bench.assets.get(record.file_id) == done
            get = await bench.assets.grant(done, "GET")
            got = await bench.move(get)
            assert (got.status, got.content) == (200, CONTENT)
            assert got.headers["content-type"] == "image/png"
            assert got.headers["content-disposition"].startswith("attachment")
            part = await bench.move(get, range="bytes=10-19")
            assert (part.status, part.content) == (206, CONTENT[10:20])
            assert await read(bench.assets, done) == CONTENT

    @pytest.mark.parametrize(
        ("asked", "start", "end"),
        [
            ("bytes=0-0", 0, 1),
            ("bytes=1000-", 1000, 1024),
            ("bytes=-24", 1000, 1024),
            ("bytes=1000-9999", 1000, 1024),
        ],
    )
    async def test_a_range_is_served_alone(
        self, make_assets: MakeAssets, asked: str, start: int, end: int
    ) -> None:
        async with make_assets() as bench:
            get = await bench.assets.grant(await uploaded(bench), "GET")
            part = await bench.move(get, range=asked)
            assert (part.status, part.content) == (206, CONTENT[start:end])
            assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{len(CONTENT)}"

    async def test_what_is_known_already_is_not_sent_again_and_nothing_lies_behind_the_end(
        self, make_assets: MakeAssets
    ) -> None:
        async with make_assets() as bench:
            get = await bench.assets.grant(await uploaded(bench), "GET")
            mark = (await bench.move(get)).headers["etag"]
            part_of = msgspec.structs.replace(get, headers={"range": "bytes=10-19", "if-range": mark})
            same = await bench.move(part_of)
            assert (same.status, same.content) == (206, CONTENT[10:20])
            behind = await bench.move(get, range=f"bytes={len(CONTENT)}-")
            assert behind.status == 416 and behind.headers["content-range"] == f"bytes */{len(CONTENT)}"
            known = await bench.move(msgspec.structs.replace(get, headers={"if-none-match": mark}))
            assert (known.status, known.content) == (304, b"")

    async def test_what_was_not_announced_is_learned_when_it_is_there(self, make_assets: MakeAssets) -> None:
        async with make_assets() as bench:
            done = await uploaded(bench, sha256=None)
            assert (done.size, done.sha256) == (len(CONTENT), sha(CONTENT))

    async def test_a_short_long_or_altered_upload_is_not_taken_and_a_right_one_still_is(
        self, make_assets: MakeAssets
    ) -> None:
        async with make_assets() as bench:
            record = await reserved(bench)
            put = await bench.assets.grant(record, "PUT")
            for wrong in (CONTENT[:-1], CONTENT + b"+", b"x" * len(CONTENT), b""):
                honest = msgspec.structs.replace(
                    put, headers={n: v for n, v in put.headers.items() if n != "content-length"}
                )
                assert (await bench.move(honest, wrong)).status >= 400
                assert await refusal(bench.assets.complete(record.file_id)) is RefusalCode.WRONG_PHASE
            assert (await bench.move(put, CONTENT)).status == 200
            assert (await bench.assets.complete(record.file_id)).is_complete

    async def test_a_link_that_is_used_again_writes_over_nothing(self, make_assets: MakeAssets) -> None:
        async with make_assets() as bench:
            # Without a SHA-256 the second upload would be as good as the first.
            record = await reserved(bench, sha256=None)
            put = await bench.assets.grant(record, "PUT")
            assert (await bench.move(put, CONTENT)).status == 200
            late = CONTENT[::-1]
            assert (await bench.move(put, late)).status >= 400
            done = await bench.assets.complete(record.file_id)
            assert (await bench.move(put, late)).status >= 400
            assert done.sha256 == sha(CONTENT) and await read(bench.assets, done) == CONTENT

    async def test_a_link_is_good_for_one_method(self, make_assets: MakeAssets) -> None:
        async with make_assets() as bench:
            record = await reserved(bench)
            put, get = [await bench.assets.grant(record, method) for method in ("PUT", "GET")]
            assert (await bench.move(get, CONTENT, method="PUT")).status in (401, 403)
            assert (await bench.move(put, CONTENT)).status == 200
            assert (await bench.move(put, method="GET")).status in (401, 403)
            assert (await bench.move(put, method="DELETE")).status in (401, 403, 404, 405)
            assert (await bench.move(get)).content == CONTENT

    async def test_a_link_of_one_tenant_opens_nothing_of_another(self, make_assets: MakeAssets) -> None:
        async with make_assets() as bench:
            mine, theirs = await uploaded(bench), await uploaded(bench, b"secret", tenant=OTHER)
            get = await bench.assets.grant(mine, "GET")
            assert (await bench.move(get)).status == 200
            for link in (
                elsewhere(get, mine.file_id, theirs.file_id),
                elsewhere(get, mine.file_id, f"../../{OTHER}/inputs/{theirs.file_id}"),
                msgspec.structs.replace(
                    get, url=get.url.replace("acme", "other").replace(mine.file_id, theirs.file_id)
                ),
            ):
                moved = await bench.move(link)
                assert moved.status >= 400 and b"secret" not in moved.content
            free, own = await reserved(bench, tenant=OTHER), await reserved(bench)
            put = await bench.assets.grant(own, "PUT")
            moved = await bench.move(elsewhere(put, own.file_id, free.file_id), CONTENT)
            assert moved.status >= 400
            assert await refusal(bench.assets.complete(free.file_id)) is RefusalCode.WRONG_PHASE

    async def test_a_link_that_was_changed_is_no_link(self, make_assets: MakeAssets) -> None:
        async with make_assets() as bench:
            record = await uploaded(bench)
            get = await bench.assets.grant(record, "GET")
            good, _, signature = get.url.rpartition("ignature=")
            for url in (
                f"{good}ignature={signature[:-1]}{'0' if signature[-1] != '0' else '1'}",
                f"{good}ignature=",
                get.url.replace("xpires=", "xpires=1"),
                get.url.partition("?")[0],
            ):
                moved = await bench.move(msgspec.structs.replace(get, url=url))
                assert moved.status in (400, 401, 403), url

    async def test_a_link_expires(self, make_assets: MakeAssets) -> None:
        async with make_assets(grant_s=60.0) as bench:
            record = await uploaded(bench)
            await bench.clock.advance(-61)
            old = [
                await bench.assets.grant(record, "GET"),
                await bench.assets.grant(await reserved(bench), "PUT"),
            ]
            await bench.clock.advance(61)
            assert all(grant.expires_at <= bench.clock.now() for grant in old)
            assert (await bench.move(old[0])).status in (401, 403)
            assert (await bench.move(old[1], CONTENT)).status in (401, 403)

    async def test_whoever_is_inside_sends_pieces(self, make_assets: MakeAssets) -> None:
        async with make_assets() as bench:
            assets, record = bench.assets, await reserved(bench, b"goodgood")
            wrong = (
                ((b"good", b"goo"), RefusalCode.INVALID_REQUEST),
                ((b"good", b"good+"), RefusalCode.TOO_LARGE),
            )
            for sent, code in (*wrong, ((b"good", b"bad!"), RefusalCode.INVALID_REQUEST)):
                assert await refusal(assets.receive(record, pieces(*sent))) is code
            assert await refusal(assets.complete(record.file_id)) is RefusalCode.WRONG_PHASE
            received = await assets.receive(record, pieces(b"good", b"good"))
            assert received.received_at is not None and received.sha256 == sha(b"goodgood")
            other = assets.receive(record, pieces(b"good", b"evil"))
            assert await refusal(other) is self.refuses_other_bytes_as
            again = assets.receive(record, pieces(b"good", b"good"))
            if self.answers_the_same_bytes_again:
                assert (await again).sha256 == received.sha256
            else:
                assert await refusal(again) is RefusalCode.WRONG_PHASE
            assert (await assets.complete(record.file_id)).is_complete
            assert await read(assets, received) == b"goodgood"

    async def test_a_sender_that_breaks_off_leaves_nothing_and_may_begin_anew(
        self, make_assets: MakeAssets
    ) -> None:
        class HungUp(Exception):
            pass

        async def broken() -> AsyncIterator[bytes]:
            yield CONTENT[:100]
            raise HungUp

        async with make_assets() as bench:
            record = await reserved(bench)
            with pytest.raises(HungUp):
                await bench.assets.receive(record, broken())
            assert await refusal(read(bench.assets, record)) is RefusalCode.NOT_FOUND
            await bench.assets.receive(record, pieces(CONTENT))

    async def test_what_an_attempt_left_is_known_by_its_job_and_its_lease(
        self, make_assets: MakeAssets
    ) -> None:
        async with make_assets() as bench:
            one, two = [
                await uploaded(
                    bench,
                    kind="output",
                    job_id=JobId("j"),
                    attempt_id=f"j/1/{lease}/0",
                    derived_from=("f_before",),
                )
                for lease in (1, 2)
            ]
            assert one.file_id != two.file_id
            assert (one.job_id, one.attempt_id, one.derived_from, one.kind) == (
                "j",
                "j/1/1/0",
                ("f_before",),
                "output",
            )
            assert await read(bench.assets, one) == await read(bench.assets, two) == CONTENT

    async def test_old_files_go_with_their_bytes_unless_they_are_in_use(
        self, make_assets: MakeAssets
    ) -> None:
        async with make_assets(keep_s=1000.0) as bench:
            gone, used = await uploaded(bench), await uploaded(bench)

            async def in_use(file_id: str) -> bool:
                return file_id == used.file_id

            bench.assets.in_use = in_use
            await bench.clock.advance(1100)
            assert bench.assets.is_expired(gone)
            young = await reserved(bench)
            await bench.swept()
            assert await bench.assets.get(gone.file_id) is None
            assert await refusal(read(bench.assets, gone)) is RefusalCode.NOT_FOUND
            assert await bench.assets.get(young.file_id) is not None
            assert await read(bench.assets, used) == CONTENT

    async def test_nobody_knows_a_file_that_was_never_made(self, make_assets: MakeAssets) -> None:
        async with make_assets(max_bytes=1000) as bench:
            for name in ("f_" + "0" * 32, "../..", "f_nobody", ""):
                assert await bench.assets.get(name) is None
                assert await refusal(bench.assets.complete(name)) is RefusalCode.NOT_FOUND
            assert await refusal(reserved(bench, size=1001)) is RefusalCode.TOO_LARGE

    async def test_what_came_of_a_file_is_told_page_by_page_and_goes_with_what_it_is(
        self, make_assets: MakeAssets
    ) -> None:
        async with make_assets(keep_s=1000.0) as bench:
            origin, other = await uploaded(bench), await uploaded(bench)
            assert await bench.assets.derived(origin) == ([], None)
            made = [await uploaded(bench, derived_from=(origin.file_id, other.file_id)) for _ in range(3)]
            await reserved(bench, derived_from=(origin.file_id,))
            await uploaded(bench, tenant=OTHER, derived_from=(origin.file_id,))
            names = sorted(each.file_id for each in made)
            assert made[0].derived_from == (origin.file_id, other.file_id)
            found, after = await bench.assets.derived(origin, limit=2)
            seen = [each.file_id for each in found]
            while after is not None:
                found, after = await bench.assets.derived(origin, after, 2)
                seen += [each.file_id for each in found]
            assert seen == names, "neither what never came nor what somebody else says was made from it"
            assert [each.file_id for each in (await bench.assets.derived(other))[0]] == names
            await bench.clock.advance(1100)
            late = await uploaded(bench, derived_from=(origin.file_id,))
            await bench.swept()
            assert (await bench.assets.derived(origin))[0] == [late]
