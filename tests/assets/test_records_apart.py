"""Records of files in their tenants' own databases: the central store knows that there is a file, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from comfyfleet.files.local import LocalFileStore
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.ports import DocumentStore
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.testing.time import ManualClock

ACME, BORG, HOME = TenantId("acme"), TenantId("borg"), TenantId("default")


class Rig:
    """Two tenants apart, in a database each, and one at home."""

    def __init__(self, folder: Path, apart: dict[TenantId, DocumentStore]) -> None:
        self.clock = ManualClock()
        self.central = MemoryDocumentStore()
        self.apart = apart
        self.away: set[TenantId] = set()
        self.folder = folder
        self.assets = self.anew()

    def anew(self, central: DocumentStore | None = None) -> LocalFileStore:
        central = central or self.central
        return LocalFileStore(
            self.folder, central, self.clock, keep_s=1000.0, documents_of=lambda each: self._of(each, central)
        )

    async def _of(self, tenant: TenantId, central: DocumentStore) -> DocumentStore:
        if tenant in self.away:
            raise Fault(f"the database of {tenant} is away")
        return self.apart.get(tenant, central)

    async def a_file(self, tenant: TenantId, derived_from: tuple[str, ...] = ()) -> FileRecord:
        async def content() -> AsyncIterator[bytes]:
            yield b"secret"

        record = await self.assets.reserve(
            tenant, name="secret.png", job_id=JobId("j"), attempt_id="j/1/1/0", derived_from=derived_from
        )
        await self.assets.receive(record, content())
        return await self.assets.complete(record.file_id)

    async def sweep(self) -> None:
        await self.clock.advance(61)
        await self.assets.reserve(HOME)


@asynccontextmanager
async def a_rig(folder: Path) -> AsyncIterator[Rig]:
    database = open_tenant_database(f"sqlite:///{folder}/acme.db")
    await database.open()
    yield Rig(folder / "files", {ACME: database.documents(ACME), BORG: MemoryDocumentStore()})
    await database.close()


async def test_the_central_store_has_a_stub_that_tells_nothing_of_the_file(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        record = await rig.a_file(ACME, ("f_secret",))
        assert await rig.assets.get(record.file_id) == record
        assert record.is_complete and record.name == "secret.png" and not record.has_tenant_database
        (kept,) = await rig.central.listing("files")
        stub = msgspec.json.decode(kept.body, type=FileRecord)
        assert stub == FileRecord(
            record.file_id,
            ACME,
            record.created_at,
            job_id=record.job_id,
            attempt_id=record.attempt_id,
            has_tenant_database=True,
        )
        assert b"secret" not in kept.body
        assert [each.name for each in await rig.apart[ACME].listing("files")] == [record.file_id]
        assert await rig.apart[BORG].collections() == []


async def test_a_database_that_is_away_is_told_and_nobody_else_notices(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        ours, theirs = await rig.a_file(ACME), await rig.a_file(BORG)
        rig.away = {ACME}
        for work in (rig.assets.get(ours.file_id), rig.assets.complete(ours.file_id), rig.a_file(ACME)):
            with pytest.raises(Fault, match="acme is away"):
                await work
        assert await rig.assets.get(theirs.file_id) == theirs
        assert await rig.assets.get((await rig.a_file(HOME)).file_id) is not None


async def test_old_files_go_wherever_their_records_lie_and_those_of_a_lost_database_later(
    tmp_path: Path,
) -> None:
    async with a_rig(tmp_path) as rig:
        files = [await rig.a_file(tenant) for tenant in (ACME, BORG, HOME)]
        rig.away = {ACME}
        await rig.clock.advance(1100)
        await rig.sweep()
        rig.away = set()
        assert [await rig.assets.get(each.file_id) is not None for each in files] == [True, False, False]
        await rig.sweep()
        assert await rig.assets.get(files[0].file_id) is None
        assert await rig.apart[ACME].collections() == [] and not rig.assets.path(files[0]).exists()
        assert {each.body.count(b"is_apart") for each in await rig.central.listing("files")} == {0}


async def test_a_record_is_found_by_its_tenant_when_the_central_store_has_lost_everything(
    tmp_path: Path,
) -> None:
    async with a_rig(tmp_path) as rig:
        record = await rig.a_file(ACME)
        after = rig.anew(MemoryDocumentStore())
        assert await after.get(record.file_id) is None
        assert await after.get(record.file_id, BORG) is None
        assert await after.get(record.file_id, HOME) is None
        assert await after.get(record.file_id, ACME) == record
        # Found once, it is found by its id alone: by links, changes and the cleanup.
        assert await after.get(record.file_id) == record
        await after.keep_thumbnail(record.file_id, 64, "f_" + "0" * 32)
        await rig.clock.advance(1100)
        await after.clean_up()
        assert await rig.apart[ACME].collections() == [] and not after.path(record).exists()


async def test_a_stub_whose_record_was_never_written_is_no_file_and_goes_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_rig(tmp_path) as rig:

        async def killed(*_: object, **__: object) -> bool:
            raise KeyboardInterrupt

        monkeypatch.setattr(rig.apart[BORG], "put", killed)
        with pytest.raises(KeyboardInterrupt):
            await rig.a_file(BORG)
        (stub,) = await rig.central.listing("files")
        assert await rig.assets.get(stub.name) is None
        with pytest.raises(Refusal) as refused:
            await rig.assets.complete(stub.name)
        assert refused.value.code is RefusalCode.NOT_FOUND
        await rig.clock.advance(1100)
        await rig.sweep()
        assert await rig.central.get("files", stub.name) is None


async def test_a_tenant_is_forgotten_with_all_its_files_and_no_other_is(tmp_path: Path) -> None:
    async with a_rig(tmp_path) as rig:
        files = {tenant: [await rig.a_file(tenant) for _ in range(2)] for tenant in (ACME, BORG, HOME)}
        other = await rig.a_file(TenantId("somebody"))
        for tenant, (first, second) in files.items():
            assert await rig.assets.forget_tenant(tenant) == 2
            assert await rig.assets.forget_tenant(tenant) == 0
            for record in (first, second):
                assert await rig.assets.get(record.file_id) is None
                assert not rig.assets.path(record).exists()
        assert await rig.assets.get(other.file_id) == other and rig.assets.path(other).exists()
        assert len(await rig.central.listing("files")) == 1
