"""Goal 15: a batch of jobs with seven checkpoints on four servers, beside a dispatcher that takes the shortest queue.

Both run the same jobs on fresh fake servers of another process, over HTTP and on the wall clock, with the times of real
cards (`fake_servers`). A server is warm for the checkpoint of its last job. The pool begins knowing nothing about run
and load times. Every picture is downloaded, and must have been made from the graph of its own job.
"""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from collections.abc import Sequence

import aiohttp
import msgspec
from PIL import Image

from bench._content import check_content
from bench._measure import Case, Entry, Plan, entry, in_turn, ratio, ratio_range, rounded
from bench.fake_servers import Wanted, fake_servers, made_from, wanted
from bench.shortest_queue import ShortestQueue
from comfyfleet import WorkflowPool

_SERVERS = 4
_JOBS = 64
_ROUNDS = 3


_Played = tuple[list[float], list[bytes]]
"""When each job ended, in seconds after the first was submitted, and its picture."""


class _Run(msgspec.Struct):
    """What the batch of one round took."""

    makespan_s: float
    mean_s: float
    loads: int


async def batch_with_many_checkpoints(plan: Plan, kind: str) -> list[Entry]:
    rounds = 1 if plan.quick else _ROUNDS
    jobs = 12 if plan.quick else _JOBS
    runs: dict[str, list[_Run]] = {"pool": [], "shortest queue": []}
    players = {"pool": _through_the_pool, "shortest queue": _by_shortest_queue}

    def case(name: str) -> Case:
        async def measure() -> float:
            # The same jobs for both cases of a round, others in the next one.
            batch = wanted(jobs, seed=len(runs[name]) + 1)
            async with fake_servers(_SERVERS) as urls:
                ended, pictures = await players[name](urls, batch)
                loads = await _loads(urls)
            _check(batch, pictures)
            runs[name].append(_Run(max(ended), statistics.fmean(ended), loads))
            return max(ended)

        return measure

    spans = await in_turn({name: case(name) for name in runs}, rounds)
    ours, theirs = runs["pool"], runs["shortest queue"]
    return [
        entry(
            "15a",
            kind,
            f"batch of {_JOBS} jobs, 7 checkpoints, 4 servers: time / a shortest queue's",
            ratio(spans["pool"], spans["shortest queue"]),
            "<= 0.5",
            "ratio",
            range=ratio_range(spans["pool"], spans["shortest queue"]),
            seconds=[[rounded(each.makespan_s) for each in found] for found in (ours, theirs)],
            mean_s=[[rounded(each.mean_s) for each in found] for found in (ours, theirs)],
        ),
        entry(
            "15b",
            kind,
            f"batch of {_JOBS} jobs, 7 checkpoints, 4 servers: model loads",
            statistics.median(each.loads for each in ours),
            "<= 12",
            "loads",
            loads=[[each.loads for each in found] for found in (ours, theirs)],
        ),
    ]


def _check(batch: Sequence[Wanted], pictures: Sequence[bytes]) -> None:
    asked = {str(number): each for number, each in enumerate(batch)}
    made = [(str(number), _made_from(png)) for number, png in enumerate(pictures)]
    assert check_content(asked, made) == len(batch)


def _made_from(png: bytes) -> Wanted:
    with Image.open(io.BytesIO(png)) as picture:
        return made_from(msgspec.json.decode(picture.info["prompt"]))


async def _loads(urls: Sequence[str]) -> int:
    loads = 0
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(f"{url}/fake/stats") as answer:
                loads += (await answer.json())["model_loads"]
    return loads


async def _through_the_pool(urls: Sequence[str], batch: Sequence[Wanted]) -> _Played:
    async with WorkflowPool(list(urls)) as pool:
        began = time.perf_counter()

        async def end_of(job_id: str) -> float:
            await pool.wait(job_id)
            return time.perf_counter() - began

        ids = [await pool.enqueue(each.workflow()) for each in batch]
        ended = await asyncio.gather(*map(end_of, ids))
        pictures = []
        for job_id in ids:
            result = (await pool.get_job(job_id)).result
            assert result is not None
            (file,) = result.files
            pictures.append(await pool.fetch(file))
    return list(ended), pictures


async def _by_shortest_queue(urls: Sequence[str], batch: Sequence[Wanted]) -> _Played:
    async with ShortestQueue(urls) as dispatcher:
        began = time.perf_counter()

        async def end_of(ended: asyncio.Future[None]) -> float:
            await ended
            return time.perf_counter() - began

        queued = [await dispatcher.submit(each.workflow()) for each in batch]
        ended = await asyncio.gather(*(end_of(ended) for _, _, ended in queued))
        pictures = [await dispatcher.fetch(url, prompt_id) for url, prompt_id, _ in queued]
    return list(ended), pictures
