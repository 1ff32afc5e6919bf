"""The jobs of a fake account: their queue, their runs on fake cards, their outputs and what they cost.

Graphs run on the fake ComfyUI's own executor, so the pictures are made from the graph. The routes of v1 and v2 show
the same jobs.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from comfyfleet.testing.fake_comfy_cloud.settings import PLANS, CloudFaults, CloudStats, FakeCloudSettings
from comfyfleet.testing.fake_comfyui.clock import ScaledClock
from comfyfleet.testing.fake_comfyui.disk import FakeDisk
from comfyfleet.testing.fake_comfyui.execution import Executor
from comfyfleet.testing.fake_comfyui.faults import Faults
from comfyfleet.testing.fake_comfyui.machine import FakeMachine
from comfyfleet.testing.fake_comfyui.prompt_queue import PromptQueue
from comfyfleet.testing.fake_comfyui.settings import FakeSettings
from comfyfleet.testing.fake_comfyui.sockets import FakeSockets
from comfyfleet.testing.fake_comfyui.stats import FakeStats

_VERSION = "0.33.0"
_PREVIEW_HEAD = 8
_KINDS = {"images": "image", "gifs": "video", "video": "video", "audio": "audio", "latents": "latent"}
ENDS = ("succeeded", "failed", "canceled", "expired")


class CloudJob(msgspec.Struct, kw_only=True, eq=False):
    job_id: str
    graph: dict[str, Any]
    """As it was submitted."""
    run_graph: dict[str, Any]
    """With names of files instead of assets."""
    targets: list[str]
    created_at: float
    number: int
    is_ours: bool = True
    status: str = "queued"
    started_at: float | None = None
    completed_at: float | None = None
    progress: dict[str, Any] | None = None
    outputs: list[dict[str, Any]] = msgspec.field(default_factory=list)
    error: dict[str, Any] | None = None
    cap: asyncio.TimerHandle | None = None
    listeners: list[asyncio.Queue[tuple[str, dict[str, Any]]]] = msgspec.field(default_factory=list)

    def tell(self, event: str, data: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener.put_nowait((event, data))


class Asset(msgspec.Struct, frozen=True):
    asset_id: str
    path: Path
    name: str
    content_type: str = "application/octet-stream"


class NoCredits(Exception):
    """The account cannot pay for another run."""


class QueueFull(Exception):
    """The account's queue is full."""


class InvalidGraph(Exception):
    def __init__(self, code: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class _RecordingSockets(FakeSockets):
    """Hands the messages of a run to the account instead of sending them."""

    def __init__(
        self, faults: Faults, is_free: asyncio.Event, hear: Callable[[str, Any, str | None], None]
    ) -> None:
        super().__init__(faults, is_free)
        self._hear = hear

    def post(self, event: str, data: Any, client_id: str | None = None) -> None:
        self._hear(event, data, client_id)


class CloudJobs:
    def __init__(self, settings: FakeCloudSettings, faults: CloudFaults, stats: CloudStats) -> None:
        self.settings = settings
        self.jobs: dict[str, CloudJob] = {}
        self.assets: dict[str, Asset] = {}
        self.claimed_keys: set[str] = set()
        self.credits = settings.credits
        self.disk = FakeDisk(None)
        self._faults = faults
        self._stats = stats
        self.card_faults = Faults()
        """Faults of the cards that run the graphs, as of the fake ComfyUI."""
        self._machines: list[FakeMachine] = []
        self._running: dict[str, FakeMachine] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = 0

    def start(self) -> None:
        for _ in range(max(1, PLANS[self.settings.plan])):
            self._machines.append(self._new_machine())
        self.card_faults.listen(self._on_switch)
        for machine in self._machines:
            self._tasks.add(asyncio.create_task(Executor(machine).work()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.disk.remove()

    def _on_switch(self, _name: str) -> None:
        for machine in self._machines:
            machine.signal.notify()

    @property
    def machine(self) -> FakeMachine:
        return self._machines[0]

    def _new_machine(self) -> FakeMachine:
        settings = self.settings
        card = FakeSettings(
            version=_VERSION,
            name="cloud",
            models=settings.models,
            node_classes=settings.node_classes,
            time_scale=settings.time_scale,
            load_seconds_per_gb=0.0,
            cache_mode="none",
            seed=settings.seed,
            vram_gb=96.0,
        )
        machine = FakeMachine(
            card,
            clock=ScaledClock(settings.time_scale),
            disk=self.disk,
            faults=self.card_faults,
            stats=FakeStats(),
            first_number=0,
        )
        machine.sockets = _RecordingSockets(self.card_faults, machine.loop_is_free, self._hear)
        machine.queue = PromptQueue(machine.sockets, machine.signal)
        return machine

    # submissions

    def submit(self, graph: dict[str, Any], *, is_ours: bool = True) -> CloudJob:
        """Raises `InvalidGraph`, `NoCredits` or `QueueFull`; then no job was made."""
        if isinstance(graph.get("nodes"), list):
            message = "This is a UI-export graph. Export the workflow in API format instead."
            raise InvalidGraph("workflow_format_ui", message)
        run_graph = self._without_assets(graph)
        verdict = self.machine.validator.validate(run_graph, None)
        if verdict.error is not None or verdict.node_errors:
            error = verdict.error or {"message": "Prompt outputs failed validation"}
            raise InvalidGraph("invalid_workflow", error["message"], {"node_errors": verdict.node_errors})
        if self.credits < self.settings.price:
            raise NoCredits
        if sum(job.status == "queued" for job in self.jobs.values()) >= self.settings.queue_limit:
            raise QueueFull
        self._numbers += 1
        job = CloudJob(
            job_id=str(uuid.uuid4()),
            graph=graph,
            run_graph=run_graph,
            targets=list(verdict.outputs),
            created_at=time.time(),
            number=self._numbers,
            is_ours=is_ours,
        )
        self.jobs[job.job_id] = job
        self._stats.jobs_made.append(job.job_id)
        self.dispatch()
        return job

    def _without_assets(self, graph: dict[str, Any]) -> dict[str, Any]:
        resolved: dict[str, Any] = {}
        for node_id, node in graph.items():
            if not isinstance(node, dict):
                raise InvalidGraph("invalid_workflow", f"Node {node_id} is not an object.")
            inputs = dict(node.get("inputs") or {})
            for name, value in inputs.items():
                if isinstance(value, dict) and value.get("__type") == "core/ASSET":
                    asset = self.assets.get(str(value.get("info", {}).get("id")))
                    if asset is None:
                        raise InvalidGraph("missing_asset", f"Node {node_id}: the asset does not exist.")
                    inputs[name] = asset.path.name
            resolved[node_id] = {**node, "inputs": inputs}
        return resolved

    def add_asset(self, content: bytes, name: str, content_type: str) -> Asset:
        asset_id = str(uuid.uuid4())
        path = self.disk.base / "input" / f"{asset_id}{Path(name).suffix.lower()}"
        path.write_bytes(content)
        asset = self.assets[asset_id] = Asset(asset_id, path, name, content_type)
        return asset

    # runs

    def dispatch(self) -> None:
        if self._faults.never_starts:
            return
        idle = [machine for machine in self._machines if machine not in self._running.values()]
        waiting = [job for job in self.jobs.values() if job.status == "queued"]
        for machine, job in zip(idle, waiting, strict=False):
            self._begin(machine, job)

    def _begin(self, machine: FakeMachine, job: CloudJob) -> None:
        job.status, job.started_at = "running", time.time()
        self._stats.charges[job.job_id] = self._stats.charges.get(job.job_id, 0.0) + self.settings.price
        self.credits -= self.settings.price
        job.progress = {"value": 0.0, "nodes_done": 0, "nodes_total": len(job.run_graph)}
        job.tell("status", {"status": "running"})
        self._running[job.job_id] = machine
        if self._faults.run_errors:
            self._end(job, "failed", error=self._faults.run_errors.pop(0))
            return
        job.cap = asyncio.get_running_loop().call_later(self.settings.run_cap_s, self._hit_cap, job)
        if self._faults.stalls:
            return
        extra = {"client_id": job.job_id}
        machine.queue.put((job.number, job.job_id, job.run_graph, extra, job.targets, {}))

    def _hit_cap(self, job: CloudJob) -> None:
        if job.status not in ENDS:
            self._stop(job)

    def cancel(self, job: CloudJob) -> None:
        self._stats.cancels.append(job.job_id)
        if job.status not in ENDS and not self._faults.ignores_cancel:
            self._stop(job)

    def _stop(self, job: CloudJob) -> None:
        machine = self._running.get(job.job_id)
        if machine is None or not machine.queue.is_running(job.job_id):
            if machine is not None:
                machine.queue.delete(job.job_id)
            self._end(job, "canceled")
            return
        job.status = "canceling"
        job.tell("status", {"status": "canceling"})
        machine.interrupt()

    def _end(self, job: CloudJob, status: str, *, error: dict[str, Any] | None = None) -> None:
        job.status, job.completed_at, job.error, job.progress = status, time.time(), error, None
        self._running.pop(job.job_id, None)
        if job.cap is not None:
            job.cap.cancel()
        job.tell("status", {"status": status})
        asyncio.get_running_loop().call_soon(self.dispatch)

    def _hear(self, event: str, data: Any, client_id: str | None) -> None:
        job = self.jobs.get(client_id or "")
        if event == "status":
            for job_id, machine in list(self._running.items()):
                if job_id in machine.queue.history:
                    self._finish(self.jobs[job_id], machine.queue.history.pop(job_id))
        elif job is None or job.progress is None:
            return
        elif event == "preview" and isinstance(data, bytes):
            text = base64.b64encode(data[_PREVIEW_HEAD:]).decode()
            node = job.progress.get("current_node") or ""
            job.tell("preview", {"node_id": node, "content_type": "image/jpeg", "data_base64": text})
        elif event == "executing" and data.get("node") is not None:
            self._advance(job, node=data["node"])
        elif event == "progress":
            self._advance(job, node=data["node"], step=data["value"], steps=data["max"])

    def _advance(self, job: CloudJob, node: str, step: int | None = None, steps: int | None = None) -> None:
        before = job.progress or {}
        total, done = len(job.run_graph), int(before.get("nodes_done", 0))
        if step is None and before.get("current_node") not in (None, node):
            done += 1
        share = (done + (step / steps if step is not None and steps else 0.0)) / max(total, 1)
        job.progress = {
            "value": min(1.0, share),
            "nodes_done": done,
            "nodes_total": total,
            "current_node": node,
            "current_node_class": job.run_graph.get(node, {}).get("class_type"),
            "step": step,
            "steps": steps,
        }
        job.tell("progress", job.progress)

    def _finish(self, job: CloudJob, entry: dict[str, Any]) -> None:
        messages = dict(entry["status"]["messages"])
        if "execution_interrupted" in messages:
            self._end(job, "canceled")
        elif (found := messages.get("execution_error")) is not None:
            error = {
                "code": "node_execution_error",
                "message": found["exception_message"],
                "node_id": found["node_id"],
                "class_type": found["node_type"],
                "traceback": None,
            }
            self._end(job, "failed", error=error)
        else:
            for node_id, shown in entry["outputs"].items():
                for kind, items in shown.items():
                    for item in items if isinstance(items, list) else ():
                        if isinstance(item, dict) and "filename" in item:
                            self._add_output(job, node_id, kind, item)
            self._end(job, "succeeded")

    def _add_output(self, job: CloudJob, node_id: str, kind: str, item: dict[str, Any]) -> None:
        path = self.disk.base / item["type"] / item["subfolder"] / item["filename"]
        asset_id = str(uuid.uuid4())
        content_type = "image/png" if path.suffix == ".png" else "application/octet-stream"
        self.assets[asset_id] = Asset(asset_id, path, item["filename"], content_type)
        output = {
            "node_id": node_id,
            "name": item["filename"],
            "type": _KINDS.get(kind, "file"),
            "content_type": content_type,
            "size_bytes": path.stat().st_size,
            "id": asset_id,
            "hash": None,
            "job_id": job.job_id,
        }
        job.outputs.append(output)
        job.tell("output", output)

    def expires_at(self, job: CloudJob) -> float:
        return job.created_at + self.settings.job_life_s


def timestamp(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
