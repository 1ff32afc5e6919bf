"""The OpenAPI document is true: schemathesis asks the running hub whatever the document allows, and what it forbids.

In a process of its own, because its plug-in would slow the start of every test run.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.hub._hub import running_hub

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.net.url_guard import UrlGuard

PATIENT = HubLimits(max_wait_s=0.001, requests_per_s=1e6, burst=1_000_000, refusals_burst=1_000_000)

# The fleet's stream has no end to wait for. And whoever tries everything also ends the key it asks with, from which
# moment on it is refused at every other door: what ends keys is for test_keys.py.
LEFT_OUT = ("/api/events", "/api/keys/{key_id}", "/api/keys/{key_id}/rotate", "/api/worker/rotate")

# Not every graph of the right shape is a workflow, and 32.0 is an integer to a schema but not to the decoder.
BEYOND_A_SCHEMA = "positive_data_acceptance"


async def nobody(host: str, port: int) -> list[str]:
    """Whatever names are made up, nothing leaves this machine."""
    return []


@pytest.mark.slow
async def test_no_request_makes_the_hub_fail_or_answer_what_it_does_not_document(tmp_path: Path) -> None:
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert command is not None, "schemathesis is not installed: make .venv/.installed-dev"
    databases = {"default": f"sqlite:///{tmp_path}/tenants.db"}
    async with running_hub(
        limits=PATIENT, folder=tmp_path / "files", guard=UrlGuard(lookup=nobody), databases=databases
    ) as rig:
        await rig.submit()
        worker = RegisterWorker(WorkerId("gpu-a"), Capabilities((Service("comfyui"),)))
        await rig.engine.register(worker)
        process = await asyncio.create_subprocess_exec(
            command,
            "run",
            f"{rig.url}/openapi.json",
            "--header",
            f"Authorization: Bearer {rig.keys[Role.ADMIN]}",
            "--phases=coverage,fuzzing",
            "--exclude-checks",
            BEYOND_A_SCHEMA,
            *(f"--exclude-path={path}" for path in LEFT_OUT),
            # As JSON, or a job's progress would be a stream without an end.
            "--header",
            "Accept: application/json",
            "--max-examples=3",
            "--request-timeout=60",
            "--seed=1",
            "--no-color",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        said = output.decode()
        counts = re.search(r"Selected: (\d+)/(\d+)\n\s+Tested: (\d+)\n", said)
        assert counts is not None, said[-2000:]
        selected, operations, tested = map(int, counts.groups())
        assert (selected, tested) == (operations - len(LEFT_OUT),) * 2
        # A run that is refused at the door shows nothing of what is behind it.
        assert (await rig.get("/api/keys")).status == 200, said[-2000:]
        assert (await rig.get("/health")).status == 200
