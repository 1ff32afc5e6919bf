"""Files at the hub: announced, received piece by piece, verified, fetched by links that soon expire."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.hub._hub import TENANT, HubRig, hub_in_process, running_hub, submission
from tests.worker._comfyui import QUICK, picture
from tests.worker._scripted import quick

from comfyfleet.client.client import FleetClient
from comfyfleet.files.local import LocalFileStore
from comfyfleet.hub.app import Hub
from comfyfleet.hub.http.limits import ClientDisconnected
from comfyfleet.model.access import Role
from comfyfleet.model.calls import LeasedJob, Poll, RegisterWorker
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import PollId, TenantId, WorkerId
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.testing.time import ManualClock
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(folder=tmp_path, max_file_bytes=1000) as rig:
        yield rig


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def announced(rig: HubRig, role: Role = Role.TENANT, **body: Any) -> dict[str, Any]:
    answer = await rig.post("/api/files", body, role=role)
    assert answer.status == 201, answer.content
    return dict(answer.body)


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


async def test_whoever_only_looks_gets_no_link_to_write_to(rig: HubRig) -> None:
    file = await announced(rig, name="in.png", type="image/png")
    seen = await rig.get(f"/api/files/{file['id']}", role=Role.VIEWER)
    assert (seen.status, seen.body.get("link")) == (200, None)
    assert (await rig.get(f"/api/files/{file['id']}", role=Role.TENANT)).body["link"]["method"] == "PUT"


class Death(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "unannounced"])
async def test_an_upload_is_repeated_after_the_hub_died_between_record_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_announced: bool
) -> None:
    clock, content = ManualClock(), b"a picture"
    assets = LocalFileStore(tmp_path, MemoryDocumentStore(), clock, tenant_bytes=1000)
    said: Any = {"size": len(content), "sha256": sha(content)} if is_announced else {}
    record = await assets.reserve(TenantId("acme"), name="in.png", content_type="image/png", **said)

    async def pieces(*some: bytes) -> AsyncIterator[bytes]:
        for piece in some:
            yield piece

    def die(*_: object) -> None:
        raise Death

    with monkeypatch.context() as dying, pytest.raises(Death):
        dying.setattr("comfyfleet.files.local.os.replace", die)
        await assets.receive(record, pieces(content))
    known = await assets.get(record.file_id)
    assert known is not None and known.received_at is not None, "the record stands, the bytes do not"
    for sent in (pieces(b"a pic", b"ture"), pieces(content)):
        received = await assets.receive(await assets.get(record.file_id) or record, sent)
        assert (received.size, received.sha256) == (len(content), sha(content))
    with pytest.raises(Refusal) as refused:
        await assets.receive(received, pieces(b"another!!"))
    assert refused.value.code is RefusalCode.WRONG_PHASE
    assert (await assets.complete(record.file_id)).is_complete
    assert b"".join([piece async for piece in assets.read(received)]) == content
    assert left_in(tmp_path) == [record.file_id]


async def test_a_file_goes_up_by_its_link_and_comes_down_by_another(rig: HubRig) -> None:
    content = bytes(range(256))
    file = await announced(rig, name="in.png", type="image/png", size=256, sha256=sha(content))
    assert (await rig.post(f"/api/files/{file['id']}/complete", role=Role.TENANT)).code == "wrong_phase"
    put = await rig.ask("PUT", file["link"]["url"], raw=content, role=None)
    assert put.status == 200, put.content
    done = await rig.post(f"/api/files/{file['id']}/complete", role=Role.TENANT)
    assert done.body["is_complete"] and done.body["sha256"] == sha(content) and done.body["size"] == 256
    link = done.body["link"]["url"]
    got = await rig.get(link, role=None)
    assert (got.status, got.content) == (200, content)
    assert got.headers["content-type"] == "image/png"
    assert got.headers["content-disposition"].startswith("attachment")
    assert got.headers["x-content-type-options"] == "nosniff"
    part = await rig.get(link, role=None, headers={"range": "bytes=10-19"})
    assert (part.status, part.content) == (206, content[10:20])


async def test_a_hub_with_a_folder_of_its_own_says_why_it_has_not_what_another_received(
    rig: HubRig, tmp_path: Path
) -> None:
    clock = ManualClock(time.time())
    folder = LocalFileStore(tmp_path / "of its own", rig.documents, clock)
    other = HubRig(Hub(rig.engine, rig.documents, clock, assets=folder), rig.engine, rig.documents, rig.keys)
    file = await announced(rig)
    assert (await rig.ask("PUT", file["link"]["url"], raw=b"x", role=None)).status == 200
    link = (await other.get(f"/api/files/{file['id']}")).body["link"]["url"]
    refused = [await other.get(link, role=None), await other.post(f"/api/files/{file['id']}/complete")]
    for answer in refused:
        assert answer.code == "not_found"
        assert "another hub received it" in answer.body["detail"] and "'assets'" in answer.body["detail"]
    record = await folder.get(file["id"])
    assert record is not None
    with pytest.raises(Refusal, match="one shared folder"):
        _ = [piece async for piece in folder.read(record)]
    assert (await rig.get(link, role=None)).content == b"x", "the link is good where the file is"


async def test_a_file_has_a_mark_by_its_content_and_a_range_of_another_is_not_mixed_in(rig: HubRig) -> None:
    content = bytes(range(256))
    links = []
    for _ in range(2):
        file = await announced(rig)
        await rig.ask("PUT", file["link"]["url"], raw=content, role=None)
        links.append((await rig.get(f"/api/files/{file['id']}", role=Role.TENANT)).body["link"]["url"])
    marks = {(await rig.get(link, role=None)).headers["etag"] for link in links}
    assert marks == {f'"{sha(content)}"'}
    for mark, status, got in ((*marks, 206, content[10:20]), ('"another"', 200, content)):
        headers = {"range": "bytes=10-19", "if-range": mark}
        answer = await rig.get(links[0], role=None, headers=headers)
        assert (answer.status, answer.content) == (status, got)


async def test_a_link_is_good_for_one_file_one_method_and_a_while(rig: HubRig) -> None:
    first, second = await announced(rig), await announced(rig)
    url = first["link"]["url"]
    for wrong in (
        url.replace(first["id"], second["id"]),
        url.replace("signature=", "signature=0"),
        url.replace("expires=1", "expires=2"),
    ):
        assert (await rig.ask("PUT", wrong, raw=b"x", role=None)).code == "unauthenticated"
    assert (await rig.get(url, role=None)).code == "unauthenticated"
    assert (await rig.ask("PUT", f"/api/files/{first['id']}/content", raw=b"x", role=None)).status == 400


async def test_a_link_expires(tmp_path: Path) -> None:
    clock = ManualClock()
    assets = LocalFileStore(tmp_path, MemoryDocumentStore(), clock, grant_s=60)
    record = await assets.reserve(TenantId("acme"))
    grant = await assets.grant(record, "GET")
    signature = grant.url.partition("signature=")[2]
    assert await assets.check("GET", record.file_id, grant.expires_at, signature) == record
    await clock.advance(61)
    with pytest.raises(Refusal) as refused:
        await assets.check("GET", record.file_id, grant.expires_at, signature)
    assert refused.value.code is RefusalCode.UNAUTHENTICATED


async def test_what_is_not_what_was_announced_leaves_nothing_behind(rig: HubRig, tmp_path: Path) -> None:
    file = await announced(rig, size=4, sha256=sha(b"good"))
    for content, code in ((b"bad!", "invalid_request"), (b"goo", "invalid_request"), (b"good+", "too_large")):
        assert (await rig.ask("PUT", file["link"]["url"], raw=content, role=None)).code == code
    unbounded = await announced(rig)
    assert (await rig.ask("PUT", unbounded["link"]["url"], raw=bytes(1001), role=None)).code == "too_large"
    assert (await rig.post("/api/files", {"size": 1001})).code == "too_large"
    assert left_in(tmp_path) == []
    assert (await rig.ask("PUT", file["link"]["url"], raw=b"good", role=None)).status == 200
    again = await rig.ask("PUT", file["link"]["url"], raw=b"good", role=None)
    assert again.status == 200, "the answer to the first may have been lost"
    other = await rig.ask("PUT", file["link"]["url"], raw=b"evil", role=None)
    assert other.code == "wrong_phase", "a file is never written over"
    assert len(left_in(tmp_path)) == 1


async def test_a_sender_that_hangs_up_leaves_nothing_and_may_begin_anew(tmp_path: Path) -> None:
    assets = LocalFileStore(tmp_path, MemoryDocumentStore(), ManualClock())
    record = await assets.reserve(TenantId("acme"))

    async def pieces(ends: bool) -> AsyncIterator[bytes]:
        yield b"half"
        if not ends:
            raise ClientDisconnected

    with pytest.raises(ClientDisconnected):
        await assets.receive(record, pieces(ends=False))
    assert left_in(tmp_path) == []
    assert (await assets.receive(record, pieces(ends=True))).size == 4


async def test_of_two_who_send_a_file_at_once_one_is_kept_whole(tmp_path: Path) -> None:
    assets = LocalFileStore(tmp_path, MemoryDocumentStore(), ManualClock())
    record = await assets.reserve(TenantId("acme"))

    async def pieces(letter: bytes) -> AsyncIterator[bytes]:
        for _ in range(20):
            yield letter * 10

    sent = (assets.receive(record, pieces(letter)) for letter in (b"a", b"b"))
    first, second = await asyncio.gather(*sent, return_exceptions=True)
    assert isinstance(first, Refusal) != isinstance(second, Refusal)
    kept = await assets.get(record.file_id)
    assert kept is not None and kept.sha256 == sha(assets.path(kept).read_bytes())
    assert left_in(tmp_path) == [record.file_id]


async def test_old_files_are_forgotten_with_their_bytes(tmp_path: Path) -> None:
    clock = ManualClock()
    assets = LocalFileStore(tmp_path, MemoryDocumentStore(), clock, keep_s=1000)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"

    old = await assets.reserve(TenantId("acme"))
    await assets.receive(old, pieces())
    await clock.advance(900)
    young = await assets.reserve(TenantId("acme"))
    assert await assets.get(old.file_id) is not None
    await clock.advance(200)
    path = assets.path(old)
    content = path.read_bytes()
    path.unlink()
    path.mkdir()
    await assets.reserve(TenantId("acme"))
    assert await assets.get(old.file_id) is not None, "what cannot be removed is tried again"
    path.rmdir()
    path.write_bytes(content)
    await clock.advance(100)
    await assets.reserve(TenantId("acme"))
    assert await assets.get(old.file_id) is None and left_in(tmp_path) == []
    assert await assets.get(young.file_id) is not None


async def test_files_that_no_record_tells_of_go_once_they_are_old(tmp_path: Path) -> None:
    clock, documents = ManualClock(), MemoryDocumentStore()
    assets = LocalFileStore(tmp_path, documents, clock, keep_s=1000)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"

    async def in_use(file_id: str) -> bool:
        return file_id == used.file_id

    lost, used, cut_off = [await assets.reserve(TenantId("acme")) for _ in range(3)]
    assets.in_use = in_use
    for record in (lost, used):
        await assets.receive(record, pieces())
        await documents.remove("files", record.file_id)
    partial = assets.path(cut_off).with_name(f"{cut_off.file_id}.0123.partial")
    strange = assets.path(lost).with_name("notes.txt")
    await asyncio.to_thread(_touch, partial, strange)
    before = {lost.file_id, used.file_id, partial.name, strange.name}
    for seconds, left in ((1000, before), (100, {used.file_id, strange.name})):
        await clock.advance(seconds)
        for _ in range(16):
            # A part of the folders each time.
            await assets.clean_up()
        assert set(left_in(tmp_path)) == left


def _touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()


@pytest.mark.parametrize("kind", ["text", "a/b\n", "a/b\r\nx: y", "文/x", "é/x"])
async def test_a_type_that_can_be_no_header_is_refused(rig: HubRig, kind: str) -> None:
    answer = await rig.post("/api/files", {"name": "a", "type": kind}, role=Role.TENANT)
    assert answer.code == "invalid_request"


async def test_names_are_shown_and_lead_nowhere(rig: HubRig, tmp_path: Path) -> None:
    file = await announced(rig, name="../../etc/passwd")
    await rig.ask("PUT", file["link"]["url"], raw=b"x", role=None)
    assert left_in(tmp_path) == [file["id"]]
    seen = await rig.get(f"/api/files/{file['id']}", role=Role.TENANT)
    assert seen.body["name"] == "../../etc/passwd"
    for name in ("..%2F..%2Fetc", "f_" + "0" * 32, ".."):
        assert (await rig.get(f"/api/files/{name}")).code == "not_found"


async def test_another_tenants_file_is_not_there(rig: HubRig) -> None:
    other = (await rig.post("/api/keys", {"role": "tenant", "tenant": "other"})).body["key"]
    file = await announced(rig)
    assert (await rig.get(f"/api/files/{file['id']}", key=other)).code == "not_found"
    assert (await rig.post(f"/api/files/{file['id']}/complete", key=other)).code == "not_found"
    assert (await rig.get(f"/api/files/{file['id']}", role=Role.OPERATOR)).status == 200


async def test_a_hub_without_a_folder_keeps_no_files() -> None:
    async with hub_in_process() as rig:
        assert (await rig.post("/api/files", {})).code == "not_found"


# what a run left


async def leased(rig: HubRig) -> LeasedJob:
    await rig.submit(role=Role.TENANT)
    await rig.engine.register(RegisterWorker(WorkerId("gpu"), Capabilities((Service("comfyui"),))))
    job = await rig.engine.poll(Poll(WorkerId("gpu"), PollId("1"), 0))
    assert job is not None
    return job


async def test_a_completion_names_only_what_its_own_attempt_uploaded(rig: HubRig) -> None:
    job = await leased(rig)
    lease = msgspec.to_builtins(job.ref)
    asked: dict[str, Any] = {"lease": lease, "files": [{"name": "out.png", "size": 3, "sha256": sha(b"png")}]}
    lost: dict[str, Any] = {**asked, "lease": {**lease, "token": "stolen"}}
    assert (await rig.post("/api/worker/grants", lost, role=Role.WORKER)).code == "lease_lost"
    (granted,) = (await rig.post("/api/worker/grants", asked, role=Role.WORKER)).body["files"]
    mine = await announced(rig)
    done: dict[str, Any] = {"lease": lease, "result": {"files": []}}
    for file_id in (granted["id"], mine["id"], "f_nobody"):
        done["result"] = {
            "files": [{"node_id": "2", "kind": "images", "filename": "out.png", "file_id": file_id}]
        }
        assert (await rig.post("/api/worker/complete", done, role=Role.WORKER)).code == "invalid_request"
    assert (await rig.ask("PUT", granted["link"]["url"], raw=b"png", role=None)).status == 200
    done["result"]["files"][0]["file_id"] = granted["id"]
    assert (await rig.post("/api/worker/complete", done, role=Role.WORKER)).status == 200
    result = (await rig.get(f"/api/jobs/{job.job_id}/result", role=Role.TENANT)).body["result"]
    got = await rig.get(result["files"][0]["url"], role=None)
    assert got.content == b"png"


async def test_the_images_of_a_worker_nobody_can_reach_come_from_the_hub(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeComfyUI() as fake:
        async with (
            HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api,
            Agent(api, WorkerId("gpu-a"), [ComfyUI(fake.url, QUICK)], quick()),
        ):
            job = await rig.post("/api/jobs", submission(workflow=picture()), role=Role.TENANT)
            assert job.status == 201, job.content
            path = f"/api/jobs/{job.body['id']}/result"
            async with asyncio.timeout(60):
                while (answer := await rig.get(path, role=Role.TENANT)).status == 202:
                    await asyncio.sleep(0.02)
        assert answer.body["status"] == "completed", answer.body
        (file,) = answer.body["result"]["files"]
        await fake.stop()
        got = await rig.get(file["url"], role=None)
        assert got.status == 200 and got.content.startswith(b"\x89PNG")
        assert got.headers["content-type"] == "image/png"
        assert sha(got.content) == (await rig.get(f"/api/files/{file['file_id']}")).body["sha256"]
        async with FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
            result = (await client.wait(job.body["id"])).result
            assert result is not None
            (kept,) = result.files
            assert await client.fetch(kept) == got.content


@pytest.mark.parametrize("is_listed", [False, True])
async def test_a_file_in_a_tenant_database_is_downloaded_when_the_central_store_has_lost_its_stub(
    tmp_path: Path, is_listed: bool
) -> None:
    pools = {"default": f"sqlite:///{tmp_path}/tenants.db"}
    async with hub_in_process(folder=tmp_path / "files", databases=pools) as rig:
        assert (await rig.post("/api/tenants", {"id": TENANT})).status == 201
        made = await announced(rig, name="in.png", type="image/png")
        assert (await rig.ask("PUT", made["link"]["url"], role=None, raw=b"content")).status == 200
        assert await rig.documents.remove("files", made["id"])
        if is_listed:
            (seen,) = (await rig.get("/api/files", role=Role.TENANT)).body["files"]
        else:
            seen = (await rig.get(f"/api/files/{made['id']}", role=Role.TENANT)).body
        got = await rig.get(seen["link"]["url"], role=None)
        assert (got.status, got.content) == (200, b"content")
        assert (await rig.post(f"/api/files/{made['id']}/complete", role=Role.TENANT)).status == 200
