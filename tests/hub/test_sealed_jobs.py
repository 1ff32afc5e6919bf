"""A hub whose jobs are sealed: callers notice nothing, until a tenant's keys are destroyed."""

from __future__ import annotations

from tests.hub._hub import hub_in_process

from comfyfleet.model.ids import TenantId
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.crypto.keyring import Keyring, MasterKeys
from comfyfleet.stores.crypto.store import encrypted_store

MASTERS = MasterKeys({"k1": b"1" * 32}, "k1")


async def test_a_job_whose_key_was_destroyed_is_listed_and_says_why_it_cannot_be_read() -> None:
    keyrings: list[Keyring] = []

    def around(store: Store, clock: Clock) -> Store:
        keyrings.append(Keyring(store.documents, clock, lambda: MASTERS))
        return encrypted_store(store, keyrings[0])

    async with hub_in_process(around=around) as rig:
        job_id = await rig.submit(metadata={"for": "the cover"})
        job = (await rig.get(f"/api/jobs/{job_id}")).body
        assert job["metadata"] == {"for": "the cover"} and job["unreadable"] is None
        await keyrings[0].crypto_shred(TenantId(job["tenant"]))
        told = (await rig.get(f"/api/jobs/{job_id}")).body
        assert told["metadata"] is None and "was destroyed" in told["unreadable"]
        (listed,) = (await rig.get("/api/jobs")).body["jobs"]
        assert listed["unreadable"] == told["unreadable"] and listed["submitted_at"] == job["submitted_at"]
        result = await rig.get(f"/api/jobs/{job_id}/result")
        assert (result.status, result.code) == (404, "not_found")
        assert "was destroyed" in result.body["detail"]
        cancelled = await rig.post(f"/api/jobs/{job_id}/cancel")
        assert cancelled.status == 200, "it is a job like any other"
        retried = await rig.post(f"/api/jobs/{job_id}/retry")
        assert (retried.status, retried.code) == (409, "wrong_phase")
        assert "can no longer be read" in retried.body["detail"]
