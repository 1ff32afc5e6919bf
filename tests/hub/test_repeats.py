"""The same submission under the same key, after the world has changed: it is answered with its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tests.hub._hub import hub_in_process
from tests.hub.test_conversion import editors_workflow, hub_with_agent
from tests.hub.test_inputs import brings, uploaded

from comfyfleet.assets.keeping import DRAWER
from comfyfleet.model.access import Role


async def test_a_repeat_is_answered_with_its_job_though_its_file_was_swept(tmp_path: Path) -> None:
    async with hub_in_process(folder=tmp_path) as rig:
        file_id = await uploaded(rig)
        body = brings(file_id, reference="r")
        first = await rig.post("/api/jobs", body, role=Role.TENANT)
        await rig.cabinet.remove(DRAWER, file_id)
        # Written in another way, too.
        for raw in (msgspec.json.encode(body), msgspec.json.format(msgspec.json.encode(body), indent=4)):
            again = await rig.post("/api/jobs", raw=raw, role=Role.TENANT)
            assert (again.status, again.body["id"]) == (200, first.body["id"])
        for changed in (brings(file_id, reference="r", priority=1), brings(file_id, reference="other")):
            refused = await rig.post("/api/jobs", changed, role=Role.TENANT)
            assert refused.code == "invalid_request", (
                "what is not the same cannot be compared without its file"
            )


async def test_a_repeat_is_answered_with_its_job_though_nobody_could_convert_it_any_more() -> None:
    async with hub_with_agent() as (rig, agent):
        body: dict[str, Any] = {"payload": {"workflow": editors_workflow()}}
        key = {"idempotency-key": "k"}
        first = await rig.post("/api/jobs", body, headers=key)
        await agent.stop()
        again = await rig.post("/api/jobs", body, headers=key)
        assert (first.status, again.status, again.body["id"]) == (201, 200, first.body["id"])
        changed = await rig.post("/api/jobs", {**body, "priority": 1}, headers=key)
        assert (changed.status, changed.code) == (422, "unworkable")
