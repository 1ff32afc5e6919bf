"""Handlers of files: a key or a lease announces a file, and signed links that need neither transfer it.

A file of another tenant answers `not_found`. `files/` stores the bytes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from comfyfleet.engine.engine import Engine
from comfyfleet.files.local import LocalFileStore, not_in_folder
from comfyfleet.files.thumbnails import Thumbnails
from comfyfleet.hub.files import uploads
from comfyfleet.hub.files.job_files import JobOutputFiles, reserve_file
from comfyfleet.hub.files.uploads import Form, boundary_in, is_form
from comfyfleet.hub.http.body import read_piece
from comfyfleet.hub.http.credentials import owner_for
from comfyfleet.hub.http.limits import ByteBudget
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.model.access import Caller
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import FileStore
from comfyfleet.wire import bodies
from comfyfleet.wire import files as wire
from comfyfleet.wire.route import CALLERS

_SHOWN = 100
_MAX_RECORDS_READ = 2_000
_PAGE = 200
_GUARDS = {
    # Uploaded content must never run as a page of this hub.
    "x-content-type-options": "nosniff",
    "content-security-policy": "sandbox; default-src 'none'",
    "cache-control": "private",
}


class FileHandlers:
    """`assets` is None if this hub keeps no files."""

    def __init__(self, engine: Engine, assets: FileStore | None) -> None:
        self._engine = engine
        self._store = assets
        self._disk = ByteBudget(uploads.MAX_ALL_SPOOLED_BYTES, "forms", "tenant")
        self._thumbnails = None if assets is None else Thumbnails(assets)

    @property
    def _assets(self) -> FileStore:
        if self._store is None:
            raise Refusal(RefusalCode.NOT_FOUND, "this hub keeps no files: give it a folder for them")
        return self._store

    @property
    def _local(self) -> LocalFileStore:
        """For links to this hub. An object store has its own links."""
        if not isinstance(self._assets, LocalFileStore):
            raise Refusal(RefusalCode.UNAUTHENTICATED, "the link is not valid (any more): ask for a new one")
        return self._assets

    async def create_file(self, call: HubRequest[wire.FileBody]) -> Reply:
        if is_form(call.headers):
            return await self._create_from_form(call)
        body, owner = call.data, owner_for(call.caller, call.data.tenant)
        await self._check_source(body, owner)
        record = await reserve_file(self._assets, owner, body)
        return Reply(201, await self._to_put(record), created_id=record.file_id)

    async def _create_from_form(self, call: HubRequest[wire.FileBody]) -> Reply:
        upload = uploads.FormUpload(Form(_pieces(call), boundary_in(call.headers)), self._assets, self._disk)
        body = await upload.head()
        owner = owner_for(call.caller, body.tenant)
        await self._check_source(body, owner)
        record = await upload.received(body, owner)
        link = await self._assets.grant(record, "GET")
        return Reply(201, wire.view(record, link), created_id=record.file_id)

    async def _check_source(self, body: wire.FileBody, owner: TenantId) -> None:
        if body.source is not None:
            origin = await self._assets.get(body.source, owner)
            if origin is None or origin.tenant != owner:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"there is no file {body.source!r} (any more)",
                    field="source",
                )

    async def list_files(self, call: HubRequest[wire.FilesQuery]) -> Reply:
        """Reads a bounded number of records, so a page with a cursor may be short or empty."""
        asked, tenant = call.data, call.caller.scope
        if asked.tenant is not None:
            if not call.caller.sees(TenantId(asked.tenant)):
                return Reply(200, wire.FileList(()))
            tenant = TenantId(asked.tenant)
        found: list[wire.FileView] = []
        after, records_read = asked.cursor or "", 0
        while records_read < _MAX_RECORDS_READ:
            page, further = await self._assets.listing(after, _PAGE, tenant)
            for record in page:
                if len(found) == asked.limit:
                    return Reply(200, wire.FileList(tuple(found), after))
                after = record.file_id
                if _is_wanted(record, asked):
                    found.append(await self._seen(record))
            if further is None:
                return Reply(200, wire.FileList(tuple(found)))
            records_read, after = records_read + _PAGE, further
        return Reply(200, wire.FileList(tuple(found), after))

    async def _seen(self, record: FileRecord) -> wire.FileView:
        is_there = record.received_at is not None
        return wire.view(record, await self._assets.grant(record, "GET") if is_there else None)

    async def delete_file(self, call: HubRequest[None]) -> Reply:
        record = await self._mine(call)
        if await self._engine.uses_file(record.file_id) or await self._is_of_open_job(record):
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"a job that has not ended needs the file {record.file_id!r}: wait for its end or cancel it, then "
                "delete the file",
            )
        await self._assets.forget(record)
        return Reply(204)

    async def _is_of_open_job(self, record: FileRecord) -> bool:
        """An output of a running job is needed for its completion."""
        if record.kind != "output" or record.job_id is None:
            return False
        dispatch = await self._engine.reader.load(record.job_id)
        return dispatch is not None and not dispatch.phase.is_final

    async def get_file(self, call: HubRequest[None]) -> Reply:
        record = await self._mine(call)
        derived, _ = await self._assets.derived(record, limit=_SHOWN)
        if record.received_at is not None:
            seen = wire.view(record, await self._assets.grant(record, "GET"))
        else:
            # A viewer gets no link to write.
            is_callers = call.caller.role in CALLERS
            seen = await self._to_put(record) if is_callers else wire.view(record)
        return Reply(200, wire.details(seen, derived))

    async def list_derived(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        record, asked = await self._mine(call), call.data
        found, cursor = await self._assets.derived(record, asked.cursor or "", asked.limit)
        views = [wire.view(each, await self._assets.grant(each, "GET")) for each in found]
        return Reply(200, wire.FileList(tuple(views), cursor))

    async def _to_put(self, record: FileRecord) -> wire.FileView:
        plan = self._assets.parts(record)
        is_whole = plan is None or not plan.is_required
        return wire.view(record, await self._assets.grant(record, "PUT") if is_whole else None, plan)

    async def get_thumbnail(self, call: HubRequest[wire.ThumbnailQuery]) -> Reply:
        record = await self._mine(call)
        assert self._thumbnails is not None, "a file was found, so files are kept"
        made = await self._thumbnails.get(record, call.data.size)
        return Reply(200, wire.view(made, await self._assets.grant(made, "GET")))

    async def part_links(self, call: HubRequest[wire.PartsBody]) -> Reply:
        record = await self._mine(call)
        return Reply(200, await self._part_links(record, call.data.parts))

    async def _part_links(self, record: FileRecord, parts: Sequence[wire.PartBody]) -> wire.PartGrants:
        digests = {part.number: part.sha256 for part in parts}
        found = dict(zip(digests, await self._assets.part_grants(record, digests), strict=True))
        return wire.PartGrants(tuple(found[part.number] for part in parts))

    async def complete_file(self, call: HubRequest[None]) -> Reply:
        record = await self._assets.complete((await self._mine(call)).file_id)
        return Reply(200, wire.view(record, await self._assets.grant(record, "GET")))

    async def _mine(self, call: HubRequest[Any]) -> FileRecord:
        file_id = call.parameters["file_id"]
        record = await self._assets.get(file_id, call.caller.scope)
        if record is None or not call.caller.sees(record.tenant):
            raise Refusal(RefusalCode.NOT_FOUND, f"there is no file {file_id!r} (any more)")
        return record

    async def put_content(self, call: HubRequest[wire.LinkQuery]) -> Reply:
        asked = call.data
        record = await self._local.check("PUT", call.parameters["file_id"], asked.expires, asked.signature)
        received = await self._local.receive(record, _pieces(call))
        if received.kind == "output":
            # A worker announces size and SHA-256, so nothing is left to verify.
            received = await self._assets.complete(received.file_id)
        return Reply(200, wire.view(received))

    async def get_content(self, call: HubRequest[wire.LinkQuery]) -> Reply | Response:
        asked = call.data
        record = await self._local.check("GET", call.parameters["file_id"], asked.expires, asked.signature)
        if record.received_at is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"the file {record.file_id!r} has not been received yet")
        etag = f'"{record.sha256}"'
        if _matches(call.headers.get("if-none-match", ""), etag):
            return Response(status_code=304, headers={"etag": etag, **_GUARDS})
        try:
            file = await open_file(self._local.path(record))
        except FileNotFoundError:
            raise not_in_folder(record) from None
        # The ETag is made of the content: the same at every hub and after a restart.
        return OpenFileResponse(file, record.name, record.content_type, {"etag": etag, **_GUARDS})

    async def worker_grants(self, call: HubRequest[wire.GrantsBody]) -> Reply:
        outputs, ref = self._outputs, call.data.lease
        dispatch = _check_lease(call.caller, await outputs.leased(ref))
        records = await outputs.announce(dispatch, ref, call.data.files)
        return Reply(200, wire.FileGrants(tuple([await self._to_put(each) for each in records])))

    async def worker_parts(self, call: HubRequest[wire.WorkerPartsBody]) -> Reply:
        ref = call.data.lease
        dispatch = _check_lease(call.caller, await self._outputs.leased(ref))
        record = await self._assets.get(call.data.file_id, dispatch.tenant)
        if record is None or record.attempt_id != ref.attempt_id:
            raise Refusal(RefusalCode.NOT_FOUND, f"this attempt has no file {call.data.file_id!r}")
        return Reply(200, await self._part_links(record, call.data.parts))

    @property
    def _outputs(self) -> JobOutputFiles:
        return JobOutputFiles(self._engine, self._assets)


def _is_wanted(record: FileRecord, asked: wire.FilesQuery) -> bool:
    if asked.job_id is not None and record.job_id != asked.job_id:
        return False
    return record.kind == asked.kind if asked.kind is not None else record.kind != "thumbnail"


def _check_lease(caller: Caller, dispatch: Dispatch) -> Dispatch:
    worker_id = caller.worker_id
    if worker_id is not None and dispatch.lease is not None and dispatch.lease.worker_id != worker_id:
        raise Refusal(RefusalCode.NOT_ALLOWED, "this lease belongs to another worker")
    return dispatch


def _matches(named: str, etag: str) -> bool:
    return any(each.strip().removeprefix("W/") in (etag, "*") for each in named.split(","))


async def _pieces(call: HubRequest[Any]) -> AsyncIterator[bytes]:
    more = True
    while more:
        piece, more = await read_piece(call.receive)
        if piece:
            yield piece


_OPEN_FILES = Path("/dev/fd")
"""The files that this process has open, by descriptor. A deleted file stays readable here."""


class OpenFileResponse(FileResponse):
    """Sends a file that is open already, and closes it."""

    def __init__(self, file: BinaryIO, name: str, content_type: str, headers: Mapping[str, str]) -> None:
        self._file = file
        descriptor = _OPEN_FILES / str(file.fileno())
        super().__init__(
            descriptor if descriptor.exists() else file.name,
            media_type=content_type,
            filename=name,
            headers=headers,
            stat_result=os.fstat(file.fileno()),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


async def open_file(path: Path) -> BinaryIO:
    return await asyncio.to_thread(path.open, "rb")
