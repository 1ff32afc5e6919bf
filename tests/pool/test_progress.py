"""What callers are told of a run: in words, how much of it is done, and how long it will still take."""

from __future__ import annotations

from tests.pool._fleet import Fleet, fleet, quick, text_to_image

from comfyfleet import PoolEvent
from comfyfleet.worker.connectors.comfyui.progress_estimate import guess

SLOW = quick(time_scale=0.1)
STEPS = 30


async def progress_of(it: Fleet, steps: int) -> list[PoolEvent]:
    graph = text_to_image(steps=steps)
    graph["5"]["inputs"] |= {"width": 1024, "height": 1024}
    job_id = await it.pool.enqueue(graph)
    await it.pool.wait(job_id, timeout=60)
    return it.told.of("job:progress", job_id)


async def test_progress_is_told_in_words_and_its_percentage_grows_with_the_sampler() -> None:
    async with fleet(SLOW) as it:
        told = await progress_of(it, steps=STEPS)
        percentages = [event.percentage or 0.0 for event in told]
        assert percentages == sorted(percentages) and percentages[-1] == 100.0
        sampling = [event for event in told if event.message.startswith("KSampler: step")]
        whole = sum(map(guess, text_to_image(steps=STEPS).values()))
        assert sampling
        for event in sampling:
            assert event.value is not None and event.percentage is not None
            assert event.message == f"KSampler: step {event.value:g} of {STEPS}"
            # A step of the sampler counts as one.
            assert event.percentage >= 100 * event.value / whole - 0.1


async def test_a_second_run_knows_from_the_first_how_long_it_takes() -> None:
    async with fleet(SLOW) as it:
        first = await progress_of(it, steps=8)
        assert first[0].remaining_s is None
        second = await progress_of(it, steps=80)
        begins = next(event for event in second if event.remaining_s is not None)
        assert begins.percentage is not None and begins.percentage < 50
        assert begins.remaining_s is not None and begins.remaining_s > 0
        assert second[-1].remaining_s == 0
