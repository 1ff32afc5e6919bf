"""Expected starts and ends, quotes, and what an explanation tells of them."""

from __future__ import annotations

import pytest
from tests.engine._model_fleet import CHECKPOINTS, Model, ModelFleet, Server, draw, workflow
from tests.engine._predicted import PredictingFleet
from tests.engine._rig import Rig, graph

from comfyfleet.model.calls import Explanation
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.estimate import JobEstimate, Quote
from comfyfleet.model.ids import JobId, TenantId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.policy.rules import Rules

ANN = TenantId("ann")


async def estimate_of(rig: Rig, job_id: JobId) -> JobEstimate | None:
    dispatch = await rig.store.load(job_id)
    assert dispatch is not None
    return (await rig.engine.estimates([dispatch])).get(job_id)


async def starts_in(rig: Rig, job_id: JobId) -> float | None:
    found = await estimate_of(rig, job_id)
    return None if found is None else found.starts_at - rig.clock.now()


async def run(rig: Rig, worker: str, times: int, seconds: float = 4) -> None:
    """Runs a job so many times, so that its duration is known."""
    for _ in range(times):
        await rig.submit()
        leased = await rig.take(worker)
        await rig.clock.advance(seconds)
        await rig.complete(leased, seconds=seconds)


async def test_a_waiting_job_starts_when_those_before_it_have_run() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await run(rig, "a", 5)
        running = await rig.submit()
        await rig.take("a")
        first, second = await rig.submit(), await rig.submit()
        await rig.clock.advance(1)
        now = rig.clock.now()
        assert await estimate_of(rig, running) == JobEstimate(now - 1, now + 3, False)
        assert await estimate_of(rig, first) == JobEstimate(now + 3, now + 7, False)
        assert await estimate_of(rig, second) == JobEstimate(now + 7, now + 11, False)


async def test_a_workflow_that_ran_fewer_than_five_times_is_a_guess() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        unknown = await rig.submit()
        found = await estimate_of(rig, unknown)
        assert found is not None and found.is_rough
        await rig.engine.cancel(unknown)
        await run(rig, "a", 4)
        found = await estimate_of(rig, await rig.submit())
        assert found is not None and found.is_rough


async def test_a_run_that_takes_longer_than_expected_is_a_guess() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await run(rig, "a", 5)
        job_id = await rig.submit()
        await rig.take("a")
        await rig.clock.advance(6)
        now = rig.clock.now()
        assert await estimate_of(rig, job_id) == JobEstimate(now - 6, now + 2, True)


@pytest.mark.parametrize("what", ["ended", "paused", "queue paused", "held", "no worker"])
async def test_a_job_without_a_foreseeable_start_has_no_estimate(what: str) -> None:
    async with Rig() as rig:
        if what != "no worker":
            await rig.worker("a")
        if what == "held":
            await rig.store.fair_share.put_terms(TenantTerms(ANN, held_until=float("inf")))
        job_id = await rig.submit(tenant=ANN)
        match what:
            case "ended":
                await rig.engine.cancel(job_id)
            case "paused":
                await rig.engine.pause(job_id)
            case "queue paused":
                await rig.engine.pause_queue(True)
            case _:
                pass
        assert await estimate_of(rig, job_id) is None


async def test_a_job_for_later_starts_then_at_the_earliest() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await run(rig, "a", 5)
        await rig.submit()
        job_id = await rig.submit(not_before=rig.clock.now() + 100)
        found = await estimate_of(rig, job_id)
        assert found is not None and found.is_rough
        assert found.starts_at == rig.clock.now() + 100


async def test_a_list_of_jobs_costs_one_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_ids = [await rig.submit() for _ in range(50)]
        read, looks = rig.store.waiting_lanes, list[int]()

        async def counted(limit: int) -> object:
            looks.append(limit)
            return await read(limit)

        monkeypatch.setattr(rig.store, "waiting_lanes", counted)
        for job_id in job_ids:
            assert await estimate_of(rig, job_id) is not None
        dispatches = [each for each in await rig.store.load_many(job_ids) if each is not None]
        assert len(await rig.engine.estimates(dispatches)) == 50
        assert len(looks) == 1


async def test_a_store_that_fails_leaves_jobs_without_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()

        async def broken(_: int) -> object:
            raise RuntimeError("broken")

        monkeypatch.setattr(rig.store, "waiting_lanes", broken)
        assert await estimate_of(rig, job_id) is None


async def test_a_blocked_worker_does_not_count() -> None:
    async with Rig(max_failures_before_block=1) as rig:
        for name in ("a", "b"):
            await rig.worker(name)
        await rig.submit(max_attempts=1)
        await rig.fail(await rig.take("a"))
        await rig.submit()
        await rig.take("b")
        assert await starts_in(rig, await rig.submit()) == 1, "when the job on the other worker should end"


# quotes


async def quoted(rig: Rig | ModelFleet, asked: dict[str, object], **options: object) -> Quote:
    return await rig.engine.quote(Submission(asked, **options))  # type: ignore[arg-type]


async def test_a_quote_tells_start_end_and_duration_and_writes_nothing() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await run(rig, "a", 6)
        await rig.submit()
        await rig.take("a")
        await rig.submit()
        before, version = await rig.engine.stats(), (await rig.store.table()).version
        found, now = await quoted(rig, graph()), rig.clock.now()
        assert found.estimate == JobEstimate(now + 8, now + 12, False)
        assert (found.run_s.expected, found.runs, found.load_s, found.credits) == (4, 6, 0, None)
        assert await rig.engine.stats() == before
        assert (await rig.store.table()).version == version


async def test_a_quote_of_an_unknown_workflow_is_a_guess_with_a_range() -> None:
    async with Rig() as rig:
        await rig.worker("a", "KSampler", "Other")
        await run(rig, "a", 5)
        found = await quoted(rig, graph("Other"))
        assert found.estimate is not None and found.estimate.is_rough and found.runs == 0
        assert found.run_s.low < found.run_s.expected < found.run_s.high


async def test_a_quote_says_what_no_worker_has() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        found = await quoted(rig, graph("Missing"))
        assert found.estimate is None
        assert found.unworkable and "Missing" in found.unworkable[0]
        with pytest.raises(Refusal) as refused:
            await quoted(rig, graph("Missing"), require_workable=True)
        assert refused.value.code is RefusalCode.UNWORKABLE


async def test_a_quote_refuses_what_a_submission_refuses() -> None:
    async with Rig() as rig:
        with pytest.raises(Refusal) as refused:
            await quoted(rig, {"1": {"inputs": {}}})
        assert refused.value.code is RefusalCode.INVALID_WORKFLOW


async def test_a_higher_priority_is_quoted_an_earlier_start() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await run(rig, "a", 5)
        await rig.submit()
        await rig.take("a")
        for _ in range(3):
            await rig.submit()
        low, high = await quoted(rig, graph()), await quoted(rig, graph(), priority=10)
        assert low.estimate is not None and high.estimate is not None
        assert low.estimate.starts_at - high.estimate.starts_at == 12


async def test_a_quote_includes_the_load_of_models_that_no_free_worker_has() -> None:
    red, blue = Model("red.safetensors", 2, 5), Model("blue.safetensors", 2, 5)
    async with ModelFleet([Server("a")], (red, blue)) as fleet:
        await fleet.play([(at, model) for at in (0, 40, 80) for model in (red, blue)])
        loaded = fleet.servers[0].loaded
        for name in (red.name, blue.name):
            found = await quoted(fleet, workflow(name))
            assert found.run_s.expected == pytest.approx(2, abs=0.1)
            assert found.load_s == (0 if name == loaded else pytest.approx(5, abs=0.5))


# explanations


async def explained(fleet: ModelFleet, job_id: JobId, tenant: TenantId | None = None) -> Explanation:
    return await fleet.engine.explain(job_id, tenant)


async def test_an_explanation_names_the_worker_that_a_job_waits_for() -> None:
    red, blue = Model("red.safetensors", 4, 9), Model("blue.safetensors", 1, 9)
    async with ModelFleet([Server("gpu-a"), Server("gpu-b")], (red, blue)) as fleet:
        # One server has blue loaded and is idle, the other one runs red.
        await fleet.play([(at, model) for at in (0, 30, 60, 90, 120, 150) for model in (red, blue)])
        await fleet.submit(red)
        await fleet.settle()
        job_id = await fleet.submit(red)
        await fleet.settle()
        home = next(server.name for server in fleet.servers if server.loaded == red.name)
        found = await explained(fleet, job_id)
        assert f"it waits for {home}, which has its models loaded and is free in about 4 s" in found.summary
        assert "loading them on an idle worker would take about 9 s" in found.summary
        assert found.estimated_start_s == pytest.approx(4, abs=0.5)


async def test_an_explanation_to_a_tenant_names_no_worker_that_it_may_not_know() -> None:
    red, blue = Model("red.safetensors", 4, 9), Model("blue.safetensors", 1, 9)
    async with ModelFleet([Server("gpu-a"), Server("gpu-b")], (red, blue)) as fleet:
        await fleet.play([(at, model) for at in (0, 30, 60, 90, 120, 150) for model in (red, blue)])
        await fleet.submit(red)
        await fleet.settle()
        job_id = await fleet.submit(red, tenant=ANN)
        await fleet.settle()
        found = await explained(fleet, job_id, ANN)
        assert "it waits for another worker" in found.summary
        assert "gpu-" not in str(found)


async def test_an_explanation_tells_the_expected_start() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await run(rig, "a", 5)
        await rig.submit()
        await rig.take("a")
        job_id = await rig.submit()
        found = await rig.engine.explain(job_id)
        assert found.summary.endswith("it is expected to start in about 4 s")
        assert found.estimate is not None and found.estimated_start_s == 4
        await rig.engine.pause_worker(WorkerId("a"))
        assert "expected" not in (await rig.engine.explain(job_id)).summary


# accuracy


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_nine_of_ten_predicted_starts_are_within_a_quarter_or_two_seconds(seed: int) -> None:
    good = asked = 0
    for rate, speeds in (
        (0.5, (1.0,)),
        (1.3, (1.0,)),
        (2.0, (1.0,)),
        (2.4, (1.0,)),
        (1.5, (2.0, 0.5, 1.0, 0.5)),
    ):
        servers = [Server(f"s{number}", speeds[number % len(speeds)]) for number in range(4)]
        async with PredictingFleet(servers, CHECKPOINTS) as fleet:
            await fleet.play(draw(CHECKPOINTS, 150, seed, rate))
        good += sum(not miss for miss in fleet.misses)
        asked += len(fleet.predicted)
    assert asked > 300
    assert good >= 0.9 * asked


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_most_predicted_starts_of_a_batch_are_within_a_quarter_or_two_seconds(seed: int) -> None:
    servers = [Server(f"s{number}") for number in range(4)]
    async with PredictingFleet(servers, CHECKPOINTS, asks_at_submit=False) as fleet:
        await fleet.play(draw(CHECKPOINTS, 90, seed, 1.0))
        await fleet.play_batch(draw(CHECKPOINTS, 64, seed + 10))
    assert len(fleet.predicted) > 50
    assert fleet.good_share >= 0.8


async def test_a_forecast_changes_no_schedule() -> None:
    ended = []
    for asks in (True, False):
        servers = [Server(f"s{number}") for number in range(4)]
        async with PredictingFleet(servers, CHECKPOINTS, Rules(), asks_at_submit=asks) as fleet:
            await fleet.play(draw(CHECKPOINTS, 80, 5, 2.0))
        ended.append([(run.model, run.server, run.at - fleet._began) for run in fleet.order])
    assert ended[0] == ended[1]
