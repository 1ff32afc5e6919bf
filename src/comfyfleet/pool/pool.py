"""`WorkflowPool`: a library that drives N ComfyUI servers as one.

It combines an engine on a store with one agent for each server. The engine and its policy make all decisions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import Explanation
from comfyfleet.model.editor_conversion import is_editor_workflow
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.estimate import Quote
from comfyfleet.model.fact import FleetEvent
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import Attachment, JobResult, OutputFile, Submission, Urgency
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.requirement import Preferences, Requirements
from comfyfleet.model.workflow_hash import hash_workflow
from comfyfleet.policy.failover import FailoverStrategy
from comfyfleet.policy.rules import Rules, problem_of
from comfyfleet.pool.events import EventDispatcher, EventName, Handler, PoolEvent
from comfyfleet.pool.notices import Notices
from comfyfleet.pool.options import (
    JOB,
    POOL,
    PRIORITY,
    WAIT,
    Affinity,
    AffinityMode,
    Seconds,
    Server,
    check,
    check_outputs,
    checked,
    of_service,
    read_payload,
    read_workflow,
    routed,
    seconds,
    timeouts,
)
from comfyfleet.pool.output_files import write_new
from comfyfleet.pool.records import (
    BlockedWorkflow,
    JobCancelled,
    JobFailed,
    JobRecord,
    JobWaiters,
    PoolStats,
    block_of,
    record_of,
    within,
)
from comfyfleet.pool.servers import PoolAgents, PoolServers
from comfyfleet.ports import Store
from comfyfleet.stores.factory import open_store, refuse_if_encrypted
from comfyfleet.stores.failure_texts import without_a_hub
from comfyfleet.worker.connectors.comfyui import ComfyUISettings
from comfyfleet.worker.connectors.registry import payload_formats
from comfyfleet.worker.settings import AgentSettings, AgentState

_LOG = logging.getLogger(__name__)

# Most jobs have none and share this value.
_NO_PREFERENCES = Preferences()


class WorkflowPool:
    """One address for several ComfyUI servers.

    Use it as an async context manager, or call `start()` and `close()`. Durations are seconds or `timedelta`s.
    """

    def __init__(
        self,
        servers: Iterable[str | Server] = (),
        *,
        store: str | Store = "memory:",
        cooldown: Seconds = 60,
        max_failures_before_block: int = 1,
        failover: FailoverStrategy | None = None,
        workflow_affinities: Iterable[Affinity] = (),
        max_attempts: int = 3,
        execution_start_timeout: Seconds | None = 600,
        node_execution_timeout: Seconds | None = 600,
        affinity_wait: Seconds = 3,
        patience: float = 2,
        health_check_interval: Seconds = 10,
        reconnection_grace: Seconds = 5,
        slots: int = 1,
        rules: Rules | None = None,
        agent: AgentSettings | None = None,
        comfyui: ComfyUISettings | None = None,
    ) -> None:
        """`store` is a URL, or your own store that is not open yet (docs/stores.md).

        `slots` is the default number of jobs that a server gets at a time. `rules`, `agent` and `comfyui` have further
        settings; the arguments of the pool override them."""
        check(POOL, locals())
        clock = SystemClock()
        changed = msgspec.structs.replace(
            rules or Rules(),
            cooldown_s=seconds(cooldown) or 0.0,
            max_failures_before_block=max_failures_before_block,
            max_attempts=max_attempts,
            start_timeout_s=seconds(execution_start_timeout),
            stall_timeout_s=seconds(node_execution_timeout),
            affinity_wait_s=seconds(affinity_wait) or 0.0,
            patience=patience,
        )
        if (problem := problem_of(changed)) is not None:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"the rule {problem[0]} is not valid: it {problem[1]}")
        self._engine = Engine(
            without_a_hub(open_store(store, clock)),
            rules=changed,
            clock=clock,
            strategy=failover,
            formats=payload_formats(),
        )
        agent_settings = msgspec.structs.replace(
            agent or AgentSettings(),
            health_interval_s=seconds(health_check_interval) or 0.0,
            reconnect_grace_s=seconds(reconnection_grace) or 0.0,
        )
        agents = PoolAgents(self._on_state, agent_settings, comfyui)
        self._servers = PoolServers(self._engine, agents, slots)
        self._affinities = {checked(each).workflow_hash: each for each in workflow_affinities}
        self._dispatcher = EventDispatcher(self._engine)
        self._notices = Notices(self._engine, self._dispatcher.on_event)
        self._waiting = JobWaiters()
        self._forgets = isinstance(store, str) and store.startswith("memory:")
        self._first_servers = tuple(servers)
        self._state: Literal["new", "open", "closed"] = "new"

    # life

    async def __aenter__(self) -> WorkflowPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect to the servers. A server that is down does not fail the start: the pool keeps trying."""
        if self._state != "new":
            raise RuntimeError("a pool is started once; make a new one")
        # If the store cannot be opened, there is nothing to close.
        self._state = "closed"
        await self._engine.__aenter__()
        self._state = "open"
        self._engine.bus.listen(self._waiting.on_event)
        self._dispatcher.start()
        self._notices.start()
        try:
            await refuse_if_encrypted(self._engine.store.documents)
            for server in self._first_servers:
                await self._servers.add(server)
            await self._servers.agents.wait_for_first_checks()
        except BaseException:
            await self.close()
            raise
        message = f"{self._servers.online()} of {len(self._servers.agents)} server(s) online"
        self._dispatcher.on_event(FleetEvent("ready", self._engine.now(), WorkerId(""), {"message": message}))

    async def close(self) -> None:
        """Stop at once and cancel running jobs on their servers. Call `drain()` first to let them finish."""
        if self._state != "open":
            self._state = "closed"
            return
        self._state = "closed"
        if self._forgets:
            stats = await self._engine.stats()
            if left := stats.waiting + stats.delayed + stats.paused + stats.leased:
                _LOG.warning(
                    "%d job(s) were still waiting or running and are lost with the memory store", left
                )
        await self._notices.close()
        await self._servers.agents.close()
        await self._engine.close()
        self._waiting.wake_all()
        await self._dispatcher.close()

    async def drain(self) -> None:
        """Take no new jobs, and return when the running ones have ended."""
        await self._servers.agents.drain()

    # servers

    async def add_server(self, server: str | Server) -> str:
        """Add a server and return its id when the pool has asked it for its inventory."""
        self._must_be_open()
        server_id = await self._servers.add(server)
        await self._servers.agents.wait_for_first_checks()
        return server_id

    async def remove_server(self, client_id: str, *, drain: bool = True) -> None:
        """With `drain` the running jobs end first. Without it they go to other servers at once."""
        await self._servers.remove(client_id, drain=drain)

    async def refresh(self, client_id: str | None = None) -> None:
        """Read again what the servers have installed."""
        await self._servers.refresh(client_id)

    # jobs

    async def enqueue(
        self,
        workflow: Mapping[str, Any] | str | Path,
        *,
        priority: int = 0,
        job_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        max_attempts: int | None = None,
        retry_delay: Seconds | None = None,
        preferred_client_ids: Sequence[str] = (),
        excluded_client_ids: Sequence[str] = (),
        affinity_mode: AffinityMode = "require",
        include_outputs: Sequence[str] = (),
        attachments: Sequence[Attachment] = (),
        execution_start_timeout: Seconds | None = None,
        node_execution_timeout: Seconds | None = None,
        timeout: Seconds | None = None,
        not_before: float | None = None,
        deadline: float | None = None,
        on_deadline: Literal["fail", "flag"] = "fail",
        urgency: Urgency = "normal",
        service: str | None = None,
        requirements: Requirements | None = None,
        preferences: Preferences | None = None,
        require_workable: bool = False,
    ) -> str:
        """Submit a job and return its id at once. The workflow is a graph, or a path to one. With another
        `service` than ComfyUI it is that service's payload.

        `preferred_client_ids` restricts the job to these servers (`affinity_mode="prefer"` waits a little for them,
        then takes any). It overrides an affinity of the workflow. `seed: -1` becomes a random seed, which the record
        shows. `timeout` ends the job so long after now, in any state. Raises `Refusal`, whose `code` and message say
        what to change.
        """
        check(JOB, locals())
        self._must_be_open()
        needs, ranking = of_service(requirements, service), preferences or _NO_PREFERENCES
        graph = await self._payload(workflow, needs.service)
        if needs.service == COMFYUI:
            check_outputs(include_outputs, graph)
        affinity = self._affinities.get(self._hash(graph, needs.service)) if self._affinities else None
        if affinity is not None and not preferred_client_ids:
            excluded_client_ids = (*affinity.excluded_client_ids, *excluded_client_ids)
            preferred_client_ids, affinity_mode = affinity.preferred_client_ids, affinity.mode
        if preferred_client_ids or excluded_client_ids:
            wanted = Affinity("", preferred_client_ids, excluded_client_ids, affinity_mode)
            needs, ranking = routed(needs, ranking, wanted, self._servers.agents.names())
        submission = Submission(
            graph,
            reference=job_id,
            priority=priority,
            urgency=urgency,
            requirements=needs,
            preferences=ranking,
            metadata=dict(metadata) if metadata else None,
            max_attempts=max_attempts,
            retry_delay_s=seconds(retry_delay),
            timeouts=timeouts(execution_start_timeout, node_execution_timeout, timeout),
            not_before=not_before,
            deadline=deadline,
            on_deadline=on_deadline,
            include_outputs=tuple(include_outputs),
            attachments=tuple(attachments),
            require_workable=require_workable,
        )
        submitted = await self._engine.submit(submission)
        public_id = job_id or submitted.job_id
        self._notices.enqueued(submitted, public_id, needs, metadata)
        return public_id

    async def _payload(self, given: Mapping[str, Any] | str | Path, service: str) -> dict[str, Any]:
        if service != COMFYUI:
            return read_payload(given)
        graph = read_workflow(given)
        return await self.convert(graph) if is_editor_workflow(graph) else graph

    def _hash(self, payload: dict[str, Any], service: str) -> str:
        if service == COMFYUI:
            return hash_workflow(payload)
        return self._engine.payloads.read(service, payload).workflow_hash

    async def quote(
        self,
        workflow: Mapping[str, Any] | str | Path,
        *,
        priority: int = 0,
        service: str | None = None,
        requirements: Requirements | None = None,
        preferences: Preferences | None = None,
    ) -> Quote:
        """When a job would start and end, and how long it would run. Nothing is submitted."""
        self._must_be_open()
        needs = of_service(requirements, service)
        return await self._engine.quote(
            Submission(
                await self._payload(workflow, needs.service),
                priority=priority,
                requirements=needs,
                preferences=preferences or _NO_PREFERENCES,
            )
        )

    async def convert(self, workflow: Mapping[str, Any] | str | Path) -> dict[str, Any]:
        """Convert an editor workflow to an API-format graph. A server that is online must have its nodes."""
        self._must_be_open()
        return await self._engine.convert(read_workflow(workflow))

    async def run(self, workflow: Mapping[str, Any] | str | Path, **options: Any) -> JobResult:
        """`enqueue`, then `wait`."""
        return await self.wait(await self.enqueue(workflow, **options))

    async def wait(self, job_id: str, timeout: Seconds | None = None) -> JobResult:
        """The job's result. Raises `JobFailed`, `JobCancelled`, or `TimeoutError` if it takes longer."""
        record = await self.wait_for_record(job_id, timeout)
        if record.status == "failed":
            raise JobFailed(record)
        if record.status == "cancelled":
            raise JobCancelled(record)
        assert record.result is not None, "a completed job has a result"
        return record.result

    async def wait_for_record(self, job_id: str, timeout: Seconds | None = None) -> JobRecord:
        """The record of the job when it has ended, with any outcome."""
        check(WAIT, locals())
        inner = await self._inner(job_id)
        with self._waiting.for_end_of(inner) as ended, self._engine.following(inner, recheck=ended.set):
            try:
                async with within(seconds(timeout)):
                    while True:
                        ended.clear()
                        record = record_of(await self._engine.get(inner))
                        if record.is_final:
                            return record
                        self._must_be_open()
                        await ended.wait()
            except TimeoutError:
                status = record_of(await self._engine.get(inner)).status
                why = (await self._engine.explain(inner)).summary
                raise TimeoutError(
                    f"job {job_id} has not ended after {seconds(timeout):g} s, it is {status}: {why}"
                ) from None

    async def get_job(self, job_id: str) -> JobRecord:
        return record_of(await self._engine.get(await self._inner(job_id)))

    async def cancel(self, job_id: str, reason: str = "") -> bool:
        """True: the job is cancelled or will be. False: it had ended before."""
        answer = await self._engine.cancel(await self._inner(job_id), reason)
        return answer.cancel_requested or answer.phase.value == "cancelled"

    async def retry(self, job_id: str) -> None:
        """Run a failed or cancelled job again, with new attempts."""
        await self._engine.retry(await self._inner(job_id))

    async def pause(self, job_id: str) -> None:
        await self._engine.pause(await self._inner(job_id))

    async def resume(self, job_id: str) -> None:
        await self._engine.resume(await self._inner(job_id))

    async def set_priority(self, job_id: str, priority: int) -> None:
        check(PRIORITY, locals())
        await self._engine.set_priority(await self._inner(job_id), priority)

    async def explain(self, job_id: str) -> Explanation:
        """Why is my job not running? One reason for each server, the place in the queue, an estimate."""
        return await self._engine.explain(await self._inner(job_id))

    async def events(self, job_id: str) -> AsyncGenerator[PoolEvent, None]:
        """The stored events of a job without progress, then all further ones until the job or the pool ends."""
        async with contextlib.aclosing(self._dispatcher.watch(await self._inner(job_id))) as watched:
            async for event in watched:
                yield event

    async def fetch(self, file: OutputFile, client_id: str | None = None) -> bytes:
        """Download an output from its server."""
        self._must_be_open()
        return await self._servers.fetch(file, client_id)

    async def save(
        self, outputs: OutputFile | JobResult, folder: str | Path, client_id: str | None = None
    ) -> list[Path]:
        """Download an output, or all outputs of a result, into the folder, and return the paths in the same order.

        No file is overwritten: if a name exists, the file gets the first free one like it.
        """
        files = outputs.files if isinstance(outputs, JobResult) else (outputs,)
        return [await write_new(Path(folder), each, await self.fetch(each, client_id)) for each in files]

    async def pause_queue(self) -> None:
        """Start no new jobs on any server. Running jobs continue."""
        await self._engine.pause_queue(True)

    async def resume_queue(self) -> None:
        await self._engine.pause_queue(False)

    # routing

    def set_affinity(self, affinity: Affinity) -> None:
        """Set the affinity of a workflow for later jobs."""
        self._affinities[checked(affinity).workflow_hash] = affinity

    def remove_affinity(self, workflow_hash: str) -> None:
        self._affinities.pop(workflow_hash, None)

    async def blocks(self) -> list[BlockedWorkflow]:
        """Pairs (client, workflow hash) that are blocked or have counted failures."""
        blocks = await self._engine.blocks()
        return [block_of(block) for block in blocks if not block.names_job]

    async def unblock(self, client_id: str, workflow_hash: str) -> bool:
        """False: there was no block."""
        return await self._engine.unblock(WorkerId(client_id), workflow_hash)

    # looking

    async def stats(self) -> PoolStats:
        counts = await self._engine.stats()
        return PoolStats(
            queued=counts.waiting + counts.delayed + counts.paused,
            running=counts.leased,
            completed=counts.completed,
            failed=counts.failed,
            cancelled=counts.cancelled,
            idle_slots=counts.idle_slots,
            servers=await self._servers.stats(),
        )

    def on(
        self, name: EventName | Literal["*"], handler: Handler, where: Mapping[str, Any] | None = None
    ) -> Callable[[], None]:
        """Call `handler`, a plain or async function, for every such event, in order. `where` filters by the job's
        metadata. Returns a function that removes the handler."""
        return self._dispatcher.on(name, handler, where)

    # inside

    def _on_state(self, client_id: str, state: AgentState) -> None:
        self._notices.server_changed(client_id, state)
        data = {"state": state.status.value, "message": state.reason}
        self._dispatcher.on_event(FleetEvent("state", self._engine.now(), WorkerId(client_id), data))

    async def _inner(self, job_id: str) -> JobId:
        """The engine's id for the caller's own job id, or for the engine's id itself."""
        self._must_be_open()
        return await self._engine.by_reference(job_id) or JobId(job_id)

    def _must_be_open(self) -> None:
        if self._state != "open":
            hint = "is not started: use it as `async with`, or call start()"
            if self._state == "closed":
                hint = "is closed: make a new one"
            raise Refusal(RefusalCode.UNAVAILABLE, f"the pool {hint}")
