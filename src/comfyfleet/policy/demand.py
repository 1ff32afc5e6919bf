"""What is asked for, and how often: the mean time between requests for each set of models, and the mix of requests.

Each engine counts the jobs that it enqueues, and the jobs of others that it leases. Only ratios matter, so a sample
will do, and nothing is stored. Time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from comfyfleet.model.ids import WorkflowHash

ModelSet = frozenset[str]
"""The names of all models that a job needs, with forward slashes. The set is one thing: its load time is learned, and
its requests are counted, as a whole."""

_GAP_WEIGHT = 0.2
"""The weight of the newest request in the mean time between requests."""
_REQUESTS = 64
"""Shares are those of about the last so many requests."""
_MAX_KINDS = 64
"""At most so many kinds of requests have a share. The rarest is forgotten."""
_MAX_GAPS = 4096
_MAX_RECENT = 4096
_RESCALE_AT = 1e12


class RequestKind(NamedTuple):
    """Requests with equal models and workflow take equally long."""

    models: ModelSet
    workflow_hash: WorkflowHash


class Share(NamedTuple):
    """The part of one kind in the requests."""

    kind: RequestKind
    requested: float
    cold: float
    """The part of all requests that are of this kind and for which first come, first served would load its models."""


class DemandTracker:
    def __init__(self) -> None:
        self.requests = 0
        self._gaps: dict[ModelSet, tuple[float, float]] = {}
        """The mean gap, infinite until the second request, and the time of the last request."""
        self._weights: dict[RequestKind, tuple[float, float]] = {}
        """How often each kind was requested, and how often after something else: old requests weigh less."""
        self._total = 0.0
        self._recent: deque[ModelSet] = deque(maxlen=_MAX_RECENT)

    def record(self, kind: RequestKind, now: float, slots: int) -> None:
        """Counts a request while the fleet has so many slots."""
        models = kind.models
        mean, last = self._gaps.pop(models, (inf, -inf))
        gap = now - last
        self._gaps[models] = (gap if mean == inf else mean + _GAP_WEIGHT * (gap - mean), now)
        if len(self._gaps) > _MAX_GAPS:
            del self._gaps[next(iter(self._gaps))]
        # First come, first served: a server takes about every so-many-th job.
        recent, back = self._recent, max(1, slots)
        is_cold = bool(models) and (len(recent) < back or recent[-back] != models)
        recent.append(models)
        self._add(kind, 1.0, float(is_cold))

    def seed(self, waiting: Iterable[tuple[RequestKind, int]]) -> None:
        """Before the first request: takes the mix of the jobs that wait, as after a restart."""
        counted = [(kind, min(count, _REQUESTS)) for kind, count in waiting]
        total = sum(count for _, count in counted)
        for kind, count in counted:
            same = sum(its for other, its in counted if other.models == kind.models)
            cold = 1 - same / total if kind.models else 0.0
            for _ in range(count):
                self._add(kind, 1.0, cold)

    def gap_s(self, models: ModelSet, now: float) -> float:
        """The mean time between requests for the models, or since the last one if longer. Infinite: not known."""
        known = self._gaps.get(models)
        if known is None:
            return inf
        mean, last = known
        return max(mean, now - last)

    def shares(self) -> Iterator[Share]:
        if self._total:
            for kind, (requested, cold) in self._weights.items():
                yield Share(kind, requested / self._total, cold / self._total)

    def _add(self, kind: RequestKind, count: float, cold: float) -> None:
        self.requests += 1
        # Instead of shrinking all older weights, the newer ones grow.
        weight = count if self.requests <= _REQUESTS else self._total / (_REQUESTS - 1)
        requested, its_cold = self._weights.get(kind, (0.0, 0.0))
        self._weights[kind] = (requested + weight, its_cold + cold * weight)
        self._total += weight
        if len(self._weights) > _MAX_KINDS:
            rarest = min(
                (each for each in self._weights if each != kind), key=lambda each: self._weights[each]
            )
            self._total -= self._weights.pop(rarest)[0]
        if self._total > _RESCALE_AT:
            self._weights = {
                each: (requested / self._total, its_cold / self._total)
                for each, (requested, its_cold) in self._weights.items()
            }
            self._total = sum(requested for requested, _ in self._weights.values())
