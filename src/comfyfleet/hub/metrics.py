"""Metrics in the Prometheus format. The engine reports writes with their facts, and the request pipeline its answers;
neither keeps counters.

Counters describe this process since its start; sum them over all hubs. Gauges of jobs and workers come from
the store at each scrape and are the same at every hub. No label holds an id.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Tally
from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.http.limits import ConnectionLimits
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.model.dispatch import WriteResult
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.estimate import CapacityReport
from comfyfleet.model.fact import Fact, FactKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.worker import WorkerStatus
from comfyfleet.ports import Counts
from comfyfleet.wire.answers import worker_status

_LOG = logging.getLogger(__name__)

_STORE_ANSWERS_WITHIN_S = 2.0
_WORKERS_MAX_AGE_S = 1.0

_WANTED_WITHIN_S = 300.0
"""`comfyfleet_workers_wanted` counts the workers that would do the waiting work in this time."""
_MOST_CLASSES = 10
_MOST_CHARACTERS = 120
_OTHER = "other"

_EVENTS = {
    FactKind.LEASED: "leased",
    FactKind.COMPLETED: "completed",
    FactKind.FAILED: "failed",
    FactKind.CANCELLED: "cancelled",
    FactKind.RETRYING: "retried",
    FactKind.RELEASED: "released",
    FactKind.LATE: "late",
}
# A fact `queued` is counted as "submitted", or as "reopened" in a later round (a retry by hand). "expired" is counted
# beside "retried" or "failed", when the failure is an expired lease.
_ALL_EVENTS = (*_EVENTS.values(), "submitted", "reopened", "expired")

_WAIT_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600)
_RUN_S = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
_REQUEST_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 60)


class StoredFigures(msgspec.Struct, frozen=True):
    counts: Counts
    is_paused: bool
    workers: Mapping[WorkerStatus, int]
    slots: int
    unrunnable: int
    capacity: CapacityReport


class Metrics:
    def __init__(self, connection_limits: ConnectionLimits, version: str) -> None:
        self._connection_limits = connection_limits
        self._version = version
        self._registry = registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        events = Counter(
            "comfyfleet_job_events", "What this process did to jobs", ["event"], registry=registry
        )
        self._events = {event: events.labels(event) for event in _ALL_EVENTS}
        failures = Counter(
            "comfyfleet_failures",
            "Attempts and jobs that this process saw fail, retried or not",
            ["kind"],
            registry=registry,
        )
        self._failures = {each.value: failures.labels(each.value) for each in FailureKind}
        self._wait = Histogram(
            "comfyfleet_job_wait_seconds",
            "From submission, or from the job's earliest start time, to the first lease",
            buckets=_WAIT_S,
            registry=registry,
        )
        self._run = Histogram(
            "comfyfleet_job_run_seconds",
            "Duration of completed runs, as reported by workers",
            buckets=_RUN_S,
            registry=registry,
        )
        self._requests = Counter(
            "comfyfleet_http_requests",
            "Requests answered; 499 means that the client disconnected first",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "comfyfleet_http_request_seconds",
            "Duration of requests; for streams and parked polls, how long they stayed open",
            ["route"],
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._by_answer: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._stored: StoredFigures | None = None
        self._idle_slots = 0
        registry.register(self)

    def record_write(self, written: WriteResult) -> None:
        for fact in written.facts:
            self._count(fact, written)

    def _count(self, fact: Fact, written: WriteResult) -> None:
        data = fact.data or {}
        failure_kind = data.get("kind", "")
        if fact.kind is FactKind.QUEUED:
            self._events["submitted" if fact.round == 1 else "reopened"].inc()
            return
        if (event := _EVENTS.get(fact.kind)) is None:
            return
        self._events[event].inc()
        if fact.kind is FactKind.LEASED:
            dispatch = written.dispatch
            if dispatch.lease is not None and dispatch.lease.number == 1:
                since = max(dispatch.queued_at, dispatch.not_before or 0.0)
                self._wait.observe(max(0.0, dispatch.lease.leased_at - since))
        elif fact.kind is FactKind.COMPLETED:
            self._run.observe(data.get("seconds", 0.0))
        elif (failure := self._failures.get(failure_kind)) is not None:
            failure.inc()
            if failure_kind == FailureKind.LEASE_EXPIRED:
                self._events["expired"].inc()

    def record_answer(self, route: str, status: int, seconds: float) -> None:
        known = self._by_answer.get((route, status))
        if known is None:
            known = (self._requests.labels(route, str(status)), self._seconds.labels(route))
            self._by_answer[route, status] = known
        known[0].inc()
        known[1].observe(seconds)

    def render(self, stored: StoredFigures | None, idle_slots: int) -> bytes:
        """`stored` is None if the store does not answer."""
        self._stored, self._idle_slots = stored, idle_slots
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily | InfoMetricFamily]:
        """Called by the registry for values that are looked up, not counted."""
        yield InfoMetricFamily("comfyfleet", "The version of this hub", {"version": self._version})
        connections = GaugeMetricFamily(
            "comfyfleet_connections", "Streams, sockets and parked requests of this process", labels=["kind"]
        )
        for kind, number in self._connection_limits.counts().items():
            connections.add_metric([kind], number)
        yield connections
        yield GaugeMetricFamily(
            "comfyfleet_idle_slots", "Slots that wait for a job at this process", self._idle_slots
        )
        stored = self._stored
        yield GaugeMetricFamily(
            "comfyfleet_store_up", "Whether the store answered this scrape", stored is not None
        )
        if stored is not None:
            yield from _in_store(stored)


def _in_store(stored: StoredFigures) -> Iterator[GaugeMetricFamily]:
    counts = stored.counts
    jobs = GaugeMetricFamily(
        "comfyfleet_jobs", "Jobs in the store; ended jobs until they are deleted", labels=["phase"]
    )
    for phase, number in counts.by_phase.items():
        jobs.add_metric([phase.value], number)
    yield jobs
    waiting = GaugeMetricFamily(
        "comfyfleet_jobs_waiting",
        "Queued jobs that can be leased now, wait for a time or other jobs, or are paused",
        labels=["standing"],
    )
    for name in ("waiting", "delayed", "paused"):
        waiting.add_metric([name], getattr(counts, name))
    yield waiting
    yield GaugeMetricFamily(
        "comfyfleet_jobs_unrunnable",
        "Waiting jobs that no online worker can run, among the 2,000 that have waited longest",
        stored.unrunnable,
    )
    yield GaugeMetricFamily(
        "comfyfleet_open_payload_bytes", "Total payload size of all open jobs", counts.payload_bytes
    )
    yield GaugeMetricFamily(
        "comfyfleet_queue_paused", "1 while the queue is paused and nothing is leased", stored.is_paused
    )
    workers = GaugeMetricFamily("comfyfleet_workers", "Known workers", labels=["status"])
    for status in WorkerStatus:
        workers.add_metric([status.value], stored.workers.get(status, 0))
    yield workers
    yield GaugeMetricFamily("comfyfleet_slots", "Slots of workers that are not offline", stored.slots)
    yield from _capacity(stored.capacity)


def _capacity(report: CapacityReport) -> Iterator[GaugeMetricFamily]:
    """The classes and kinds with the most work have their own labels; the others are one."""
    seconds = GaugeMetricFamily(
        "comfyfleet_waiting_gpu_seconds",
        "How long one worker would need for the waiting jobs, by what they need of a worker",
        labels=["class"],
    )
    named: dict[str, float] = {}
    for each in report.classes[:_MOST_CLASSES]:
        name = each.needs[:_MOST_CHARACTERS]
        named[name] = named.get(name, 0.0) + each.gpu_seconds
    for needs, number in named.items():
        seconds.add_metric([needs], number)
    seconds.add_metric([_OTHER], max(0.0, round(report.gpu_seconds - sum(named.values()), 3)))
    yield seconds
    wanted = GaugeMetricFamily(
        "comfyfleet_workers_wanted",
        f"How many more workers would do the waiting work within {report.within_s:g} s, by kind",
        labels=["kind"],
    )
    kinds = Tally[str]()
    for number, more in enumerate(report.wanted):
        kinds[more.kind[:_MOST_CHARACTERS] if number < _MOST_CLASSES else _OTHER] += more.workers
    kinds.setdefault(_OTHER, 0)
    for kind, workers in kinds.items():
        wanted.add_metric([kind], workers)
    yield wanted


class MetricsHandlers:
    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def metrics(self, call: HubRequest[None]) -> Reply:
        if call.caller.scope is not None:
            raise Refusal(
                RefusalCode.NOT_ALLOWED,
                "metrics cover the whole fleet, and this key sees one tenant only: use GET /api/stats",
            )
        stored = None
        try:
            async with asyncio.timeout(_STORE_ANSWERS_WITHIN_S):
                stored = await self._read_store()
        except Refusal:
            raise
        except Exception as error:
            _LOG.warning("the store did not answer while metrics were collected: %r", error)
        text = self._metrics.render(stored, self._engine.idle_slots)
        return Reply(200, text, content_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _read_store(self) -> StoredFigures:
        # All records of a large fleet are megabytes, so a recent read is reused.
        reader, workers = self._engine.reader, await self._engine.workers(max_age_s=_WORKERS_MAX_AGE_S)
        # Most workers in a long list are offline and have no lease.
        leases = await self._engine.leases(worker for worker in workers if not worker.is_offline)
        statuses = Tally(worker_status(worker, leases.get(worker.worker_id, [])) for worker in workers)
        slots = sum(worker.slots for worker in workers if not worker.is_offline)
        unrunnable = await self._engine.unrunnable()
        return StoredFigures(
            await reader.counts(),
            await reader.is_queue_paused(),
            statuses,
            slots,
            unrunnable,
            await self._engine.capacity(_WANTED_WITHIN_S),
        )
