"""The policies that ComfyFleet is compared with. Each sees the same jobs and servers and bypasses the engine.

`first-come` and `selectivity` pull: an idle server takes a job. `shortest-queue` and `least-loaded` push, as load
balancers do: a job is given to a server when it arrives. `overtaking` is ComfyFleet's former policy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from comfyfleet.simulation.queue_simulation import DispatchPolicy, QueueSimulation
from comfyfleet.simulation.world import SimulatedJob, SimulatedServer, SimulatedWorkflow


class FirstCome:
    """An idle server takes the oldest job that it can run."""

    def arrived(self, queue: QueueSimulation, job: SimulatedJob) -> bool:  # noqa: ARG002
        return False

    def dispatch(self, queue: QueueSimulation) -> None:
        while queue.idle:
            for lane in (lane for view in queue.views() for lane in view):
                server = next((each for each in queue.idle if each.fits(lane[0].workflow)), None)
                if server is not None:
                    queue.begin(server, lane[0])
                    break
            else:
                return


class Selectivity:
    """First the job that the fewest servers can run, then the oldest; on the server that the fewest others can use."""

    def arrived(self, queue: QueueSimulation, job: SimulatedJob) -> bool:  # noqa: ARG002
        return False

    def dispatch(self, queue: QueueSimulation) -> None:
        while queue.idle:
            for view in queue.views():
                heads = [lane[0] for lane in view]
                if self._begin_one(queue, heads):
                    break
            else:
                return

    @staticmethod
    def _begin_one(queue: QueueSimulation, heads: list[SimulatedJob]) -> bool:
        able = [sum(server.fits(head.workflow) for server in queue.servers) for head in heads]
        for _, _, head in sorted((count, head.number, head) for count, head in zip(able, heads, strict=True)):
            fitting = [server for server in queue.idle if server.fits(head.workflow)]
            if fitting:
                uses = {s.index: sum(s.fits(other.workflow) for other in heads) for s in fitting}
                queue.begin(min(fitting, key=lambda server: (uses[server.index], server.index)), head)
                return True
        return False


class ShortestQueue:
    """Each job goes to the server with the fewest jobs."""

    def arrived(self, queue: QueueSimulation, job: SimulatedJob) -> bool:
        server = min(_able(queue, job.workflow), key=self._order)
        server.given += 1
        server.queue.append(job)
        return True

    @staticmethod
    def _order(server: SimulatedServer) -> tuple[int, int, int]:
        return len(server.queue) + (server.job is not None), server.given, server.index

    def dispatch(self, queue: QueueSimulation) -> None:
        for server in list(queue.idle):
            if server.queue:
                queue.begin(server, server.queue.pop(0), is_queued=False)


class LeastLoaded(ShortestQueue):
    """Each job goes to the server that would be done with it first. It knows all times exactly, which no balancer
    does."""

    def __init__(self) -> None:
        self._ends_s: dict[int, float] = {}
        self._last: dict[int, SimulatedWorkflow] = {}

    def arrived(self, queue: QueueSimulation, job: SimulatedJob) -> bool:
        ends = {
            server.index: self._end_s(queue, server, job.workflow) for server in _able(queue, job.workflow)
        }
        index = min(ends, key=lambda each: (ends[each], each))
        self._ends_s[index], self._last[index] = ends[index], job.workflow
        queue.servers[index].queue.append(job)
        return True

    def _end_s(self, queue: QueueSimulation, server: SimulatedServer, workflow: SimulatedWorkflow) -> float:
        last = self._last.get(server.index)
        is_warm = last is not None and set(workflow.models) <= set(last.models)
        load_s = 0.0 if is_warm else workflow.load_s / server.spec.disk_speed
        free_at_s = max(queue.now_s, self._ends_s.get(server.index, 0.0))
        return free_at_s + load_s + workflow.run_s / server.spec.speed


class Overtaking:
    """Warm servers first, but no job is passed for longer than `wait_s` after it was passed first."""

    def __init__(self, wait_s: float = 3.0) -> None:
        self._wait_s = wait_s
        self._notes: dict[int, tuple[list[int], list[float]]] = {}
        """By priority: jobs that passed older ones, and when."""

    def arrived(self, queue: QueueSimulation, job: SimulatedJob) -> bool:  # noqa: ARG002
        return False

    def dispatch(self, queue: QueueSimulation) -> None:
        while queue.idle:
            view = next(
                (
                    view
                    for view in queue.views()
                    if any(server.fits(lane[0].workflow) for lane in view for server in queue.idle)
                ),
                None,
            )
            if view is None:
                return
            jobs = []
            for lane in view:
                is_warm = any(server.is_warm(lane[0].workflow) for server in queue.idle)
                for _, job in zip(queue.idle, lane, strict=False):
                    is_overdue = self._is_overdue(job, queue.now_s - self._wait_s)
                    jobs.append(((0, 0, job.number) if is_overdue else (1, not is_warm, job.number), job))
            placed, free = [], list(queue.idle)
            for _, job in sorted(jobs, key=lambda pair: pair[0]):
                able = [server for server in free if server.fits(job.workflow)]
                if able:
                    server = _warmest(able, job.workflow)
                    free.remove(server)
                    placed.append((server, job))
            taken = {job.number for _, job in placed}
            oldest_left = min(
                (job.number for lane in view for job in lane if job.number not in taken), default=None
            )
            for server, job in sorted(placed, key=lambda pair: pair[1].number):
                self._note(job, oldest_left, queue.now_s)
                queue.begin(server, job)

    def _is_overdue(self, job: SimulatedJob, limit_s: float) -> bool:
        numbers, times = self._notes.get(job.priority, ([], []))
        first = bisect_right(numbers, job.number)
        return first < len(numbers) and times[first] <= limit_s

    def _note(self, job: SimulatedJob, oldest_left: int | None, now_s: float) -> None:
        numbers, times = self._notes.setdefault(job.priority, ([], []))
        if oldest_left is not None and oldest_left < job.number and (not numbers or job.number > numbers[-1]):
            numbers.append(job.number)
            times.append(now_s)


def _able(queue: QueueSimulation, workflow: SimulatedWorkflow) -> list[SimulatedServer]:
    able = [server for server in queue.servers if server.fits(workflow)]
    return [server for server in able if not server.is_away] or able


def _warmest(servers: list[SimulatedServer], workflow: SimulatedWorkflow) -> SimulatedServer:
    return min(servers, key=lambda server: (not server.is_warm(workflow), server.index))


ENGINE = "comfyfleet"
POLICIES: dict[str, Callable[[], DispatchPolicy]] = {
    "first-come": FirstCome,
    "shortest-queue": ShortestQueue,
    "least-loaded": LeastLoaded,
    "selectivity": Selectivity,
    "overtaking": Overtaking,
}
"""Every policy but `comfyfleet`, which is the engine itself."""
