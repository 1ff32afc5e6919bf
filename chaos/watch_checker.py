"""Reads what watchers of a hub wrote down: did any of them miss a change, hear it twice or out of order?

What became of the jobs is `checker.py`'s; docs/chaos.md has both in words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from chaos.logs import Line
from chaos.watchers import ENDS, FINAL


class Watched(msgspec.Struct, frozen=True):
    streams: int = 0
    """Pairs of a watcher and a job."""
    facts: int = 0
    returns: int = 0
    """How often a stream was lost and taken up again."""
    missed: int = 0
    """Streams that were not the whole story, each change once and in order."""
    back: int = 0
    """Workers that began a job after the last kill."""
    wrong: tuple[str, ...] = ()


def check_watchers(
    lines: Sequence[Line], *, streams: int, sockets: int, workers: Sequence[str], wrong_at_most: int = 20
) -> Watched:
    """Every acknowledged job has so many watchers of each kind. `workers`: those that there are."""
    jobs = {line.job for line in lines if line.what == "acknowledged" and line.job}
    wrong: list[str] = []
    heard = _by_watcher(lines, "fact")
    missed = _missed(heard, jobs, streams, wrong) + _untold(_by_watcher(lines, "told"), jobs, sockets, wrong)
    back = _came_back(lines, workers, wrong)
    return Watched(
        streams=sum(map(len, heard.values())),
        facts=sum(line.what == "fact" for line in lines),
        returns=sum(line.what == "came_back" for line in lines),
        missed=missed,
        back=back,
        wrong=tuple(wrong[:wrong_at_most]),
    )


def _by_watcher(lines: Sequence[Line], what: str) -> dict[str, dict[str, list[Line]]]:
    """By job, then by watcher: what it heard, in the order in which it heard it."""
    found: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line.what == what and line.job:
            found[line.job][line.who].append(line)
    return found


def _missed(heard: dict[str, dict[str, list[Line]]], jobs: set[str], streams: int, wrong: list[str]) -> int:
    missed = 0
    for job in sorted(jobs | heard.keys()):
        watchers = heard.get(job, {})
        if len(watchers) != streams:
            missed += abs(streams - len(watchers))
            wrong.append(f"watched by {sorted(watchers)} and not by {streams}: {job}")
        stories = {tuple((line.number, line.value) for line in told) for told in watchers.values()}
        if len(stories) > 1:
            missed += 1
            wrong.append(f"told differently to its watchers: {job}: {sorted(stories)}")
        for who, told in watchers.items():
            numbers = [line.number for line in told]
            ends = [line.value for line in told if line.value in FINAL]
            if numbers != list(range(1, len(numbers) + 1)) or ends != [told[-1].value]:
                missed += 1
                story = ", ".join(f"{line.number} {line.value}" for line in told)
                wrong.append(
                    f"not each change once and in order, to one end: {job}, as {who} heard it: {story}"
                )
    return missed


def _untold(told: dict[str, dict[str, list[Line]]], jobs: set[str], sockets: int, wrong: list[str]) -> int:
    """Over the WebSocket every watcher hears the end, and hears it once."""
    missed = 0
    for job in sorted(jobs):
        heard = [[line.value for line in lines] for lines in told.get(job, {}).values()]
        if len(heard) != sockets or any(len(each) != 1 or each[0] not in ENDS for each in heard):
            missed += 1
            wrong.append(f"the end was not told once to each of {sockets} over the WebSocket: {job}: {heard}")
    return missed


def _came_back(lines: Sequence[Line], workers: Sequence[str], wrong: list[str]) -> int:
    last = max((line.at for line in lines if line.what == "killing"), default=0.0)
    busy = {line.who for line in lines if line.what == "began" and line.at > last}
    wrong += [f"did not come back after the last kill: {worker}" for worker in workers if worker not in busy]
    return len(busy & set(workers))
