"""What a form may make the hub read and write: no more than its file, its tenant and the hub's disk have room for,
whether files lie in a folder or in a storage."""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.hub._hub import HubRig, hub_in_process
from tests.hub.test_files import left_in
from tests.hub.test_forms import asked_of, form, send
from tests.servers.s3_server import CREDENTIALS

from comfyfleet.files import local
from comfyfleet.files.local import LocalFileStore
from comfyfleet.files.s3 import S3FileStore
from comfyfleet.files.s3_storage import S3Bucket
from comfyfleet.hub.files import uploads
from comfyfleet.hub.http.limits import ByteBudget
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.ports import Clock, DocumentStore, FileStore

PIECE = 65_536
NOWHERE = S3Bucket("http://127.0.0.1:9", "eu-central-1", "nobody")
Kind = Literal["folder", "storage"]
BOTH: list[Kind] = ["folder", "storage"]


class Endless:
    """A form whose file never ends."""

    def __init__(self, most: int = 10_000) -> None:
        whole = form(b"")
        self._head = whole[: whole.index(b"\r\n\r\n") + 4]
        self.read = 0
        self._most = most
        self.is_halted = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.read // PIECE == self._most:
            self.is_halted.set()
            await asyncio.Event().wait()
        head = b"" if self.read else self._head
        self.read += PIECE
        return {"type": "http.request", "body": head + b"x" * PIECE, "more_body": True}


@asynccontextmanager
async def a_hub(kind: Kind, folder: Path, **bounds: Any) -> AsyncIterator[HubRig]:
    """No storage is there: whatever reaches it is a fault."""
    made: list[S3FileStore] = []

    def assets_on(documents: DocumentStore, clock: Clock) -> FileStore:
        if kind == "folder":
            return LocalFileStore(folder, documents, clock, **bounds)
        made.append(S3FileStore(NOWHERE, CREDENTIALS, documents, clock, **bounds))
        return made[0]

    async with hub_in_process(assets_on=assets_on) as rig:
        yield rig
    for assets in made:
        await assets.close()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("bound", ["max_bytes", "tenant_bytes"])
async def test_no_more_is_read_than_there_is_room_for(kind: Kind, bound: str, tmp_path: Path) -> None:
    async with a_hub(kind, tmp_path, **{bound: 300_000}) as rig:
        sender = Endless()
        assert await asked_of(rig, sender.receive, rig.keys[Role.TENANT]) == 413
        assert 300_000 <= sender.read <= 300_000 + 3 * PIECE
        assert left_in(tmp_path) == []
        assert (await rig.get("/api/files")).body["files"] == []


@pytest.mark.parametrize("kind", BOTH)
async def test_what_is_on_its_way_counts_for_whoever_comes_meanwhile(kind: Kind, tmp_path: Path) -> None:
    async with a_hub(kind, tmp_path, tenant_bytes=20 * PIECE) as rig, asyncio.timeout(60):
        first, second = Endless(most=15), Endless()
        under_way = asyncio.create_task(asked_of(rig, first.receive, rig.keys[Role.TENANT]))
        await first.is_halted.wait()
        assert await asked_of(rig, second.receive, rig.keys[Role.TENANT]) == 413
        assert second.read <= 8 * PIECE
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
        # What broke off has given its room back.
        third = Endless()
        assert await asked_of(rig, third.receive, rig.keys[Role.TENANT]) == 413
        assert third.read >= 20 * PIECE


async def test_a_file_announced_without_its_size_is_bounded_alike(tmp_path: Path) -> None:
    async with a_hub("folder", tmp_path, tenant_bytes=300_000) as rig:
        made = (await rig.post("/api/files", {"name": "a.png"}, role=Role.TENANT)).body
        refused = await rig.ask("PUT", made["link"]["url"], role=None, raw=b"x" * 300_001)
        assert (refused.status, refused.code) == (413, "too_large")
        assert "limits.max_tenant_file_bytes" in refused.body["detail"]
        assert left_in(tmp_path) == []
        assert (await rig.ask("PUT", made["link"]["url"], role=None, raw=b"x" * 300_000)).status == 200


class Full(io.BytesIO):
    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", BOTH)
async def test_a_full_disk_is_told_as_one_and_leaves_nothing(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_append", lambda *_: Full().write(b""))
    monkeypatch.setattr("comfyfleet.hub.files.uploads.tempfile.SpooledTemporaryFile", lambda _: Full())
    async with a_hub(kind, tmp_path) as rig:
        refused = await send(rig, form(b"x" * 100_000))
        assert (refused.status, refused.code) == (503, "unavailable")
        assert "No space left on device" in refused.body["detail"] and "Make room" in refused.body["detail"]
        assert left_in(tmp_path) == []
        assert (await rig.get("/api/files")).body["files"] == []


async def test_all_forms_on_their_way_through_the_disk_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = 4 * PIECE
    monkeypatch.setattr(uploads, "STEP_BYTES", step)
    monkeypatch.setattr(uploads, "MAX_ALL_SPOOLED_BYTES", 4 * step)
    async with a_hub("storage", tmp_path) as rig, asyncio.timeout(60):
        senders = [Endless(most=3), Endless(most=3)]
        under_way = [
            asyncio.create_task(asked_of(rig, each.receive, rig.keys[Role.TENANT])) for each in senders
        ]
        for each in senders:
            await each.is_halted.wait()
        # One tenant has half of it at most.
        refused = await send(rig, form(b"x" * 3 * PIECE))
        assert (refused.status, refused.code) == (503, "unavailable")
        assert refused.body["retry_after_s"] > 0
        assert "half of that for one tenant" in refused.body["detail"]
        # What is small takes none of it, and another tenant has its own half: there the storage is away.
        assert "cannot reach" in (await send(rig, form(b"x" * 1_000))).body["detail"]
        assert "cannot reach" in (await send(rig, form(b"x" * 3 * PIECE), role=Role.ADMIN)).body["detail"]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        assert "cannot reach" in (await send(rig, form(b"x" * 3 * PIECE))).body["detail"]


def test_a_budget_gives_back_what_was_taken() -> None:
    budget = ByteBudget(100, "things", "key")
    budget.take("a", 50)
    with pytest.raises(Refusal, match="things"):
        budget.take("a", 1)
    budget.take("b", 50)
    with pytest.raises(Refusal):
        budget.take("c", 1)
    budget.release("a", 50)
    budget.take("c", 50)
    assert budget.held == 100


def open_in(folder: Path) -> list[str]:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return [str(link.readlink()) for link in links if link.resolve().is_relative_to(folder)]


@pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="this system does not tell which files are open"
)
async def test_many_forms_at_once_keep_no_file_open_between_two_pieces(tmp_path: Path) -> None:
    """A hub has so many files to open and no more, and its store wants some of them."""
    async with a_hub("folder", tmp_path) as rig, asyncio.timeout(60):
        senders = [Endless(most=3) for _ in range(20)]
        under_way = [
            asyncio.create_task(asked_of(rig, each.receive, rig.keys[Role.TENANT])) for each in senders
        ]
        for each in senders:
            await each.is_halted.wait()
        assert len(left_in(tmp_path)) == 20
        assert open_in(tmp_path) == []
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        assert left_in(tmp_path) == []


async def test_a_storage_that_is_still_being_looked_at_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    complete = LocalFileStore.complete

    async def slow(assets: LocalFileStore, file_id: str) -> FileRecord:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise Refusal(RefusalCode.UNAVAILABLE, "it takes a while: ask again", retry_after_s=0.0)
        return await complete(assets, file_id)

    monkeypatch.setattr(LocalFileStore, "complete", slow)
    async with a_hub("folder", tmp_path) as rig:
        made = await send(rig, form(b"abc"))
        assert (made.status, made.body["is_complete"], asked) == (201, True, 3)
