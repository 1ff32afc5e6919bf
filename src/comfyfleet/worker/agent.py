"""The agent of one worker: it polls, runs jobs on its servers, reports their ends and drains.

It uses only `WorkerApi` and `Connector`, so pools, hubs' workers and direct workers share it. `attempt.py`
runs one lease, `slots.py` polls, `heartbeat.py` confirms leases, `servers.py` checks servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Self, assert_never

from comfyfleet.model.calls import Command, HeartbeatReply, LeasedJob, Release, WorkerReleaseReason
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.worker import Capabilities
from comfyfleet.ports import Connector, WorkerApi
from comfyfleet.tracing import log_fields
from comfyfleet.worker.attempt import MAY_BE_THE_CONNECTION, AttemptRun, StopReason
from comfyfleet.worker.heartbeat import CommandListener, HeartbeatLoop
from comfyfleet.worker.journal import Journal, StartedAttempt, stop_orphan
from comfyfleet.worker.progress_sender import ProgressSender
from comfyfleet.worker.registration import Registration
from comfyfleet.worker.servers import (
    HasClientId,
    MonitoredServer,
    ReportsConnection,
    check_all,
    leaves_runs,
)
from comfyfleet.worker.settings import AgentSettings, AgentState, AgentStatus, Backoff, wait_within
from comfyfleet.worker.slots import AgentContext, Outage, Slots

__all__ = ["Agent", "AgentSettings", "AgentState", "AgentStatus"]

_log = logging.getLogger(__name__)

_MAX_UNREPORTED = 100
"""Each unreported end keeps a result in memory while its slot goes on."""
_SOMETHING_IS_MISSING = frozenset({FailureKind.MISSING_MODEL, FailureKind.MISSING_NODE})
_SERVER_MAY_BE_GONE = MAY_BE_THE_CONNECTION | {FailureKind.DEAD_WORKER}


class Agent:
    def __init__(
        self,
        api: WorkerApi,
        worker_id: WorkerId,
        connectors: Sequence[Connector],
        settings: AgentSettings | None = None,
        declared: Capabilities | None = None,
        on_state: Callable[[AgentState], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._journal = journal
        self.state = AgentState(AgentStatus.STARTING)
        self._api = api
        self._settings = settings or AgentSettings()
        self._on_state = on_state
        self._servers = [
            MonitoredServer(connector, self._settings, self._server_went_down) for connector in connectors
        ]
        self._by_service = {server.name: server for server in self._servers}
        if not connectors or len(self._by_service) != len(connectors):
            raise ValueError(
                "An agent needs one connector for each service, with different names; got: "
                + (", ".join(server.name for server in self._servers) or "none")
            )
        self._progress = ProgressSender(api, self._settings, self._obey)
        self._outage = Outage(worker_id)
        context = AgentContext(api, worker_id, self._settings, self._outage)
        self._heart = HeartbeatLoop(context, self._beat, self._heartbeat_refused)
        self._commands = CommandListener(context, self._do, self._heart.send_soon)
        self._registration = Registration(context, self._servers, declared, self._update, self._renewed)
        self._slots = Slots(
            context,
            self._run,
            lambda: self._registration.number,
            self._registration.renew,
            self._next_begun,
            self._clear_away,
        )
        self._begun: list[StartedAttempt] = []
        """Attempts that the journal lists as started, until a slot polls for them."""
        self._runs: dict[LeaseRef, AttemptRun] = {}
        self._unreported: set[AttemptRun] = set()
        """Runs that have ended and whose reports the hub does not take yet."""
        self._all_reported = asyncio.Event()
        self._all_reported.set()
        self._abandoned: list[LeaseRef] = []
        """Leases of stopped runs, to be released when the hub answers again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None

        self._tend_now = asyncio.Event()
        self._refresh_now = asyncio.Event()
        self._first_verdict = asyncio.Event()
        self._disconnects = 0
        self._is_paused = False
        self._is_draining = False

        self._drained = asyncio.Event()

    # start and stop

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns at once. The agent waits in the background for servers that are down."""
        assert not self._tasks and self._ending is None, "an agent is started once"
        for server in self._servers:
            if isinstance(server.connector, ReportsConnection):
                server.connector.on_connection = partial(self._connection_hint, server)
        if self._journal is not None:
            self._begun.extend(self._journal.open())
            self._registration.instance = self._slots.instance = self._journal.instance
            for server in self._servers:
                if isinstance(server.connector, HasClientId):
                    server.connector.client_id = self._journal.client_id
        self._own(self._keep_going(self._tend))
        self._own(self._keep_going(self._heart.run))
        self._own(self._keep_going(self._progress.run))
        self._own(self._keep_going(self._commands.run))
        self._own(self._keep_going(self._refresh_when_asked))
        for _ in range(self._settings.slots):
            self._own(self._keep_going(self._slots.run_one))

    async def wait_for_first_check(self) -> AgentState:
        """Waits for the first check of all servers."""
        await self._first_verdict.wait()
        return self.state

    async def refresh(self) -> None:
        """Reads the inventories now and registers again, even if nothing changed."""
        if self._registration.offer is not None:
            await self._registration.refresh(is_asked=True)

    async def _refresh_when_asked(self) -> None:
        while True:
            await self._refresh_now.wait()
            self._refresh_now.clear()
            try:
                await self.refresh()
            except Exception as error:
                self._outage.miss(error)

    async def drain(self, reason: str = "drain") -> None:
        """Takes no new jobs, finishes those that run or gives them back after the grace, and unregisters."""
        assert self._tasks or self._ending, "an agent is drained after its start"
        if not self._is_draining:
            self._leave(reason)
            # The agent owns the task: a caller that stops waiting does not stop the drain.
            self._own(self._drain())
        await self._drained.wait()

    async def drained(self) -> None:
        """Returns when a drain has ended, by any caller."""
        await self._drained.wait()

    async def _drain(self) -> None:
        settings = self._settings
        if not await self._is_quiet_within(settings.drain_grace_s):
            self._stop_runs()
            # Long enough to stop a run and to report it. `stop` tears off runs that are still not over.
            longest_s = settings.cancel_timeout_s + settings.cancel_settle_s + settings.stop_grace_s
            await self._is_quiet_within(longest_s)
        await self._registration.end("drain")
        self._drained.set()

    async def stop(self) -> None:
        """Cancels all runs and gives them back. Can be called twice, and by several callers."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        is_started = bool(self._tasks)
        self._leave("stop")
        if is_started:
            self._stop_runs()
            await self._is_quiet_within(self._settings.stop_grace_s)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            # A connector may swallow a cancellation; then it gets another one.
            await asyncio.wait(self._tasks, timeout=self._settings.stop_grace_s)
        await self._registration.end("stopped")
        for server in self._servers:
            if isinstance(server.connector, ReportsConnection):
                server.connector.on_connection = None
            await server.close()
        if self._journal is not None:
            self._journal.close()
        self._drained.set()
        self._tell(AgentStatus.STOPPED, "stop")
        self._first_verdict.set()

    async def _is_quiet_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._slots.idle.wait()
                await self._all_reported.wait()
        return self._slots.idle.is_set() and self._all_reported.is_set()

    def _leave(self, reason: str) -> None:
        self._is_draining = self._registration.is_closed = True
        self._update(reason)

    def _own(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_going(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Restarts a background loop that failed through a defect."""
        backoff = Backoff(self._settings)
        while True:
            try:
                await loop()
            except Exception:
                _log.exception("worker %s: a background loop failed and starts again", self.worker_id)
            await asyncio.sleep(backoff.next_s())

    # leases

    async def _run(self, job: LeasedJob, poll_id: PollId) -> None:
        server = self._by_service.get(job.service)
        if server is None or not server.is_up or self._is_draining:
            await self._release("drain" if self._is_draining else "declined", job.ref)
            if server is None and self._journal is not None:
                # The worker had this service when it began the attempt. It must not ask again at each start.
                self._journal.end(job.ref)
            return
        run = AttemptRun(job, server.connector, self._api, self._progress, self._settings)
        self._runs[job.ref] = run
        self._heart.add(run)
        if self._journal is not None:
            self._journal.begin(job.ref, job.service, poll_id)
        run.may_report_later = len(self._unreported) < _MAX_UNREPORTED
        failure = await self._followed(run, run.run)
        if run.is_unreported:
            # The slot goes on. The agent confirms the lease until the hub takes the report.
            self._unreported.add(run)
            self._all_reported.clear()
            self._own(self._report(run))
        if run.is_abandoned:
            self._abandoned = [*self._abandoned, job.ref][-_MAX_UNREPORTED:]
        if failure is None or self._is_draining:
            return
        if failure.kind in _SOMETHING_IS_MISSING:
            server.add_missing(failure.missing)
            self._tend_now.set()
        if failure.kind is FailureKind.CRASHED:
            server.needs_inventory = True
        if failure.kind is FailureKind.DEAD_WORKER:
            server.defect = failure.message
        if failure.kind in _SERVER_MAY_BE_GONE:
            await self._make_sure(server)

    async def _report(self, run: AttemptRun) -> None:
        try:
            await self._followed(run, run.report)
        finally:
            self._unreported.discard(run)
            if not self._unreported:
                self._all_reported.set()

    async def _followed(
        self, run: AttemptRun, work: Callable[[], Awaitable[Failure | None]]
    ) -> Failure | None:
        """Logs the work and writes its end into the journal once it is reported."""
        job, is_over = run.job, False
        trace = {"traceparent": job.traceparent} if job.traceparent is not None else {}
        try:
            with log_fields(worker_id=self.worker_id, job_id=job.job_id, attempt_id=job.attempt_id, **trace):
                if not run.is_unreported:
                    _log.info("%s starts the job", job.service)
                failure = await work()
                if is_over := not run.is_unreported:
                    _log.info(
                        "the job has ended%s",
                        "" if failure is None else f": {failure.kind}: {failure.message}",
                    )
        finally:
            if not run.is_unreported or run in self._unreported:
                self._heart.remove(run)
                del self._runs[job.ref]
        # A run that was torn off or not reported stays in the journal: the next start asks the hub about it.
        if is_over and self._journal is not None and run.is_known_over:
            self._journal.end(job.ref)
        return failure

    def _next_begun(self) -> StartedAttempt | None:
        """Skips servers that are down: they can neither resume nor stop an attempt."""
        for place, begun in enumerate(self._begun):
            server = self._by_service.get(begun.service)
            if server is None or server.is_up:
                return self._begun.pop(place)
        return None

    async def _clear_away(self, begun: StartedAttempt) -> None:
        server = self._by_service.get(begun.service)
        if server is not None and not leaves_runs(server.connector):
            await stop_orphan(begun, self.worker_id, server.connector, self._settings.cancel_timeout_s)
        if self._journal is not None:
            self._journal.end(begun.ref)

    async def _make_sure(self, server: MonitoredServer) -> None:
        """Returns once the server is certainly up or down: a dead server must not fail job after job."""
        backoff = Backoff(self._settings)
        await server.check()
        while server.is_up and server.missed and not self._is_draining:
            await asyncio.sleep(backoff.next_s())
            await server.check()
        self._tend_now.set()

    async def _release(self, reason: WorkerReleaseReason, *refs: LeaseRef) -> None:
        for ref in refs:
            try:
                await self._api.release(Release(ref, reason))
            except Exception as error:
                # A lease that the agent does not confirm ends by itself.
                _log.info("worker %s: could not release a lease: %r", self.worker_id, error)

    def _stop_runs(self) -> None:
        for run in list(self._runs.values()):
            run.stop(StopReason.DRAIN)

    # replies and commands from the hub

    def _beat(self, beat: HeartbeatReply) -> None:
        self._obey(beat)
        if self._abandoned:
            refs, self._abandoned = self._abandoned, []
            # A hub that was away has extended these leases, and would wait until they expire. The worker stays.
            self._own(self._release("retry", *refs))
        for server in self._servers:
            if server.set_wanted(beat.missing):
                self._tend_now.set()

    def _obey(self, beat: HeartbeatReply) -> None:
        for ref in beat.lost:
            if (run := self._runs.get(ref)) is not None:
                run.stop(StopReason.LEASE_LOST)
        for command in beat.commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command.action:
            case "cancel" | "retry":
                reason = StopReason.CANCELLED if command.action == "cancel" else StopReason.RETRY
                for ref, run in list(self._runs.items()):
                    if ref.job_id == command.job_id and command.lease_number in (0, ref.number):
                        run.stop(reason)
            case "pause":
                self._is_paused = True
                self._update(command.reason or "paused by an operator")
            case "resume":
                self._is_paused = False
                self._update(command.reason or "resumed")
            case "refresh":
                self._refresh_now.set()
            case "drain" if self._is_draining:
                # The hub repeats it with every heartbeat.
                pass
            case "drain":
                self._own(self.drain(command.reason or "drained by an operator"))
            case _:
                assert_never(command.action)

    def _heartbeat_refused(self, refusal: Refusal) -> None:
        if refusal.code is RefusalCode.NOT_FOUND and self._registration.offer is not None:
            self._own(self._registration.renew(self._registration.number))

    # servers

    def _connection_hint(self, server: MonitoredServer, is_connected: bool) -> None:
        # A server that was away for a moment may have restarted with other models.
        server.needs_inventory = server.needs_inventory or is_connected
        self._tend_now.set()

    def _server_went_down(self) -> None:
        """Polls stop at once; telling the hub may take a while."""
        self._disconnects += 1
        self._tend_now.set()
        self._update()
        self._own(self._take_back())

    async def _tend(self) -> None:
        backoff = Backoff(self._settings)
        while True:
            self._tend_now.clear()
            try:
                wait_s = await self._turn(backoff)
            except Exception as error:
                wait_s = backoff.next_s()
                self._outage.miss(error)
                if self._registration.offer is None:
                    self._tell(AgentStatus.OFFLINE, f"The worker could not be registered: {error}")
            self._first_verdict.set()
            await wait_within(self._tend_now, wait_s)

    async def _turn(self, backoff: Backoff) -> float:
        """Checks the servers once. Returns the seconds until the next check."""
        if self._is_draining:
            return self._settings.health_interval_s
        await check_all(self._servers)
        now = asyncio.get_running_loop().time()
        usable = {server.name: server for server in self._servers if server.is_usable(now)}
        if not usable:
            await self._take_back()
            if coming := [server.usable_at - now for server in self._servers if server.is_up]:
                return min(coming)
            return backoff.next_s()
        for server in usable.values():
            if now >= server.find_due_at:
                await server.find_wanted()
        offered = {server.name for server in self._registration.offered}
        if offered != usable.keys() or any(now >= server.inventory_due_at for server in usable.values()):
            await self._registration.refresh()
        if self._registration.offer is None or any(server.missed for server in self._servers if server.is_up):
            return backoff.next_s()
        backoff.reset()
        ends = [server.usable_at - now for server in self._servers if server.is_up and server.usable_at > now]
        looks = [min(server.inventory_due_at, server.find_due_at) - now for server in usable.values()]
        return min(self._settings.health_interval_s, *ends, *looks)

    def _renewed(self) -> None:
        # Parked polls belong to the old capabilities; the slots ask again under the new ones.
        self._slots.cancel_polls()

    async def _take_back(self) -> None:
        if not await self._registration.withdraw():
            self._tend_now.set()

    # state

    def _update(self, reason: str = "") -> None:
        """Opens or closes the slots and sets the status, by what is true now."""
        now = asyncio.get_running_loop().time()
        offered = self._registration.offered
        is_registered = any(server.is_usable(now) for server in offered)
        # The agent would only decline jobs for a server that is down, again and again.
        is_offer_true = is_registered and all(server.is_usable(now) for server in offered)
        self._heart.is_registered = is_registered
        self._commands.set_registered(is_registered)
        if is_offer_true and not self._is_paused and not self._is_draining:
            self._slots.open()
        else:
            self._slots.close()
        down = "; ".join(server.reason for server in self._servers if not server.is_up)
        if self._is_draining:
            self._tell(AgentStatus.DRAINING, reason)
        elif not is_registered and any(server.is_up for server in self._servers):
            self._tell(AgentStatus.RECONNECTING, "The server answers again; its grace period is not over")
        elif not is_registered:
            self._tell(AgentStatus.OFFLINE, down)
        elif self._is_paused:
            self._tell(AgentStatus.PAUSED, reason)
        else:
            self._tell(AgentStatus.ONLINE, reason or down)

    def _tell(self, status: AgentStatus, reason: str) -> None:
        # The reason may change while the status stays offline.
        is_same = status is self.state.status and (
            status is not AgentStatus.OFFLINE or reason == self.state.reason
        )
        if is_same or self.state.status is AgentStatus.STOPPED:
            return
        self.state = AgentState(status, reason, self._disconnects)
        if self._on_state is not None:
            try:
                self._on_state(self.state)
            except Exception:
                _log.exception("worker %s: the on_state callback failed", self.worker_id)
