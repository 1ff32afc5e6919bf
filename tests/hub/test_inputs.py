"""Files that a job brings: uploaded, named in a submission, fetched with the lease, and handed from stage to stage."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process, running_hub, submission
from tests.hub.test_files import left_in
from tests.hub.test_socket import connected
from tests.worker._comfyui import QUICK, picture
from tests.worker._scripted import quick

from comfyfleet.engine.engine import Engine
from comfyfleet.files.local import LocalFileStore
from comfyfleet.hub.files.job_files import JobInputFiles
from comfyfleet.hub.local_worker_api import LocalWorkerApi
from comfyfleet.model.access import Role
from comfyfleet.model.calls import HeartbeatReply, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import JobInput, OutputFile, Submission
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.ports import OutputSource, WorkerApi
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.testing.time import ManualClock
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi

PICTURE = b"\x89PNG not really a picture"
OFFERS = Capabilities((Service("comfyui"),), moves_files=True)


def edit(value: str = "example.png", prefix: str = "edited") -> dict[str, Any]:
    return {
        "10": {"class_type": "LoadImage", "inputs": {"image": value}},
        "11": {"class_type": "SaveImage", "inputs": {"images": ["10", 0], "filename_prefix": prefix}},
    }


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(folder=tmp_path) as rig:
        yield rig


async def uploaded(
    rig: HubRig, content: bytes = PICTURE, *, name: str = "in.png", is_complete: bool = True, **who: Any
) -> str:
    who = who or {"role": Role.TENANT}
    file = (await rig.post("/api/files", {"name": name}, **who)).body
    assert (await rig.ask("PUT", file["link"]["url"], raw=content, role=None)).status == 200
    if is_complete:
        assert (await rig.post(f"/api/files/{file['id']}/complete", **who)).status == 200
    return str(file["id"])


def brings(file_id: str, **more: Any) -> dict[str, Any]:
    return submission(workflow=edit(), inputs=[{"file": file_id, "node": "10", "input": "image"}], **more)


def takes(job: str, **more: Any) -> dict[str, Any]:
    return submission(workflow=edit(), inputs=[{"job": job, "node": "10", "input": "image", **more}])


async def submitted(rig: HubRig, body: dict[str, Any]) -> str:
    answer = await rig.post("/api/jobs", body, role=Role.TENANT)
    assert answer.status == 201, answer.content
    return str(answer.body["id"])


async def ended(rig: HubRig, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (answer := await rig.get(f"/api/jobs/{job_id}/result", role=Role.TENANT)).status == 202:
            await asyncio.sleep(0.02)
    return dict(answer.body)


# at the submit


async def test_a_file_must_be_there_whole_and_the_tenants_own(rig: HubRig) -> None:
    other = (await rig.post("/api/keys", {"role": "tenant", "tenant": "other"})).body["key"]
    theirs = await uploaded(rig, key=other)
    half = await uploaded(rig, is_complete=False)
    said = []
    for file_id in ("f_nobody", "f_" + "0" * 32, theirs, half):
        answer = await rig.post("/api/jobs", brings(file_id), role=Role.TENANT)
        assert answer.code == "invalid_request"
        said.append(answer.body["detail"].replace(file_id, "…"))
    assert said[0] == said[1] == said[2], "nobody learns that somebody else has such a file"
    assert "complete it" in said[3]
    assert (await rig.post("/api/jobs", brings(theirs))).code == "invalid_request", "an admin's own neither"
    assert (await rig.post("/api/jobs", brings(theirs), key=other)).status == 201
    wrong = submission(workflow=edit(), inputs=[{"file": theirs, "node": "10", "input": "picture"}])
    assert "no input 'picture'" in (await rig.post("/api/jobs", wrong, key=other)).body["detail"]


async def test_a_hub_without_a_folder_takes_no_files_and_lets_no_worker_wait_for_some() -> None:
    async with hub_in_process() as rig:
        answer = await rig.post("/api/jobs", brings("f_1"), role=Role.TENANT)
        assert answer.code == "invalid_request" and "keeps no files" in answer.body["detail"]
        body = {"worker_id": "gpu", "capabilities": msgspec.to_builtins(OFFERS)}
        registered = await rig.post("/api/worker/register", body, role=Role.WORKER)
        assert "moves_files" not in registered.body["capabilities"]


async def test_only_callers_may_bring_files(rig: HubRig) -> None:
    body = brings(await uploaded(rig))
    for role in (Role.VIEWER, Role.WORKER):
        assert (await rig.post("/api/jobs", body, role=role)).code == "not_allowed"


async def test_the_same_content_uploaded_again_is_the_same_submission(rig: HubRig) -> None:
    first = await rig.post("/api/jobs", brings(await uploaded(rig), reference="r"), role=Role.TENANT)
    again = await rig.post("/api/jobs", brings(await uploaded(rig), reference="r"), role=Role.TENANT)
    assert (again.status, again.body["id"]) == (200, first.body["id"])
    other = brings(await uploaded(rig, b"another"), reference="r")
    assert (await rig.post("/api/jobs", other, role=Role.TENANT)).code == "duplicate_differs"


async def test_jobs_with_other_pictures_have_one_workflow_hash(rig: HubRig) -> None:
    plain = await rig.post("/api/jobs", submission(workflow=edit("other.png")), role=Role.TENANT)
    hashes = {plain.body["workflow_hash"]}
    for name in ("a.png", "b.webp"):
        body = brings(await uploaded(rig, name=name))
        hashes.add((await rig.post("/api/jobs", body, role=Role.TENANT)).body["workflow_hash"])
    assert len(hashes) == 1


async def test_in_a_batch_a_job_names_one_before_it_by_its_reference(rig: HubRig) -> None:
    jobs = [
        {**submission(), "reference": "one"},
        {**takes("one"), "reference": "two"},
        {**submission(), "after": ["two", "one"]},
        {**submission(), "after": ["later"]},
        {**submission(), "reference": "later"},
        {**takes("nobody"), "reference": "three"},
        {**submission(), "after": ["three"]},
    ]
    headers = {"idempotency-key": "k"}
    answer = await rig.post("/api/jobs/batch", {"jobs": jobs}, role=Role.TENANT, headers=headers)
    items = answer.body["items"]
    assert [item["status"] for item in items] == [201, 201, 201, 400, 201, 400, 400]
    ids = [item.get("job", {}).get("id") for item in items]
    for number, after in ((1, [ids[0]]), (2, [ids[1], ids[0]])):
        job = (await rig.get(f"/api/jobs/{ids[number]}", role=Role.TENANT)).body
        assert job["after"] == after
    again = await rig.post("/api/jobs/batch", {"jobs": jobs}, role=Role.TENANT, headers=headers)
    assert [item["status"] for item in again.body["items"]] == [200, 200, 200, 201, 200, 400, 400]


async def test_another_tenants_job_is_not_there_to_take_from(rig: HubRig) -> None:
    other = (await rig.post("/api/keys", {"role": "tenant", "tenant": "other"})).body["key"]
    mine = await submitted(rig, submission(reference="mine"))
    for name in (mine, "mine", "nobody"):
        answer = await rig.post("/api/jobs", takes(name), key=other)
        assert answer.code == "invalid_request"
        assert answer.body["detail"] == f"there is no job {name!r} to wait for (any more)"


# with the lease


async def test_a_lease_has_links_and_a_heartbeat_renews_them(rig: HubRig) -> None:
    file_id = await uploaded(rig)
    await submitted(rig, brings(file_id))
    body = {"worker_id": "gpu", "poll_id": "1", "wait_s": 0, "capabilities": msgspec.to_builtins(OFFERS)}
    leased = (await rig.post("/api/worker/poll", body, role=Role.WORKER)).body
    (file,) = leased["job"]["payload"]["inputs"]
    assert (file["node"], file["input"], file["file_id"]) == ("10", "image", file_id)
    assert file["sha256"] == hashlib.sha256(PICTURE).hexdigest() and file["size"] == len(PICTURE)
    assert (await rig.get(file["url"], role=None)).content == PICTURE
    beat: dict[str, Any] = {"worker_id": "gpu", "leases": [leased["lease"]]}
    assert (await rig.post("/api/worker/heartbeat", beat, role=Role.WORKER)).body["inputs"] == []
    renewed = (await rig.post("/api/worker/heartbeat", {**beat, "inputs": True}, role=Role.WORKER)).body
    (again,) = renewed["inputs"]
    assert again["lease"] == leased["lease"]
    assert (await rig.get(again["inputs"][0]["url"], role=None)).content == PICTURE
    stolen = {**beat, "leases": [{**leased["lease"], "token": "stolen"}], "inputs": True}
    assert (await rig.post("/api/worker/heartbeat", stolen, role=Role.WORKER)).body["inputs"] == []


async def test_a_file_that_a_worker_only_says_is_its_output_is_given_to_nobody(rig: HubRig) -> None:
    """Whoever is directly on the store completes without a hub that would compare."""
    other = (await rig.post("/api/keys", {"role": "tenant", "tenant": "other"})).body["key"]
    theirs = await uploaded(rig, key=other)
    assert rig.assets is not None
    desk = JobInputFiles(rig.engine, rig.assets)
    named = (await rig.engine.submit(Submission(edit(), inputs=(JobInput("10", "image", theirs),)))).job_id
    await rig.engine.register(RegisterWorker(WorkerId("gpu"), OFFERS))
    job = await rig.engine.poll(Poll(WorkerId("gpu"), PollId("1"), 0))
    assert job is not None and job.job_id == named
    (file,) = (await desk.linked(job)).inputs
    assert file.url is None and file.sha256 is None


async def test_a_worker_over_the_websocket_gets_links_too(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig:
        file_id = await uploaded(rig)
        async with connected(rig, Role.TENANT) as caller, connected(rig, Role.WORKER) as worker:
            await caller.ask("submit_job", **brings(file_id))
            capabilities = msgspec.to_builtins(OFFERS)
            await worker.ask("register_worker", worker_id="gpu", capabilities=capabilities)
            job = await worker.ask("request_job", worker_id="gpu")
            (file,) = job["job_data"]["payload"]["inputs"]
            assert (await rig.get(file["url"], role=None)).content == PICTURE
            await caller.say("submit_job", **brings("f_nobody"))
            assert "no file" in (await caller.until("error"))["message"]


# at the worker


@asynccontextmanager
async def agent_at(rig: HubRig, fake: FakeComfyUI, door: str = "http") -> AsyncIterator[WorkerApi]:
    assert rig.assets is not None
    async with HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as far:
        api: WorkerApi = far if door == "http" else LocalWorkerApi(rig.engine, rig.assets)
        async with Agent(api, WorkerId("gpu-a"), [ComfyUI(fake.url, QUICK)], quick()):
            yield api


def inputs_on(fake: FakeComfyUI) -> list[Path]:
    return [path for path in (fake.disk.base / "input").rglob("f_*") if path.is_file()]


@pytest.mark.parametrize("door", ["http", "inside"])
async def test_text_to_image_to_upscale_in_two_stages(tmp_path: Path, door: str) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeComfyUI() as fake:
        first = await submitted(rig, submission(workflow=picture()))
        second = await submitted(rig, takes(first, output="2"))
        async with agent_at(rig, fake, door):
            one, two = await ended(rig, first), await ended(rig, second)
        assert two["status"] == "completed", two
        (kept,), (last,) = one["result"]["files"], two["result"]["files"]
        content = (await rig.get(kept["url"], role=None)).content
        (given,) = inputs_on(fake)
        assert given.read_bytes() == content and given.name == f"{kept['file_id']}.png"
        assert given.parent.parent.name == "comfyfleet", "each attempt has a folder of its own"
        assert (await rig.get(last["url"], role=None)).content.startswith(b"\x89PNG")


async def test_a_name_that_leads_out_of_the_folder_leads_nowhere(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeComfyUI() as fake:
        made = await submitted(rig, submission(workflow=picture()))
        async with agent_at(rig, fake):
            (file,) = (await ended(rig, made))["result"]["files"]
            content = (await rig.get(file["url"], role=None)).content
            file_id = await uploaded(rig, content, name="../../../etc/pass wd.PNG")
            both = edit() | {"12": {"class_type": "LoadImage", "inputs": {"image": ""}}}
            both["13"] = {"class_type": "PreviewImage", "inputs": {"images": ["12", 0]}}
            named = [{"file": file_id, "node": node, "input": "image"} for node in ("10", "12")]
            job_id = await submitted(rig, submission(workflow=both, inputs=named))
            assert (await ended(rig, job_id))["status"] == "completed"
        names = sorted(path.name for path in (fake.disk.base / "input").rglob("*f_*") if path.is_file())
        assert names == sorted([f"{file_id}.png", f"1-{file_id}.png"])


def hurt(folder: Path, file_id: str, harm: str) -> None:
    (path,) = folder.rglob(file_id)
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(b"x" * len(PICTURE))


@pytest.mark.parametrize(("harm", "words"), [("gone", "does not have it any more"), ("altered", "SHA-256")])
@pytest.mark.parametrize("door", ["http", "inside"])
async def test_a_missing_or_altered_file_fails_for_good_and_says_whose_fault(
    tmp_path: Path, harm: str, words: str, door: str
) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeComfyUI() as fake:
        file_id = await uploaded(rig)
        job_id = await submitted(rig, brings(file_id))
        hurt(tmp_path, file_id, harm)
        async with agent_at(rig, fake, door):
            error = (await ended(rig, job_id))["error"]
        assert error["kind"] == "missing_input" and error["node_id"] == "10"
        assert words in error["message"] and "Upload it" in error["message"]
        view = await rig.engine.get(JobId(job_id))
        assert len(view.attempts) == 1 and await rig.engine.blocks() == []
        assert inputs_on(fake) == []


@pytest.mark.parametrize("door", ["http", "inside"])
async def test_an_output_too_large_for_the_hub_stays_on_its_server_and_the_job_is_done(
    tmp_path: Path, door: str
) -> None:
    async with running_hub(folder=tmp_path, max_file_bytes=10) as rig, FakeComfyUI() as fake:
        first = await submitted(rig, submission(workflow=picture()))
        second = await submitted(rig, takes(first))
        async with agent_at(rig, fake, door):
            (file,) = (await ended(rig, first))["result"]["files"]
            # Where its server stands is nobody's business but the worker's.
            assert file["filename"] and "url" not in file and "file_id" not in file
            error = (await ended(rig, second))["error"]
        assert error["kind"] == "missing_input" and "only on its server" in error["message"]


async def test_a_worker_directly_on_the_store_is_passed_over_until_one_of_a_hub_comes(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FakeComfyUI() as fake:
        made = await submitted(rig, submission(workflow=picture()))
        async with agent_at(rig, fake):
            (file,) = (await ended(rig, made))["result"]["files"]
        async with Agent(rig.engine, WorkerId("direct"), [ComfyUI(fake.url, QUICK)], quick()) as direct:
            await direct.wait_for_first_check()
            job_id = await submitted(rig, brings(file["file_id"]))
            after = await submitted(rig, submission(workflow=picture(color=9)))
            assert (await ended(rig, after))["status"] == "completed", "which came later, and needs no files"
            told = (await rig.get(f"/api/jobs/{job_id}/explain")).body
            reasons = {each["worker_id"]: each["reason"] for each in told["workers"]}
            assert "does not exchange files" in reasons["direct"]
            async with agent_at(rig, fake):
                assert (await ended(rig, job_id))["status"] == "completed"
            assert (await rig.get(f"/api/jobs/{job_id}", role=Role.TENANT)).body["worker_id"] == "gpu-a"


async def test_a_hub_that_is_away_for_a_while_costs_no_attempt(tmp_path: Path) -> None:
    class Away(LocalWorkerApi):
        """Goes away at each first fetch and each first upload, and stays so for many tries."""

        def __init__(self, engine: Engine, assets: LocalFileStore) -> None:
            super().__init__(engine, assets)
            self.left = 0
            self.seen: set[str] = set()

        def _try(self, what: str) -> None:
            if what not in self.seen:
                self.seen.add(what)
                self.left = 12
            self.left = max(0, self.left - 1)
            self._check()

        def _check(self) -> None:
            if self.left:
                raise Fault("nobody answers")

        async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
            self._check()
            return await super().heartbeat(worker_id, refs)

        async def fetch_input(self, job: LeasedJob, file: InputFile, path: Path) -> None:
            self._try(f"fetch {file.file_id}")
            await super().fetch_input(job, file, path)

        async def store_output(self, ref: LeaseRef, file: OutputFile, source: OutputSource) -> str | None:
            self._try(f"keep {ref.job_id}")
            return await super().store_output(ref, file, source)

    async with running_hub(folder=tmp_path) as rig, FakeComfyUI() as fake:
        assert rig.assets is not None
        first = await submitted(rig, submission(workflow=picture()))
        second = await submitted(rig, takes(first))
        api = Away(rig.engine, rig.assets)
        async with Agent(api, WorkerId("gpu"), [ComfyUI(fake.url, QUICK)], quick()):
            for job_id in (first, second):
                assert (await ended(rig, job_id))["status"] == "completed"
                assert len((await rig.engine.get(JobId(job_id))).attempts) == 1
        assert len(api.seen) == 3


async def test_a_job_is_cancelled_while_its_file_is_fetched(tmp_path: Path) -> None:
    class Stuck(LocalWorkerApi):
        fetching = asyncio.Event()

        async def fetch_input(self, job: LeasedJob, file: InputFile, path: Path) -> None:
            self.fetching.set()
            await asyncio.Event().wait()
            raise AssertionError("it is torn off")

    async with running_hub(folder=tmp_path) as rig, FakeComfyUI() as fake:
        assert rig.assets is not None
        api = Stuck(rig.engine, rig.assets)
        job_id = await submitted(rig, brings(await uploaded(rig)))
        async with Agent(api, WorkerId("gpu"), [ComfyUI(fake.url, QUICK)], quick()):
            await asyncio.wait_for(api.fetching.wait(), 60)
            await rig.post(f"/api/jobs/{job_id}/cancel", role=Role.TENANT)
            assert (await ended(rig, job_id))["status"] == "cancelled"


async def test_a_link_that_has_expired_is_renewed_with_the_lease(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig:
        await submitted(rig, brings(await uploaded(rig)))
        async with HttpWorkerApi(rig.url, rig.keys[Role.WORKER]) as api:
            await api.register(RegisterWorker(WorkerId("gpu"), OFFERS))
            job = await api.poll(Poll(WorkerId("gpu"), PollId("1"), 5))
            assert job is not None
            (file,) = job.inputs
            old = msgspec.structs.replace(
                file, url=f"/api/files/{file.file_id}/content?expires=1&signature=0"
            )
            fetched = tmp_path / "fetched"
            await api.fetch_input(job, old, fetched)
            assert fetched.read_bytes() == PICTURE
            lost = msgspec.structs.replace(job, ref=msgspec.structs.replace(job.ref, token="stolen"))
            with pytest.raises(Refusal) as refused:
                await api.fetch_input(lost, old, fetched)
            assert refused.value.code is RefusalCode.LEASE_LOST


async def test_a_hub_that_kept_no_files_is_asked_again_after_a_registration(tmp_path: Path) -> None:
    class OneByte:
        async def save(self, file: OutputFile, path: Path) -> int:
            return await asyncio.to_thread(path.write_bytes, b"x")

    call = RegisterWorker(WorkerId("gpu"), Capabilities((Service("comfyui"),)))
    async with (
        running_hub() as without,
        running_hub(folder=tmp_path) as with_files,
        HttpWorkerApi(without.url, without.keys[Role.WORKER]) as api,
    ):
        for rig in (without, with_files):
            # As if the hub had been started anew with a folder, at the same address.
            api._url = api._links.hub = rig.url
            api._headers["authorization"] = f"Bearer {rig.keys[Role.WORKER]}"
            await api.close()
            await api.register(call)
            await submitted(rig, submission())
            job = await api.poll(Poll(WorkerId("gpu"), PollId("1"), 5))
            assert job is not None
            kept = await api.store_output(job.ref, OutputFile("2", "images", "a.png"), OneByte())
            assert (kept is None) == (rig is without)


# how long they are kept


async def test_a_file_that_an_open_job_brings_is_not_swept(tmp_path: Path) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    async with Engine(store, clock=clock) as engine:
        assets = LocalFileStore(tmp_path, store.documents, clock, keep_s=1000)
        desk = JobInputFiles(engine, assets)

        async def kept(name: str) -> str:
            async def pieces() -> AsyncIterator[bytes]:
                yield name.encode()

            record = await assets.reserve(TenantId("default"), name=name)
            await assets.receive(record, pieces())
            return (await assets.complete(record.file_id)).file_id

        used, unused = await kept("used"), await kept("unused")
        asked = Submission(edit(), inputs=(JobInput("10", "image", used),))
        job_id = (await desk.submit(asked)).job_id
        await clock.advance(1000)
        await kept("in between")
        assert await assets.get(unused) is not None, "it may have been named a moment ago"
        with pytest.raises(Refusal, match="no file"):
            await desk.submit(Submission(edit(), inputs=(JobInput("10", "image", unused),)))
        await clock.advance(4000)
        await kept("another")
        assert await assets.get(unused) is None and await assets.get(used) is not None
        assert len(left_in(tmp_path)) == 2
        await engine.cancel(job_id)
        await clock.advance(100)
        await kept("one more")
        assert await assets.get(used) is None


async def test_old_files_in_use_do_not_keep_others_from_being_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.files.records.PAGE", 2)
    clock = ManualClock()
    assets = LocalFileStore(tmp_path, MemoryStore(clock).documents, clock, keep_s=1000)
    files = []
    for _ in range(5):
        files.append((await assets.reserve(TenantId("acme"))).file_id)
        await clock.advance(1)
    files.sort()
    used = set(files[:3])

    async def in_use(file_id: str) -> bool:
        return file_id in used

    assets.in_use = in_use
    for _ in range(4):
        await clock.advance(2000)
        await assets.reserve(TenantId("acme"))
    left = {file_id for file_id in files if await assets.get(file_id) is not None}
    assert left == used
