"""The background jobs of a fake LangFlow: states, keys, events, and what a restart leaves of them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from comfyfleet.testing.fake_comfyui.clock import FakeClock
from comfyfleet.testing.fake_langflow.flows import FakeFlow, Suspended
from comfyfleet.testing.fake_langflow.run import FlowRun, RunFailed, RunRequest, Tell
from comfyfleet.testing.fake_langflow.settings import FakeLangFlowSettings, LangFlowFaults

State = Literal["queued", "in_progress", "suspended", "completed", "failed", "cancelled", "timed_out"]

ENDED: frozenset[State] = frozenset({"completed", "failed", "cancelled", "timed_out"})
KEEPS_KEY: frozenset[State] = frozenset({"queued", "in_progress", "suspended", "completed"})

MakeRun = Callable[[str, FakeFlow, RunRequest, Tell], FlowRun]


class FakeLangFlowJob:
    def __init__(self, flow: FakeFlow, request: RunRequest, session: str | None, key: str | None) -> None:
        self.job_id = str(uuid.uuid4())
        self.flow = flow
        self.request = request
        self.session = session or flow.flow_id
        self.key = key
        self.state: State = "queued"
        self.error: dict[str, Any] | None = None
        self.output: dict[str, Any] | None = None
        self.unclear_until = 0.0
        """Until then a cancelled job shows as failed without a reason."""
        self.durable: list[dict[str, Any]] = []
        self.has_begun = False
        self.has_closed = False
        """No more events will come."""
        self._readers: set[asyncio.Queue[tuple[int, dict[str, Any]] | None]] = set()

    def tell(self, name: str, data: dict[str, Any], is_durable: bool) -> None:
        self.add({"event": name, "data": data}, is_durable=is_durable)

    def add(self, event: dict[str, Any], *, is_durable: bool = True) -> None:
        # Goes through JSON, because messages are changed while a run goes on.
        event = json.loads(json.dumps(event))
        if is_durable:
            self.durable.append(event)
        for reader in self._readers:
            reader.put_nowait((len(self.durable), event))

    def close(self) -> None:
        self.has_closed = True
        for reader in self._readers:
            reader.put_nowait(None)

    def subscribe(self, after: int) -> asyncio.Queue[tuple[int, dict[str, Any]] | None]:
        """The events after this number, then the live ones. None ends them."""
        reader: asyncio.Queue[tuple[int, dict[str, Any]] | None] = asyncio.Queue()
        for number, event in enumerate(self.durable[after:], after + 1):
            reader.put_nowait((number, event))
        if self.has_closed or self.state in ENDED:
            reader.put_nowait(None)
        else:
            self._readers.add(reader)
        return reader

    def unsubscribe(self, reader: asyncio.Queue[tuple[int, dict[str, Any]] | None]) -> None:
        self._readers.discard(reader)


class FakeLangFlowJobs:
    """Survives restarts, like a database. `runs` counts how often each input really ran."""

    def __init__(
        self, settings: FakeLangFlowSettings, faults: LangFlowFaults, clock: FakeClock, make_run: MakeRun
    ) -> None:
        self.by_id: dict[str, FakeLangFlowJob] = {}
        self.runs: list[str] = []
        """The inputs of the runs that began, in order."""
        self._settings = settings
        self._faults = faults
        self._clock = clock
        self._make_run = make_run
        self._places = asyncio.Semaphore(settings.max_concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def submit(
        self, flow: FakeFlow, request: RunRequest, session: str | None, key: str | None
    ) -> FakeLangFlowJob:
        if key is not None:
            for job in self.by_id.values():
                if job.key == key and job.state in KEEPS_KEY:
                    return job
        job = FakeLangFlowJob(flow, request, session, key)
        self.by_id[job.job_id] = job
        if self._faults.forgets_submits:
            self._faults.forgets_submits -= self._faults.forgets_submits > 0
        else:
            self._start(job, self._execute(job))
        return job

    def stop(self, job: FakeLangFlowJob) -> str:
        """Returns the words of the answer."""
        if job.state == "cancelled":
            return f"Job {job.job_id} is already cancelled."
        if job.state in ENDED:
            return f"Job {job.job_id} already finished ({job.state})."
        was_running = job.state == "in_progress"
        job.state = "cancelled"
        if was_running:
            job.unclear_until = self._clock.now() + self._settings.unclear_s
        if (task := self._tasks.get(job.job_id)) is not None:
            task.cancel()
        job.add({"type": "cancelled"})
        job.close()
        return f"Job {job.job_id} cancelled successfully."

    async def end_process(self, *, is_killed: bool) -> None:
        """The server's process ends. Queued jobs stay queued for ever."""
        running = [job for job in self.by_id.values() if job.state == "in_progress"]
        for job in running:
            job.state = "failed"
            job.error = {"type": "worker_lost"} if is_killed else None
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()))
        for job in self.by_id.values():
            if job in running and is_killed:
                job.durable.append({"type": "worker_lost"})
            job.close()
        self._places = asyncio.Semaphore(self._settings.max_concurrency)

    def begin_process(self) -> None:
        for job in self.by_id.values():
            job.has_closed = job.state in ENDED

    def _start(self, job: FakeLangFlowJob, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[job.job_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.job_id, None))

    async def _execute(self, job: FakeLangFlowJob) -> None:
        async with self._places:
            job.state, job.has_begun = "in_progress", True
            if not job.request.is_empty:
                self.runs.append(job.request.input_value or "")
            run = self._make_run(job.job_id, job.flow, job.request, job.tell)
            work = asyncio.create_task(run.execute(self._faults.slow_errors_s))
            waits = [work]
            if self._settings.job_timeout_s is not None:
                waits.append(asyncio.create_task(self._clock.sleep(self._settings.job_timeout_s)))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    job.state = "timed_out"
                    job.add({"type": "timed_out"})
                    job.close()
                    return
                work.result()
                job.output, job.state = run.output, "completed"
            except RunFailed as failed:
                job.error, job.state = failed.detail, "failed"
            except Suspended:
                job.state = "suspended"
                return
            finally:
                for wait in waits:
                    wait.cancel()
            job.add({"event": "end", "data": {"build_duration": 0.01}})
            job.close()
