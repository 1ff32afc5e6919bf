"""A worker whose network lets nothing in: it completes jobs, is cancelled and drained, and outlives a pulled cable."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance._process import CLI, eventually, picture_workflow, read_until, started
from tests.network._gate import URL, Network, NotHere, network
from tests.servers.redis_server import free_port

LEASE_S = 2.0

# One after the other: they share a hub and a cable.
pytestmark = pytest.mark.xdist_group("network")


class Site:
    """A hub on this machine, the network of a worker that can reach it, and somebody who asks the hub."""

    def __init__(self, url: str, key: str, network: Network, folder: Path) -> None:
        self.url = url
        self.key = key
        self._network = network
        self._folder = folder
        self.pull_the_cable = network.pull_the_cable
        self.put_it_back = network.put_it_back

    def worker(self, stack: ExitStack, name: str, *how: str, is_far: bool = True) -> subprocess.Popen[str]:
        hub = URL if is_far else self.url
        command = (*CLI, "worker", "--hub", hub, "--name", name, "--grace", "0", *how)
        if is_far:
            command = tuple(self._network.inside(*command))
        env = {"COMFYFLEET_KEY": self.key, "COMFYFLEET_DATA": str(self._folder / name)}
        process = stack.enter_context(started(*command, env=env))
        read_until(process, lambda line: line.endswith(": online"))
        return process

    def ask(self, method: str, path: str, body: Any = None, accept: str = "application/json") -> Any:
        """The answer's JSON; its bytes, where it has none."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {self.key}", "accept": accept},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            content: bytes = response.read()
            is_json = response.headers["content-type"] == "application/json"
        return json.loads(content) if is_json else content

    def submit(self, *workers: str) -> str:
        body = {"payload": {"workflow": picture_workflow()}, "requirements": {"workers": workers}}
        return str(self.ask("POST", "/api/jobs", body)["id"])

    def job(self, job_id: str) -> Any:
        return self.ask("GET", f"/api/jobs/{job_id}")

    def facts(self, job_id: str) -> list[tuple[int, str]]:
        """Of a job that has ended, all that happened to it."""
        stream = self.ask("GET", f"/api/jobs/{job_id}/progress", accept="text/event-stream").decode()
        events = [
            dict(line.split(": ", 1) for line in each.splitlines()) for each in stream.split("\n\n") if each
        ]
        return [(int(each["id"]), each["event"]) for each in events if "id" in each]

    def becomes(self, job_id: str, status: str) -> bool:
        return eventually(lambda: bool(self.job(job_id)["status"] == status))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    port = free_port()
    env = {
        "COMFYFLEET_DATA": str(folder / "hub"),
        "COMFYFLEET_RULES_LEASE_TTL_S": str(LEASE_S),
        "COMFYFLEET_RULES_SWEEP_S": "0.5",
        # A worker that lost a lease gets such a workflow again at once.
        "COMFYFLEET_RULES_COOLDOWN_S": "0.1",
        "REDIS_URL": "",
        "HUB_PORT": "",
    }
    with ExitStack() as stack:
        try:
            cable = stack.enter_context(network(folder, port))
        except NotHere as reason:
            pytest.skip(f"no network namespaces: {reason}")
        hub = stack.enter_context(started(*CLI, "hub", "--port", str(port), env=env))
        read_until(hub, lambda line: line.startswith("The hub answers at"))
        known = json.loads((folder / "hub" / "hub.json").read_text())
        yield Site(known["url"], known["key"], cable, folder)


def test_a_worker_that_nobody_can_reach_completes_jobs_and_the_hub_has_their_pictures(site: Site) -> None:
    with ExitStack() as stack:
        site.worker(stack, "far", "--fake", "1")
        (name,) = [
            each["id"] for each in site.ask("GET", "/api/workers")["workers"] if each["status"] == "idle"
        ]
        jobs = [site.submit(name) for _ in range(3)]
        for job_id in jobs:
            assert site.becomes(job_id, "completed"), site.job(job_id)
        (file,) = site.ask("GET", f"/api/jobs/{jobs[0]}/result")["result"]["files"]
        assert file["url"].startswith("/api/files/"), file
        assert site.ask("GET", file["url"]).startswith(b"\x89PNG")


def test_it_is_cancelled_and_drained_from_the_hub(site: Site) -> None:
    with ExitStack() as stack:
        worker = site.worker(stack, "patient", "--simulated", "600")
        job_id = site.submit("patient")
        read_until(worker, lambda line: line.startswith("run "))
        site.ask("POST", f"/api/jobs/{job_id}/cancel")
        assert site.becomes(job_id, "cancelled")
        site.ask("POST", "/api/workers/patient/drain")
        output, errors = worker.communicate(timeout=60)
        assert (worker.returncode, errors) == (0, ""), output


@pytest.mark.slow
def test_a_cable_pulled_for_longer_than_a_lease_and_put_back_leaves_one_completion(site: Site) -> None:
    with ExitStack() as stack:
        site.worker(stack, "near", "--simulated", "0.1", is_far=False)
        site.ask("POST", "/api/workers/near/pause")
        far = site.worker(stack, "cut-off", "--simulated", "3")
        job_id = site.submit("cut-off", "near")
        read_until(far, lambda line: line.startswith("run "))
        # From here on the hub has heard of the run: it is a lease that ends, not one that nobody took up.
        assert eventually(lambda: site.job(job_id)["prompt_id"] is not None)
        site.pull_the_cable()
        # Nobody hears of it any more; when its lease is over, another does the job.
        assert site.becomes(job_id, "queued")
        site.ask("POST", "/api/workers/near/resume")
        assert site.becomes(job_id, "completed")
        site.put_it_back()
        # By itself it is back, and works again; of the job it lost it says nothing that counts.
        next_id = site.submit("cut-off")
        assert site.becomes(next_id, "completed"), site.job(next_id)
        job = site.job(job_id)
        assert [(each["worker_id"], each["outcome"]) for each in job["history"]] == [
            ("cut-off", "expired"),
            ("near", "completed"),
        ]
        kinds = [kind for _, kind in site.facts(job_id)]
        assert kinds.count("completed") == 1
        assert kinds[-1] == "completed"
