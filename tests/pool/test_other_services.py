"""A pool runs payloads of other services on servers that have their connectors."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from comfyfleet import Affinity, Refusal, Server, SyncWorkflowPool, WorkflowPool
from comfyfleet.model.canonical_json import canonical_json
from comfyfleet.model.errors import RefusalCode
from comfyfleet.model.requirement import Requirements
from comfyfleet.worker.connectors.registry import connect
from comfyfleet.worker.connectors.simulated_payload import SimulatedFormat

PAYLOAD: dict[str, Any] = {"seconds": 0, "outputs": {"out": {"texts": ["a"]}}}
MADE = sha256(canonical_json(PAYLOAD)).hexdigest()


def _server(name: str) -> Server:
    return Server(id=name, connector=connect("simulated", "0"))


async def test_a_payload_runs_on_a_server_of_its_service_and_the_result_is_made_from_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(PAYLOAD))
    async with WorkflowPool([_server("a")]) as pool:
        for given in (PAYLOAD, path, str(path)):
            result = await pool.run(given, service="simulated")
            assert result.outputs == {"out": {"texts": ["a"]}, "payload": {"sha256": [MADE]}}
        quote = await pool.quote(PAYLOAD, service="simulated")
        assert quote.workflow_hash == SimulatedFormat().read(PAYLOAD).workflow_hash


async def test_the_requirements_may_name_the_service_too() -> None:
    async with WorkflowPool([_server("a")]) as pool:
        needs = Requirements(service="simulated")
        assert (await pool.run(PAYLOAD, requirements=needs)).outputs["payload"] == {"sha256": [MADE]}
        assert (await pool.run(PAYLOAD, requirements=Requirements(), service="simulated")).outputs
        with pytest.raises(Refusal, match="the service 'simulated', and the job 'other'"):
            await pool.enqueue(PAYLOAD, requirements=needs, service="other")


async def test_an_affinity_belongs_to_the_identity_of_the_payload() -> None:
    affinity = Affinity(SimulatedFormat().read(PAYLOAD).workflow_hash, ["b"])
    async with WorkflowPool([_server("a"), _server("b")], workflow_affinities=[affinity]) as pool:
        for _ in range(3):
            job_id = await pool.enqueue(PAYLOAD, service="simulated")
            await pool.wait(job_id, 60)
            assert (await pool.get_job(job_id)).client_id == "b"


async def test_a_payload_that_is_wrong_or_missing_is_refused(tmp_path: Path) -> None:
    async with WorkflowPool([_server("a")]) as pool:
        for given in ({"second": 1}, tmp_path / "nothing.json"):
            with pytest.raises(Refusal) as refused:
                await pool.enqueue(given, service="simulated")
            assert refused.value.code is RefusalCode.INVALID_WORKFLOW
        with pytest.raises(Refusal, match="does not offer the service 'other'"):
            await pool.enqueue({}, service="other", require_workable=True)


def test_a_script_without_a_loop_runs_a_payload_too() -> None:
    with SyncWorkflowPool([_server("a")]) as pool:
        assert pool.run(PAYLOAD, service="simulated").outputs["payload"] == {"sha256": [MADE]}
