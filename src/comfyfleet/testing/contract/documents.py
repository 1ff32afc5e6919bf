"""The contract of document stores, a store's or a tenant database's: compare and set, list, bounds."""

from __future__ import annotations

import asyncio

import pytest

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.ports import Document, DocumentStore
from comfyfleet.testing.contract.store_bench import StoreBench

_LARGEST = 64 * 1024


async def _names(
    documents: DocumentStore, collection: str = "keys", after: str = "", limit: int = 100
) -> list[str]:
    return [each.name for each in await documents.listing(collection, after, limit)]


class DocumentStoreContract:
    """Override the fixture `documents` with an empty document store; the default is the store's own."""

    @pytest.fixture
    def documents(self, bench: StoreBench) -> DocumentStore:
        return bench.store.documents

    async def test_a_document_is_written_only_over_the_version_that_was_read(
        self, documents: DocumentStore
    ) -> None:
        assert await documents.get("keys", "a") is None
        assert not await documents.put("keys", "a", b"early", version=1), "there is none to write over"
        assert await documents.put("keys", "a", b"1", version=0)
        assert not await documents.put("keys", "a", b"again", version=0), "there is one already"
        assert await documents.put("keys", "a", b"2", version=1)
        assert not await documents.put("keys", "a", b"late", version=1)
        assert await documents.get("keys", "a") == Document("a", b"2", 2)
        assert await documents.put("keys", "a", b"3", version=None)
        assert await documents.put("keys", "b", b"1", version=None)
        assert await documents.listing("keys") == [Document("a", b"3", 3), Document("b", b"1", 1)]

    async def test_what_is_refused_leaves_everything_as_it_was(self, documents: DocumentStore) -> None:
        assert await documents.put("keys", "a", b"1", version=0)
        before = await documents.listing("keys")
        assert not await documents.put("keys", "a", b"2", version=7)
        assert not await documents.remove("keys", "b")
        for name, body in (("a", bytes(_LARGEST + 1)), ("", b"1"), ("x" * 513, b"1"), ("nul\0", b"1")):
            with pytest.raises(Refusal) as refused:
                await documents.put("keys", name, body, version=None)
            assert refused.value.code in (RefusalCode.TOO_LARGE, RefusalCode.INVALID_REQUEST)
        assert await documents.listing("keys") == before

    async def test_of_those_who_read_the_same_version_one_writes(self, documents: DocumentStore) -> None:
        for version in range(3):
            wins = await asyncio.gather(
                *(documents.put("keys", "a", b"%d" % number, version=version) for number in range(8))
            )
            assert sum(wins) == 1
            kept = await documents.get("keys", "a")
            assert kept == Document("a", b"%d" % wins.index(True), version + 1)

    async def test_writers_that_take_turns_lose_no_count(self, documents: DocumentStore) -> None:
        assert await documents.put("keys", "count", b"0", version=0)

        async def add_one() -> None:
            while True:
                known = await documents.get("keys", "count")
                assert known is not None
                if await documents.put("keys", "count", b"%d" % (int(known.body) + 1), version=known.version):
                    return

        await asyncio.gather(*(add_one() for _ in range(6)))
        assert await documents.get("keys", "count") == Document("count", b"6", 7)

    async def test_one_of_many_removes_it_and_a_new_one_begins_anew(self, documents: DocumentStore) -> None:
        assert await documents.put("keys", "a", b"1", version=0)
        assert await documents.put("keys", "a", b"2", version=1)
        assert sum(await asyncio.gather(*(documents.remove("keys", "a") for _ in range(4)))) == 1
        assert await documents.get("keys", "a") is None
        assert await _names(documents) == []
        assert not await documents.put("keys", "a", b"3", version=2)
        assert await documents.put("keys", "a", b"3", version=0)
        assert await documents.get("keys", "a") == Document("a", b"3", 1)

    async def test_lists_are_in_the_order_of_names_and_go_on_after_any_name(
        self, documents: DocumentStore
    ) -> None:
        names = ["Z", "a", "a/1", "a/10", "a/2", "b", "é", "日本", "😀"]
        for name in reversed(names):
            assert await documents.put("keys", name, name.encode(), version=0)
        assert await documents.put("other", "a", b"elsewhere", version=0)
        assert await _names(documents) == names
        pages, after = [], ""
        while page := await _names(documents, after=after, limit=4):
            pages.append(page)
            after = page[-1]
        assert pages == [names[:4], names[4:8], names[8:]]
        assert await _names(documents, after="a/", limit=3) == ["a/1", "a/10", "a/2"], (
            "no such name, yet a place"
        )
        assert await _names(documents, "empty") == []
        with pytest.raises(Refusal):
            await documents.listing("keys", after="nul\0")

    async def test_collections_are_those_with_documents(self, documents: DocumentStore) -> None:
        assert await documents.collections() == []
        for collection in ("keys", "audit"):
            assert await documents.put(collection, "a", b"1", version=0)
        assert await documents.collections() == ["audit", "keys"]
        assert await documents.remove("audit", "a")
        assert await documents.collections() == ["keys"]

    async def test_any_bytes_up_to_the_bound_come_back_as_they_are(self, documents: DocumentStore) -> None:
        for name, body in {
            "empty": b"",
            "all": bytes(range(256)),
            "large": b" \0\xff\n" * (_LARGEST // 4),
        }.items():
            assert await documents.put("keys", name, body, version=0)
            assert await documents.get("keys", name) == Document(name, body, 1)

    async def test_a_name_that_none_can_have_is_not_there(self, documents: DocumentStore) -> None:
        for name in ("", "nul\0", "x" * 10_000):
            assert await documents.get("keys", name) is None
            assert not await documents.remove("keys", name)
