"""What differs between the store and tenants' databases, as operators are told of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.hub._hub import TENANT, HubRig, hub_in_process

from comfyfleet.model.access import Role
from comfyfleet.model.dispatch import AtRevision, Change, Phase, Write
from comfyfleet.model.ids import JobId
from comfyfleet.tenancy import reconciler


@pytest_asyncio.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HubRig]:
    monkeypatch.setattr(reconciler, "LOOK_AGAIN_S", 0.0)
    async with hub_in_process(databases={"default": f"sqlite:///{tmp_path}/default.db"}) as rig:
        await rig.post("/api/tenants", {"id": TENANT})
        yield rig


async def test_a_difference_is_shown_by_a_look_and_gone_after_it_was_mended(rig: HubRig) -> None:
    job_id = JobId(await rig.submit(role=Role.TENANT))
    central = rig.tenant_services.ledger_store.central
    dispatch = await central.load(job_id)
    assert dispatch is not None
    # Ended, and said to be settled, though the tenant's database was never told.
    change = Change(phase=Phase.CANCELLED, settled_at=1.0)
    await central.write(Write(job_id, AtRevision(dispatch.revision), change, job={"phase": Phase.CANCELLED}))
    for _ in range(2):
        looked = (await rig.get("/api/reconcile")).body
        assert [(each["kind"], each["job_id"]) for each in looked["findings"]] == [("unsettled", job_id)]
        assert not looked["is_mended"]
    mended = (await rig.post("/api/reconcile")).body
    assert mended["is_mended"] and mended["findings"] == looked["findings"]
    assert (await rig.get("/api/reconcile")).body["findings"] == []


async def test_operators_look_and_only_administrators_mend(rig: HubRig) -> None:
    assert (await rig.get("/api/reconcile", role=Role.OPERATOR)).status == 200
    assert (await rig.post("/api/reconcile", role=Role.OPERATOR)).code == "not_allowed"
    assert (await rig.get("/api/reconcile", role=Role.TENANT)).code == "not_allowed"
