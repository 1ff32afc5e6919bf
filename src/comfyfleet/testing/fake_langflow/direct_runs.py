"""The runs of a fake LangFlow over `/api/v1/run`: they live in the process, and nobody can ask for them later."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any, Literal

from comfyfleet.testing.fake_langflow.flows import FakeFlow, Suspended
from comfyfleet.testing.fake_langflow.jobs import MakeRun
from comfyfleet.testing.fake_langflow.messages import streamed_result
from comfyfleet.testing.fake_langflow.run import RunFailed, RunRequest, Tell
from comfyfleet.testing.fake_langflow.settings import LangFlowFaults

DirectState = Literal["running", "completed", "failed", "stopped"]


class FakeDirectRun:
    task: asyncio.Task[None]

    def __init__(self, text: str) -> None:
        self.text = text
        self.state: DirectState = "running"
        self.result: dict[str, Any] | None = None
        self.error: str | None = None


class FakeDirectRuns:
    """`all` has every run, also from before a death."""

    def __init__(self, faults: LangFlowFaults, make_run: MakeRun) -> None:
        self.all: list[FakeDirectRun] = []
        self._faults = faults
        self._make_run = make_run

    def start(self, flow: FakeFlow, asked: RunRequest, tell: Tell) -> FakeDirectRun:
        run = FakeDirectRun(asked.input_value or "")
        self.all.append(run)
        run.task = asyncio.create_task(self._execute(run, flow, asked, tell))
        return run

    async def end_process(self) -> None:
        tasks = {run.task for run in self.all if not run.task.done()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _execute(self, run: FakeDirectRun, flow: FakeFlow, asked: RunRequest, tell: Tell) -> None:
        flow_run = self._make_run(str(uuid.uuid4()), flow, asked, tell)
        try:
            await flow_run.execute(self._faults.slow_errors_s)
        except RunFailed as failed:
            empty = {"traceback": None, "description": None, "code": None, "suggestion": None}
            run.error, run.state = _compact({"message": str(failed), **empty}), "failed"
        except Suspended:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            run.state = "stopped"
            raise
        else:
            run.state = "completed"
            if flow_run.told is None:
                run.result = {"session_id": asked.session, "outputs": [{"inputs": {}, "outputs": [None]}]}
            else:
                last = flow.components[-1]
                run.result = streamed_result(asked.session, asked.input_value, flow_run.told, last)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
