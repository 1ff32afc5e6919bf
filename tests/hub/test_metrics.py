"""What Prometheus sees: figures that move with real jobs, read from outside and parsed by its own library."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from tests.hub._hub import HubRig, graph, running_hub
from tests.hub._watching import watching
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Poll, RegisterWorker
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.policy.rules import Rules
from comfyfleet.stores.memory import MemoryStore

FAILED = {"kind": "node_error", "message": "x"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub(rules=Rules(max_attempts=2, retry_base_s=0, retry_cap_s=0)) as rig:
        yield rig


class Figures:
    def __init__(self, text: str) -> None:
        self.labels: set[str] = set()
        self.samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.labels |= sample.labels.keys()
                named = ",".join(sample.labels.values())
                self.samples[f"{sample.name}{{{named}}}" if named else sample.name] = sample.value

    def __getitem__(self, name: str) -> float:
        return self.samples[f"comfyfleet_{name}"]


async def scrape(rig: HubRig, role: Role = Role.VIEWER) -> Figures:
    answer = await rig.get("/metrics", role=role)
    assert answer.status == 200, answer.content
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Figures(answer.content.decode())


async def test_a_scrape_asks_the_store_as_often_for_many_workers_as_for_one(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        worker_id = WorkerId(f"gpu-{number}")
        await rig.engine.register(RegisterWorker(worker_id, Capabilities((Service("comfyui"),)), 1))
        if number < 3:
            await rig.submit()
            assert await rig.engine.poll(Poll(worker_id, PollId("p"), 0)) is not None
    await rig.engine.unregister(WorkerId("gpu-0"), "stopped")
    asked, ask = [], rig.engine.store.leases_of

    async def counted(*worker_ids: WorkerId) -> list[Dispatch]:
        asked.append(worker_ids)
        return await ask(*worker_ids)

    monkeypatch.setattr(rig.engine.store, "leases_of", counted)
    found = await scrape(rig)
    assert [found[f"workers{{{status}}}"] for status in ("busy", "idle", "offline")] == [2, 27, 1]
    assert len(asked) == 1 and WorkerId("gpu-0") not in asked[0]
    workers = (await rig.get("/api/workers")).body["workers"]
    assert sum(bool(worker["current_jobs"]) for worker in workers) == 3
    await rig.get("/")
    assert len(asked) == 3


class NotListed(dict[JobId, Any]):
    """Jobs that can be looked up, and not gone through."""

    def __iter__(self) -> Iterator[JobId]:
        raise AssertionError("all jobs were gone through")

    def values(self) -> Any:
        raise AssertionError("all jobs were gone through")

    items = keys = values


async def test_a_scrape_is_as_long_for_many_workers_workflows_and_tenants_as_for_one_and_no_job_is_read(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def grow(*numbers: int) -> None:
        for number in numbers:
            worker = RegisterWorker(WorkerId(f"gpu-{number}"), Capabilities((Service("comfyui"),)), 1)
            await rig.engine.register(worker)
            for kind in (f"Kind{number}", f"Other{number}"):
                await rig.engine.submit(Submission(graph(kind), tenant=TenantId(f"tenant-{number}")))

    await grow(0)
    await scrape(rig)
    of_one = await scrape(rig)
    await grow(*range(1, 40))
    kept = rig.engine.store._state  # type: ignore[attr-defined]
    monkeypatch.setattr(kept, "entries", NotListed(kept.entries))
    of_many = await scrape(rig)
    assert (of_many["workers{idle}"], of_many["jobs{queued}"]) == (40, 80)
    assert of_many.samples.keys() == of_one.samples.keys()


async def test_scrapes_of_a_shared_store_read_all_workers_once_a_second_at_most(server: str) -> None:
    async with running_hub(store_url=with_prefix(server)) as rig:
        store, read = rig.engine.store, 0
        ask = store.workers

        async def counted() -> list[WorkerRecord]:
            nonlocal read
            read += 1
            return await ask()

        store.workers = counted  # type: ignore[method-assign]
        clock = rig.engine._context.fleet._clock
        began_at = clock.monotonic()
        for _ in range(5):
            await scrape(rig)
        assert read <= 2 + (clock.monotonic() - began_at), "what was read just now is not read again"


async def until(rig: HubRig, is_so: Callable[[Figures], bool]) -> Figures:
    async with asyncio.timeout(60):
        while not is_so(figures := await scrape(rig)):
            await asyncio.sleep(0.01)
    return figures


async def call(rig: HubRig, name: str, **body: Any) -> Any:
    answer = await rig.post(f"/api/worker/{name}", body, role=Role.WORKER)
    assert answer.status < 300, answer.content
    return answer.body if answer.content else None


async def register(rig: HubRig) -> None:
    await call(rig, "register", worker_id="gpu-a", capabilities={"services": ["comfyui"]}, slots=2)


async def lease(rig: HubRig, poll_id: str) -> Any:
    leased = (await call(rig, "poll", worker_id="gpu-a", poll_id=poll_id, wait_s=5))["lease"]
    await call(rig, "heartbeat", worker_id="gpu-a", leases=[leased])
    return leased


async def test_figures_move_with_jobs_from_submission_to_the_end(rig: HubRig) -> None:
    await rig.submit()
    before = await scrape(rig)
    assert (before["jobs{queued}"], before["jobs_waiting{waiting}"], before["jobs{leased}"]) == (1, 1, 0)
    assert before["job_events_total{submitted}"] == 1
    assert before["open_payload_bytes"] > 50
    assert before["job_wait_seconds_count"] == 0
    await register(rig)
    held = await lease(rig, "1")
    running = await scrape(rig)
    assert (running["jobs{queued}"], running["jobs{leased}"], running["workers{busy}"]) == (0, 1, 1)
    assert (running["job_events_total{leased}"], running["job_wait_seconds_count"]) == (1, 1)
    await call(rig, "complete", lease=held, result={"outputs": {}}, seconds=3.5)
    after = await scrape(rig)
    assert (after["jobs{completed}"], after["job_events_total{completed}"]) == (1, 1)
    assert (after["job_run_seconds_count"], after["job_run_seconds_sum"]) == (1, 3.5)
    assert after["open_payload_bytes"] == 0
    assert (after["workers{idle}"], after["workers{busy}"], after["slots"]) == (1, 0, 2)
    assert after["http_requests_total{submit,201}"] == 1
    assert after["http_request_seconds_count{worker_complete}"] == 1


async def test_the_page_on_operations_names_every_figure_and_no_other(rig: HubRig) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    answer = await rig.get("/metrics")
    told = set(re.findall(r"^# TYPE (comfyfleet_\w+)", answer.content.decode(), re.MULTILINE))
    told = {name for name in told if not name.endswith("_created")}
    assert told == set(re.findall(r"`(comfyfleet_\w+)`", page))


async def test_a_failure_is_counted_by_its_kind_each_time_and_the_job_once(rig: HubRig) -> None:
    await rig.submit(max_attempts=2)
    await register(rig)
    for number in ("1", "2"):
        await call(rig, "fail", lease=await lease(rig, number), failure=FAILED)
        for block in (await rig.get("/api/blocks")).body["blocks"]:
            await rig.ask("DELETE", f"/api/blocks/gpu-a/{block['target']}")
    figures = await scrape(rig)
    assert figures["failures_total{node_error}"] == 2
    assert (figures["job_events_total{retried}"], figures["job_events_total{failed}"]) == (1, 1)
    assert figures["jobs{failed}"] == 1
    assert figures["job_events_total{expired}"] == 0


async def test_a_lease_that_ran_out_is_counted_as_expired() -> None:
    async with running_hub(rules=Rules(lease_ttl_s=0.2, acknowledge_s=2)) as rig:
        await rig.submit()
        await register(rig)
        await lease(rig, "1")
        figures = await until(rig, lambda seen: seen["job_events_total{expired}"] == 1)
        assert figures["failures_total{lease_expired}"] == 1


async def test_connections_are_counted_while_they_stay(rig: HubRig) -> None:
    await register(rig)
    polling = asyncio.create_task(call(rig, "poll", worker_id="gpu-a", poll_id="1", wait_s=30))
    headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}
    async with watching(rig, "/api/events"), rig.session.ws_connect(f"{rig.url}/hub", headers=headers):
        kinds = ("stream", "socket", "poll")
        figures = await until(rig, lambda seen: all(seen[f"connections{{{kind}}}"] == 1 for kind in kinds))
        assert figures["idle_slots"] == 1
    polling.cancel()
    await until(rig, lambda seen: not any(seen[f"connections{{{kind}}}"] for kind in kinds))


async def test_no_label_holds_an_id_and_nonsense_makes_no_new_series(rig: HubRig) -> None:
    job_id = await rig.submit()
    await register(rig)
    for path in (f"/api/jobs/{job_id}", "/api/jobs/nobody", "/nowhere/1", "/nowhere/2"):
        await rig.get(path)
    figures = await scrape(rig)
    assert figures.labels == {
        "class",
        "event",
        "kind",
        "le",
        "phase",
        "route",
        "standing",
        "status",
        "version",
    }
    assert not any("gpu-a" in name or job_id in name or "nowhere" in name for name in figures.samples)
    assert figures["http_requests_total{none,404}"] == 2


async def test_a_store_that_does_not_answer_leaves_what_the_process_knows(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.submit()

    async def gone(_: MemoryStore) -> None:
        raise Fault("the database is away")

    monkeypatch.setattr(MemoryStore, "counts", gone)
    figures = await scrape(rig)
    assert (figures["store_up"], figures["job_events_total{submitted}"]) == (0, 1)
    assert "comfyfleet_jobs{queued}" not in figures.samples


async def test_of_two_hubs_each_counts_what_it_did_and_both_tell_what_stands_in_the_store(
    server: str,
) -> None:
    url = with_prefix(server)
    async with running_hub(store_url=url) as first, running_hub(store_url=url) as second:
        job_id = await first.submit()
        # Whoever watches at the other hub makes it hear of the job: that is not its doing.
        async with watching(second, f"/api/jobs/{job_id}/progress") as stream:
            await first.post(f"/api/jobs/{job_id}/cancel")
            await stream.until("cancelled")
        mine, other = await scrape(first), await scrape(second)
        for event in ("submitted", "cancelled"):
            assert mine[f"job_events_total{{{event}}}"] == 1
            assert other[f"job_events_total{{{event}}}"] == 0
        assert mine["jobs{cancelled}"] == other["jobs{cancelled}"] == 1
