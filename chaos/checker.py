"""Reads the logs of callers, workers and the conductor, and nothing else, and says what was lost, doubled or stale.

docs/chaos.md has the definitions in words; each is one function here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import msgspec

from chaos.logs import Line
from chaos.setting import LEASE_S, SLACK_S

Cause = Literal[
    "worker killed", "worker stopped", "server killed", "engine killed", "hub killed", "machine stalled"
]
_NEAREST_FIRST: tuple[Cause, ...] = get_args(Cause)


class Finding(msgspec.Struct, frozen=True):
    """What the logs show. Whatever is wrong is also told in words, for whoever must find out why."""

    submitted: int = 0
    acknowledged: int = 0
    executions: int = 0
    lost: int = 0
    mixed: int = 0
    """Jobs of which a lease or a result had to do with another payload than their caller submitted."""
    compared: int = 0
    """Looks at results whose content was compared with what was submitted."""
    completed_twice: int = 0
    stale_accepted: int = 0
    stale_refused: int = 0
    """Reports of leases that were over, and were told so: without them the zero before would say little."""
    duplicate_executions: int = 0
    explained: dict[str, int] = {}
    unexplained: int = 0
    wrong: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not (
            self.lost
            or self.mixed
            or self.completed_twice
            or self.stale_accepted
            or self.unexplained
            or self.wrong
        )


class _Lease(NamedTuple):
    """One lease of one job; of two leases of a job the later one is the greater."""

    job: str
    round: int
    epoch: int
    number: int

    @staticmethod
    def of(line: Line) -> _Lease:
        assert line.job is not None
        return _Lease(line.job, line.round, line.epoch, line.lease)


class _Away(NamedTuple):
    """When a process could not do its part: from a kill to its next life, from a stop to its end."""

    since: float
    until: float
    cause: Cause

    def meets(self, since: float, until: float) -> bool:
        return self.since <= until and since <= self.until


def check(lines: Sequence[Line], *, wrong_at_most: int = 20) -> Finding:
    lines = sorted(lines, key=lambda line: line.at)
    acknowledged = _acknowledged(lines)
    wrong: list[str] = []
    lost = _lost(lines, acknowledged, wrong)
    mixed, compared = _mixed(lines, acknowledged, wrong)
    twice = _completed_twice(lines, wrong)
    stale_accepted, stale_refused = _stale(lines, wrong)
    duplicates, explained = _duplicates(lines, wrong)
    return Finding(
        submitted=len({line.reference for line in lines if line.what == "submitting"}),
        acknowledged=len(acknowledged),
        executions=sum(line.what == "began" for line in lines),
        lost=lost,
        mixed=mixed,
        compared=compared,
        completed_twice=twice,
        stale_accepted=stale_accepted,
        stale_refused=stale_refused,
        duplicate_executions=duplicates,
        explained=dict(sorted(explained.items())),
        unexplained=duplicates - sum(explained.values()),
        wrong=tuple(wrong[:wrong_at_most]),
    )


def _acknowledged(lines: Iterable[Line]) -> dict[str, set[str]]:
    """By reference, the jobs it was acknowledged as: one, if all is well."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if line.what == "acknowledged" and line.reference and line.job:
            found[line.reference].add(line.job)
    return dict(found)


def _lost(lines: Iterable[Line], acknowledged: dict[str, set[str]], wrong: list[str]) -> int:
    """Acknowledged, and its caller did not get a result that some worker made: each time it looked."""
    executed = {(line.job, line.execution) for line in lines if line.what == "began"}
    good: set[str] = set()
    bad: dict[str, str] = {}
    for line in lines:
        if line.what in ("seen", "read_again") and line.job and line.value:
            if (line.job, line.value) in executed:
                good.add(line.job)
            else:
                bad[line.job] = line.value
    lost = 0
    for reference, jobs in acknowledged.items():
        missing = [job for job in jobs if job not in good or job in bad]
        if missing or len(jobs) > 1:
            lost += 1
            told = "; ".join(f"{job} {bad.get(job, 'was never seen completed')}" for job in missing)
            wrong.append(f"lost: {reference}, acknowledged as {' and '.join(sorted(jobs))}: {told}")
    return lost


def _mixed(lines: Iterable[Line], acknowledged: dict[str, set[str]], wrong: list[str]) -> tuple[int, int]:
    """A lease carried, or a caller was shown, something that was not made from what this caller submitted."""
    asked = {line.reference: line.made for line in lines if line.what == "submitting"}
    own = {job: asked.get(reference) for reference, jobs in acknowledged.items() for job in jobs}
    executed = {(line.job, line.execution) for line in lines if line.what == "began"}
    mixed: set[str] = set()
    compared = 0
    for line in lines:
        if line.job is None or line.job not in own:
            continue
        expected = own[line.job]
        if line.what == "granted":
            # Workers in Node.js show no graph with the lease; what they make of it shows in the result.
            is_wrong = line.made is not None and line.made != expected
            what = f"lease {line.lease} of it carried another payload"
        else:
            is_result = line.what in ("seen", "read_again") and (line.job, line.value) in executed
            compared += is_result
            # What nobody says cannot be compared, and must not pass for equal.
            is_wrong = is_result and (expected is None or line.made != expected)
            what = f"{line.who} was shown what was made from {line.made}, and not from {expected}"
        if is_wrong:
            mixed.add(line.job)
            wrong.append(f"mixed: {line.job}: {what}")
    return len(mixed), compared


def _completed_twice(lines: Iterable[Line], wrong: list[str]) -> int:
    """Two leases of one job had their completion accepted, or its caller was shown two results."""
    accepted: dict[str, set[_Lease]] = defaultdict(set)
    values: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if line.job is None:
            continue
        if line.what == "accepted" and line.report == "complete":
            accepted[line.job].add(_Lease.of(line))
            if line.execution:
                values[line.job].add(line.execution)
        elif line.what in ("seen", "read_again") and line.value:
            values[line.job].add(line.value)
    twice = {job for job, leases in accepted.items() if len(leases) > 1}
    twice |= {job for job, seen in values.items() if len(seen) > 1}
    wrong += [f"completed twice: {job}, with {sorted(values[job])}" for job in sorted(twice)]
    return len(twice)


def _stale(lines: Iterable[Line], wrong: list[str]) -> tuple[int, int]:
    """A report is stale if a worker held a later lease of the job before the report was first sent.

    An accepted completion is stale if there is a later lease at all, whatever the clocks say: a job that was completed
    is never leased again.
    """
    granted: dict[tuple[str, int], dict[_Lease, float]] = defaultdict(dict)
    first_sent: dict[tuple[_Lease, str | None], float] = {}
    for line in lines:
        if line.what == "granted" and line.job:
            granted[line.job, line.round].setdefault(_Lease.of(line), line.at)
        elif line.what == "reporting":
            first_sent.setdefault((_Lease.of(line), line.report), line.at)
    accepted = refused = 0
    for line in lines:
        if line.what not in ("accepted", "refused") or line.job is None:
            continue
        lease = _Lease.of(line)
        later = [at for other, at in granted[line.job, line.round].items() if other > lease]
        sent = first_sent.get((lease, line.report), line.at)
        is_stale = any(at < sent for at in later)
        if line.what == "refused":
            refused += is_stale
        elif is_stale or (later and line.report == "complete"):
            accepted += 1
            wrong.append(f"stale accepted: {line.report} of lease {lease.number} on {line.job} by {line.who}")
    return accepted, refused


def _duplicates(lines: Sequence[Line], wrong: list[str]) -> tuple[int, Counter[str]]:
    """Every execution of a job but its first, and what made it necessary."""
    runs: dict[tuple[str, int], list[Line]] = defaultdict(list)
    for line in lines:
        if line.what == "began" and line.job:
            runs[line.job, line.round].append(line)
    cause_of = _causes(lines)
    duplicates = 0
    explained: Counter[str] = Counter()
    for executions in runs.values():
        # In the order of their leases: a worker that was stopped may begin under an old one after the next has begun.
        executions.sort(key=lambda line: (_Lease.of(line), line.at))
        for before, after in pairwise(executions):
            duplicates += 1
            cause = cause_of(before, after)
            if cause is not None:
                explained[cause] += 1
            else:
                late = [line for line in lines if line.what == "late_beat" and line.who == before.who]
                late = [line for line in late if before.at <= line.at <= after.at]
                wrong.append(
                    f"unexplained: {before.job} began at {before.at:.3f} on {before.who} (lease {before.lease}) and at "
                    f"{after.at:.3f} on {after.who} (lease {after.lease}), and nobody was killed; "
                    f"{len(late)} late heartbeats meanwhile"
                )
    return duplicates, explained


def _causes(lines: Sequence[Line]) -> Callable[[Line, Line], Cause | None]:
    """Who was away when; asked for an execution and the one that repeated it, the nearest cause."""
    back = _returns(lines)
    of_process: dict[str, list[_Away]] = defaultdict(list)
    of_server: list[_Away] = []
    of_engines: list[_Away] = []
    for line in lines:
        name = line.value or ""
        if line.what == "killing" and line.role == "worker":
            # It holds nothing any more; its next life is another.
            of_process[name].append(_Away(line.at, float("inf"), "worker killed"))
        elif line.what == "stopping":
            of_process[name].append(_Away(line.at, back(name, line.at), "worker stopped"))
        elif line.what == "killing" and line.role == "server":
            of_server.append(_Away(line.at, back(name, line.at), "server killed"))
        elif line.what == "killing" and line.role == "database":
            of_engines.append(_Away(line.at, back(name, line.at), "server killed"))
        elif line.what == "killing" and line.role == "engine":
            of_engines.append(_Away(line.at, back(name, line.at), "engine killed"))
        elif line.what == "killing" and line.role == "hub":
            of_engines.append(_Away(line.at, back(name, line.at), "hub killed"))
        elif line.what == "stalled" and line.since is not None:
            of_process[line.who].append(_Away(line.since, line.at, "machine stalled"))

    def cause_of(first: Line, repeat: Line) -> Cause | None:
        since, until = sorted((first.at, repeat.at))
        # A lease may be granted to a worker that sleeps: it begins late, under a lease that is nearly over.
        own = [away for away in of_process[first.who] if away.meets(since - LEASE_S, until)]
        # What others have to reconnect to is felt a little longer than it is away.
        shared = of_server + (of_engines if first.is_bridged else [])
        causes = own + [away for away in shared if away.meets(since - LEASE_S - SLACK_S, until)]
        return min((away.cause for away in causes), key=_NEAREST_FIRST.index, default=None)

    return cause_of


def _returns(lines: Sequence[Line]) -> Callable[[str, float], float]:
    """When a process or the server was back: continued, up, or ready in its next life."""
    times: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line.what in ("up", "continued") and line.value:
            times[line.value].append(line.at)
        elif line.what == "ready":
            name, _, life = line.who.rpartition(".")
            times[f"{name}.{int(life) - 1}"].append(line.at)

    def back(name: str, after: float) -> float:
        return min((at for at in times[name] if at >= after), default=float("inf"))

    return back
