"""The worker: takes prompts from the queue one at a time and runs their nodes.

It owns the order of events and the handling of failures. `behaviours` has what a node does, `run` what is sent
for it, `result_cache` what is kept for the next prompt. An unexpected error ends the worker, as on a real
server: HTTP still answers, and nothing runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

from comfyfleet.testing.fake_comfyui.behaviours import core_behaviours
from comfyfleet.testing.fake_comfyui.errors import Interrupted, NodeError, OutOfMemory, WorkerDied
from comfyfleet.testing.fake_comfyui.faults import THREAD_KILLERS
from comfyfleet.testing.fake_comfyui.graph import Schedule, is_link, signatures, uncacheable_key
from comfyfleet.testing.fake_comfyui.lab_behaviours import lab_behaviours
from comfyfleet.testing.fake_comfyui.machine import FakeMachine
from comfyfleet.testing.fake_comfyui.prompt_queue import Item
from comfyfleet.testing.fake_comfyui.result_cache import KeptResult, NodeMemory, ResultCache
from comfyfleet.testing.fake_comfyui.run import FakeRun, NodeCall, NodeResult
from comfyfleet.testing.fake_comfyui.values import Blocker

_log = logging.getLogger(__name__)


class Executor:
    """The single worker of a server process, with its cache."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine
        self._behaviours = core_behaviours() | lab_behaviours()
        self._cache = ResultCache(machine.settings.cache_mode, machine.settings.lru_size)
        self._memories: dict[tuple[str, str], NodeMemory] = {}

    async def work(self) -> None:
        """Run prompts until cancelled, or until something kills the worker."""
        machine = self._machine
        try:
            while True:
                await self._wait_for_prompt()
                task, item = machine.queue.take()
                await self._run_item(task, item)
                self._heed_flags()
        except Exception as error:
            machine.worker_is_dead = True
            _log.info("%s: the worker died: %r", machine.settings.name, error)

    async def _wait_for_prompt(self) -> None:
        machine = self._machine
        while True:
            if machine.faults.dead_worker:
                raise WorkerDied
            if machine.queue.pending and not machine.faults.never_start:
                return
            self._heed_flags()
            await machine.signal.wait()

    def _heed_flags(self) -> None:
        flags = self._machine.queue.take_flags()
        if flags.get("unload_models") or flags.get("free_memory"):
            self._machine.gpu.unload_all()
        if flags.get("free_memory"):
            self._cache.clear()
            self._memories.clear()

    async def _run_item(self, task: int, item: Item) -> None:
        machine = self._machine
        _, prompt_id, graph, public_data, outputs, hidden = item
        line = machine.stats.starts(prompt_id, machine.clock.now())
        run = FakeRun(machine, prompt_id, graph, {**public_data, **hidden})
        machine.is_interrupted = False
        machine.sockets.client_id = run.extra_data.get("client_id")
        run.send("execution_start", {"prompt_id": prompt_id})
        keys = signatures(graph, self._fingerprint)
        self._forget(run, keys)
        cached = [node_id for node_id in graph if self._cache.get(keys[node_id]) is not None]
        run.send("execution_cached", {"nodes": cached, "prompt_id": prompt_id})
        line.outcome = await _Course(self, run, keys).go(outputs)
        line.ended_at = machine.clock.now()
        self._cache.end_prompt()
        machine.gpu.keep_only(self._cache.models())
        machine.sockets.last_node_id = None
        is_success = line.outcome == "success"
        result = {
            "outputs": {node_id: shown["output"] for node_id, shown in run.ui_outputs.items()},
            "meta": {node_id: shown["meta"] for node_id, shown in run.ui_outputs.items()},
        }
        status = {
            "status_str": "success" if is_success else "error",
            "completed": is_success,
            "messages": run.messages,
        }
        machine.queue.finish(task, result, status)
        run.send_to_client("executing", {"node": None, "prompt_id": prompt_id})

    def _forget(self, run: FakeRun, keys: dict[str, str]) -> None:
        machine = self._machine
        self._cache.begin_prompt(keys.values())
        machine.gpu.keep_only(self._cache.models())
        present = {(node_id, node["class_type"]) for node_id, node in run.graph.items()}
        if machine.settings.cache_mode == "none":
            present.clear()
        self._memories = {place: kept for place, kept in self._memories.items() if place in present}

    def _fingerprint(self, class_type: str, inputs: dict[str, Any]) -> str:
        node_class = self._machine.catalogue[class_type]
        if node_class.always_runs:
            return uncacheable_key()
        if node_class.behaviour == "load_image":
            path = self._machine.disk.find_input(str(inputs.get("image")))
            return (
                hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() if path else uncacheable_key()
            )
        return ""

    def kept(self, key: str | None) -> KeptResult | None:
        return self._cache.get(key)

    def keep(self, key: str, kept: KeptResult) -> None:
        self._cache.keep(key, kept)

    def memory(self, node_id: str, class_type: str) -> NodeMemory:
        place = (node_id, class_type)
        if place not in self._memories:
            self._memories[place] = NodeMemory(self._machine.new_temp_name())
        return self._memories[place]

    async def behave(self, call: NodeCall) -> NodeResult:
        """Runs a node's behaviour with the faults that are switched on for it."""
        faults = self._machine.faults
        fault = faults.takes_node(call.node_class.name, call.node_id)
        if fault is not None and fault.exception_type in THREAD_KILLERS:
            raise WorkerDied
        if fault is not None:
            raise NodeError(fault.exception_type, fault.message)
        if call.node_class.uses_gpu and faults.takes_one("out_of_memory"):
            raise OutOfMemory
        if call.node_class.behaviour not in ("sample", "lab_slow"):
            await call.stall_if_switched_on()
        self._machine.stats.executes(call.node_class.name)
        return await self._behaviours[call.node_class.behaviour](call)


class _Course:
    """One prompt on its way through its nodes."""

    def __init__(self, executor: Executor, run: FakeRun, keys: dict[str, str]) -> None:
        self._executor = executor
        self._run = run
        self._machine = run.machine
        self._keys = keys
        self._done: dict[str, KeptResult] = {}
        self._expanded: dict[str, tuple[Any, ...]] = {}
        self._background: dict[str, asyncio.Task[NodeResult]] = {}
        self._current_inputs: dict[str, list[Any]] = {}
        self._schedule = Schedule(
            inputs_of=lambda node_id: self._run.node(node_id)["inputs"],
            is_cached=lambda node_id: self._find(node_id) is not None,
            is_output=lambda node_id: self._run.node_class(node_id).output_node,
            is_async=lambda node_id: self._run.node_class(node_id).is_async,
        )

    async def go(self, outputs: list[str]) -> str:
        """Runs to the end and returns the outcome."""
        for output in outputs:
            self._schedule.add(output)
        try:
            while not self._schedule.is_empty:
                node_id = await self._next_node()
                if self._machine.faults.dead_worker:
                    raise WorkerDied
                try:
                    is_done = await self._step(node_id)
                except Interrupted:
                    self._tell_interrupted(node_id)
                    return "interrupted"
                except NodeError as error:
                    self._tell_failed(node_id, error)
                    return "error"
                if is_done:
                    self._run.finish_progress(node_id)
                    self._schedule.done(node_id)
        finally:
            for task in self._background.values():
                task.cancel()
            await asyncio.gather(*self._background.values(), return_exceptions=True)
        self._run.send("execution_success", {"prompt_id": self._run.prompt_id})
        return "success"

    async def _next_node(self) -> str:
        while True:
            await asyncio.sleep(0)
            for node_id, task in self._background.items():
                if task.done():
                    self._schedule.release(node_id)
            node_id_or_none = self._schedule.pick()
            if node_id_or_none is not None:
                return node_id_or_none
            assert self._background, "a validated graph has a node that can run"
            await asyncio.wait(self._background.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _step(self, node_id: str) -> bool:
        """Advances a node. False: it must be visited again later."""
        cached = self._executor.kept(self._keys.get(node_id)) if not self._run.is_made(node_id) else None
        if cached is not None and node_id not in self._expanded and node_id not in self._background:
            self._show_cached(node_id, cached)
            return True
        if node_id in self._background:
            result = await self._background.pop(node_id)
        elif node_id in self._expanded:
            result = NodeResult(values=tuple(self._resolve(value) for value in self._expanded.pop(node_id)))
        else:
            started = await self._start(node_id)
            if started is None:
                return False
            result = started
        if result.ui:
            self._show(node_id, result.ui)
        if result.expand is not None:
            self._expand(node_id, result)
            return False
        await self._finish(node_id, result)
        return True

    async def _start(self, node_id: str) -> NodeResult | None:
        run = self._run
        run.start_progress(node_id)
        node = run.node(node_id)
        node_class = run.node_class(node_id)
        inputs = {
            name: self._resolve(value)
            for name, value in node["inputs"].items()
            if node_class.input(name)[0] is not None
        }
        self._current_inputs = {name: [_printable(value)] for name, value in inputs.items()}
        if run.client_id is not None:
            self._machine.sockets.last_node_id = run.display_id(node_id)
            data = {"node": node_id, "display_node": run.display_id(node_id), "prompt_id": run.prompt_id}
            run.send_to_client("executing", data)
        run.check_interrupt()
        blocker = next((value for value in inputs.values() if isinstance(value, Blocker)), None)
        if blocker is not None:
            self._tell_blocked(node_id, blocker)
            return NodeResult(values=(Blocker(None),) * len(node_class.outputs))
        call = NodeCall(run, node_id, inputs, self._executor.memory(node_id, node_class.name))
        if node_class.is_async:
            self._background[node_id] = asyncio.create_task(self._behave(call))
            self._schedule.hold(node_id)
            return None
        return await self._behave(call)

    async def _behave(self, call: NodeCall) -> NodeResult:
        try:
            return await self._executor.behave(call)
        except (NodeError, Interrupted, WorkerDied):
            raise
        except Exception as error:
            raise NodeError(type(error).__name__, str(error)) from error

    async def _finish(self, node_id: str, result: NodeResult) -> None:
        kept = KeptResult(values=result.values, shown=self._run.ui_outputs.get(node_id))
        self._done[node_id] = kept
        if node_id in self._keys:
            self._executor.keep(self._keys[node_id], kept)
        self._run.executed.append(node_id)
        faults = self._machine.faults
        if faults.counts_down("drop_sockets_after_nodes"):
            self._machine.sockets.drop_all()
        if faults.counts_down("crash_after_nodes"):
            faults.crash = True
            # This process sends nothing more: the crash cancels the worker here.
            await self._machine.never()

    def _expand(self, node_id: str, result: NodeResult) -> None:
        made = result.expand or {}
        for new_id, node in made.items():
            self._run.add_made_node(new_id, node, node_id)
        for new_id in made:
            if self._run.node_class(new_id).output_node:
                self._schedule.add(new_id)
        for value in result.values:
            if is_link(value):
                self._schedule.wait_for(node_id, value[0])
        self._expanded[node_id] = result.values

    def _find(self, node_id: str) -> KeptResult | None:
        if node_id in self._done:
            return self._done[node_id]
        return None if self._run.is_made(node_id) else self._executor.kept(self._keys.get(node_id))

    def _resolve(self, value: Any) -> Any:
        if not is_link(value):
            return value
        kept = self._find(value[0])
        return kept.values[int(value[1])] if kept is not None and int(value[1]) < len(kept.values) else None

    def _show(self, node_id: str, output: dict[str, Any]) -> None:
        run = self._run
        run.ui_outputs[node_id] = {"meta": run.meta(node_id), "output": output}
        display = run.display_id(node_id)
        data = {"node": node_id, "display_node": display, "output": output, "prompt_id": run.prompt_id}
        run.send_to_client("executed", data)

    def _show_cached(self, node_id: str, cached: KeptResult) -> None:
        run = self._run
        output = cached.shown["output"] if cached.shown is not None else None
        data = {"node": node_id, "display_node": node_id, "output": output, "prompt_id": run.prompt_id}
        run.send_to_client("executed", data)
        is_told = run.client_id is not None or self._machine.behaviour.cached_outputs_without_client
        if cached.shown is not None and is_told:
            run.ui_outputs[node_id] = cached.shown

    def _tell_blocked(self, node_id: str, blocker: Blocker) -> None:
        if blocker.message is None:
            return
        error = {
            "prompt_id": self._run.prompt_id,
            "node_id": node_id,
            "node_type": self._run.node_class(node_id).name,
            "executed": list(self._run.executed),
            "exception_message": f"Execution Blocked: {blocker.message}",
            "exception_type": "ExecutionBlocked",
            "traceback": [],
            "current_inputs": [],
            "current_outputs": [],
        }
        self._machine.sockets.post("execution_error", error, self._run.client_id)

    def _tell_interrupted(self, node_id: str) -> None:
        self._run.send("execution_interrupted", self._where(node_id), is_broadcast=True)

    def _tell_failed(self, node_id: str, error: NodeError) -> None:
        if isinstance(error, OutOfMemory):
            self._machine.gpu.unload_all()
        node_type = self._where(node_id)["node_type"]
        details = {
            "exception_message": f"{error.message}\n{error.tips}",
            "exception_type": error.exception_type,
            "traceback": [
                '  File "/srv/comfyui/execution.py", line 518, in execute\n    <source line>\n',
                f'  File "/srv/comfyui/nodes.py", line 1, in {node_type}\n    <source line>\n',
            ],
            "current_inputs": self._current_inputs,
            "current_outputs": list(self._run.graph),
        }
        self._run.send("execution_error", {**self._where(node_id), **details})

    def _where(self, node_id: str) -> dict[str, Any]:
        real_id = self._run.display_id(node_id)
        return {
            "prompt_id": self._run.prompt_id,
            "node_id": real_id,
            "node_type": self._run.graph[real_id]["class_type"],
            "executed": list(self._run.executed),
        }


def _printable(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else str(value)
