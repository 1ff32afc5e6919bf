"""The same submission under the same key, after the world has changed: it is answered with its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hub._hub import hub_in_process, submission
from tests.hub.test_conversion import editors_workflow, hub_with_agent
from tests.hub.test_inputs import brings, uploaded

from comfyfleet.files.record_store import COLLECTION
from comfyfleet.model.access import Role
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.crypto.keyring import Keyring, MasterKeys
from comfyfleet.stores.crypto.store import encrypted_store


async def test_a_repeat_is_answered_with_its_job_though_its_file_was_swept(tmp_path: Path) -> None:
    async with hub_in_process(folder=tmp_path) as rig:
        file_id = await uploaded(rig)
        body = brings(file_id, reference="r")
        first = await rig.post("/api/jobs", body, role=Role.TENANT)
        await rig.documents.remove(COLLECTION, file_id)
        # Written in another way, too.
        for raw in (msgspec.json.encode(body), msgspec.json.format(msgspec.json.encode(body), indent=4)):
            again = await rig.post("/api/jobs", raw=raw, role=Role.TENANT)
            assert (again.status, again.body["id"]) == (200, first.body["id"])
        for changed in (
            brings(file_id, reference="r", priority=1),
            brings("file-of-nobody", reference="r"),
        ):
            refused = await rig.post("/api/jobs", changed, role=Role.TENANT)
            assert (refused.status, refused.code) == (409, "duplicate_differs"), (
                "its file is not needed to tell"
            )
            assert refused.body["job_id"] == first.body["id"]
        elsewhere = await rig.post("/api/jobs", brings(file_id, reference="other"), role=Role.TENANT)
        assert elsewhere.code == "invalid_request", "under a new key it is a new job, and its file is gone"


async def test_a_repeat_is_answered_with_its_job_though_nobody_could_convert_it_any_more() -> None:
    async with hub_with_agent() as (rig, agent):
        body: dict[str, Any] = {"payload": {"workflow": editors_workflow()}}
        key = {"idempotency-key": "k"}
        first = await rig.post("/api/jobs", body, headers=key)
        await agent.stop()
        again = await rig.post("/api/jobs", body, headers=key)
        assert (first.status, again.status, again.body["id"]) == (201, 200, first.body["id"])
        changed = await rig.post("/api/jobs", {**body, "priority": 1}, headers=key)
        assert (changed.status, changed.code) == (409, "duplicate_differs")
        assert changed.body["job_id"] == first.body["id"]
        new = await rig.post("/api/jobs", {**body, "priority": 1}, headers={"idempotency-key": "new"})
        assert (new.status, new.code) == (422, "unworkable"), "under a new key it is a new job"


async def test_a_repeat_with_another_body_is_told_so_though_the_jobs_that_it_names_are_gone() -> None:
    async with hub_in_process() as rig:
        body = submission()
        key = {"idempotency-key": "k"}
        first = await rig.post("/api/jobs", body, headers=key)
        changed = await rig.post("/api/jobs", {**body, "after": ["swept-long-ago"]}, headers=key)
        assert (changed.status, changed.code) == (409, "duplicate_differs")
        assert changed.body["job_id"] == first.body["id"]


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_what_was_sent_is_known_by_a_digest_that_a_sealed_store_does_not_show(
    tmp_path: Path, is_sealed: bool
) -> None:
    """Whoever reads the store could confirm a guess by it."""

    def around(store: Store, clock: Clock) -> Store:
        masters = MasterKeys({"k1": b"1" * 32}, "k1")
        return (
            encrypted_store(store, Keyring(store.documents, clock, lambda: masters)) if is_sealed else store
        )

    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with hub_in_process(folder=tmp_path, store_url=url, around=around) as rig:
        file_id = await uploaded(rig)
        answer = await rig.post("/api/jobs", brings(file_id, reference="r"), role=Role.TENANT)
        digest = (await rig.engine.get(answer.body["id"])).job.payload.sent
        assert digest is not None and len(digest) == 64
        assert (digest.encode() in written_in(tmp_path)) is not is_sealed


def written_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob("store.db*"))
