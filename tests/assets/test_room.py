"""What the files of one tenant may take together: exact at one hub, seen within a minute at another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.hub.test_files import left_in

from comfyfleet.cli.bootstrap import open_assets
from comfyfleet.cli.settings import read_settings
from comfyfleet.files.local import LocalFileStore
from comfyfleet.files.quota import COLLECTION
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import Document
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.testing.time import ManualClock

ACME, OTHER = TenantId("acme"), TenantId("other")


class House:
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.documents = MemoryDocumentStore()
        self._folder = folder
        self.assets = self.another()

    def another(self, most: int | None = 100) -> LocalFileStore:
        return LocalFileStore(self._folder, self.documents, self.clock, keep_s=1000, tenant_bytes=most)


@pytest.fixture
def running_hub(tmp_path: Path) -> House:
    return House(tmp_path)


async def brought(assets: LocalFileStore, size: int, *, is_announced: bool = True) -> FileRecord:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * size

    record = await assets.reserve(ACME, size=size if is_announced else None)
    return await assets.receive(record, pieces())


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_tenant_takes_so_much_and_no_more_and_another_has_its_own(
    running_hub: House, is_announced: bool, tmp_path: Path
) -> None:
    await brought(running_hub.assets, 60, is_announced=is_announced)
    with pytest.raises(Refusal) as refused:
        await brought(running_hub.assets, 41, is_announced=is_announced)
    assert refused.value.code is RefusalCode.TOO_LARGE
    assert refused.value.details == {"taken": 60, "max_bytes": 100}
    assert "limits.max_tenant_file_bytes" in refused.value.message
    assert len(left_in(tmp_path)) == 1, "nothing of it stays"
    await brought(running_hub.assets, 40, is_announced=is_announced)
    with pytest.raises(Refusal):
        await running_hub.assets.reserve(ACME)
    await running_hub.assets.reserve(OTHER, size=100)


class Slow(MemoryDocumentStore):
    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        await asyncio.sleep(0)
        return await super().listing(collection, after, limit)


async def test_of_many_that_come_together_only_those_get_in_that_there_is_room_for(
    running_hub: House,
) -> None:
    running_hub.documents = Slow()
    running_hub.assets = running_hub.another()
    found = await asyncio.gather(
        *(running_hub.assets.reserve(ACME, size=30) for _ in range(10)), return_exceptions=True
    )
    assert sum(isinstance(each, FileRecord) for each in found) == 3


async def test_files_that_go_make_room_and_leave_no_entry(running_hub: House) -> None:
    await brought(running_hub.assets, 100)
    await running_hub.clock.advance(1100)
    await running_hub.assets.reserve(ACME, size=100)
    assert len(await running_hub.documents.listing(COLLECTION)) == 1
    assert await running_hub.assets.forget_tenant(ACME) == 1
    assert await running_hub.documents.listing(COLLECTION) == []
    await running_hub.assets.reserve(ACME, size=100)


async def test_what_another_hub_took_in_is_seen_within_a_minute_and_after_a_restart(
    running_hub: House,
) -> None:
    second = running_hub.another()
    await second.reserve(ACME, size=10)
    await brought(running_hub.assets, 50)
    await second.reserve(ACME, size=40)
    await running_hub.clock.advance(61)
    for assets in (second, running_hub.assets, running_hub.another()):
        with pytest.raises(Refusal):
            await assets.reserve(ACME, size=1)


async def test_without_a_bound_nothing_is_noted(running_hub: House) -> None:
    await brought(running_hub.another(None), 1_000)
    assert await running_hub.documents.listing(COLLECTION) == []


async def test_the_bound_is_a_setting(tmp_path: Path) -> None:
    environment = {"COMFYFLEET_LIMITS_MAX_TENANT_FILE_BYTES": "10"}
    resolved = read_settings({"data": str(tmp_path)}, config=os.devnull, environment=environment)
    async with open_assets(resolved, MemoryDocumentStore(), ManualClock()) as assets:
        await assets.reserve(ACME, size=10)
        with pytest.raises(Refusal, match="10 of 10 bytes"):
            await assets.reserve(ACME, size=1)


async def sent(assets: LocalFileStore, record: FileRecord, size: int = 60) -> FileRecord:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * size

    return await assets.receive(record, pieces())


async def test_a_file_that_is_deleted_while_it_is_put_into_place_leaves_nothing(
    running_hub: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = running_hub.assets
    record, change = await assets.reserve(ACME, size=60), assets._change

    async def then_deleted(*asked: object, **fields: object) -> FileRecord:
        changed = await change(*asked, **fields)  # type: ignore[arg-type]
        await assets.forget(record)
        return changed

    monkeypatch.setattr(assets, "_change", then_deleted)
    with pytest.raises(Refusal) as refused:
        await sent(assets, record)
    assert refused.value.code is RefusalCode.NOT_FOUND
    assert await running_hub.documents.listing(COLLECTION) == [], "it would take room for ever"
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("is_again", [True, False])
async def test_a_file_that_is_put_into_place_while_it_is_deleted_leaves_nothing(
    running_hub: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_again: bool
) -> None:
    """Also where it is the same file, sent once more by a link that is good for a while."""
    assets = running_hub.assets
    record, remove = await assets.reserve(ACME, size=60), assets._remove
    if is_again:
        record = await sent(assets, record)

    async def then_sent(each: FileRecord) -> None:
        monkeypatch.setattr(assets, "_remove", remove)
        await remove(each)
        await sent(assets, record)

    monkeypatch.setattr(assets, "_remove", then_sent)
    await assets.forget(record)
    assert await assets.get(record.file_id) is None
    assert await running_hub.documents.listing(COLLECTION) == []
    assert left_in(tmp_path) == []
    await brought(assets, 100)
