"""One run of a flow in a fake LangFlow: component by component, with the events of a real run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from comfyfleet.testing.fake_comfyui.clock import FakeClock
from comfyfleet.testing.fake_langflow import messages
from comfyfleet.testing.fake_langflow.flows import (
    OUTPUT,
    ComponentError,
    FakeFlow,
    NotBuilt,
    Passed,
    Surroundings,
    run_component,
)
from comfyfleet.testing.fake_langflow.settings import LangFlowFaults

Tell = Callable[[str, dict[str, Any], bool], None]
"""Takes an event's name, its data, and whether a replay repeats it."""


class RunRequest(msgspec.Struct, kw_only=True):
    input_value: str | None
    session: str
    tweaks: Mapping[str, Any] = {}
    files: list[str] = []
    global_variables: Mapping[str, str] = {}
    is_empty: bool = False
    """Its partial run has no component."""


class RunFailed(Exception):
    """Carries what the server stores as the reason."""

    def __init__(self, detail: dict[str, Any], words: str) -> None:
        super().__init__(words)
        self.detail = detail


class FlowRun:
    """`tell` gets each event as it happens. After a run, `told` is the message of the flow's output."""

    def __init__(
        self,
        run_id: str,
        flow: FakeFlow,
        request: RunRequest,
        clock: FakeClock,
        storage: dict[str, bytes],
        block: Callable[[float], Awaitable[None]],
        faults: LangFlowFaults,
        tell: Tell,
    ) -> None:
        self.told: dict[str, Any] | None = None
        self.output: dict[str, Any] | None = None
        self._run_id = run_id
        self._flow = flow
        self._request = request
        self._clock = clock
        self._storage = storage
        self._block = block
        self._faults = faults
        self._tell = tell

    async def execute(self, slow_errors_s: float) -> None:
        """Raises `RunFailed` and `Suspended`."""
        request, flow = self._request, self._flow
        components = () if request.is_empty else flow.components
        for component in flow.components:
            tweak = request.tweaks.get(component.component_id)
            if isinstance(tweak, Mapping) and "code" in tweak:
                detail = messages.refused_tweak("code", request.session)
                self._tell("error", detail, True)
                raise RunFailed(detail, "refused")
        names = [component.component_id for component in components]
        self._tell("vertices_sorted", {"ids": names[:1], "to_run": names}, True)
        self._tell("build_start", {}, True)
        passed = Passed(request.input_value or "", list(request.files))
        source = None
        for index, component in enumerate(components):
            following = components[index + 1] if index + 1 < len(components) else None
            tweak = request.tweaks.get(component.component_id)
            fields = tweak if isinstance(tweak, Mapping) else {}
            logs: list[str] = []
            if component.type == "ChatInput":
                attached = fields.get("files")
                passed.files += [each for each in attached or [] if isinstance(each, str)]
                passed.text = str(fields.get("input_value", passed.text))
                told = self._message(passed, None, is_user=True)
                self._tell("add_message", told, True)
                content = messages.chat_content(told)
            else:
                try:
                    if component.type != OUTPUT:
                        await self._meet_faults()
                        around = self._around(component.component_id, fields, logs)
                        passed = await run_component(component.type, passed, around)
                except ComponentError as error:
                    if slow_errors_s:
                        await self._clock.sleep(slow_errors_s)
                    detail = messages.error_message(
                        error,
                        run_id=self._run_id,
                        flow=flow,
                        session=request.session,
                        source=component,
                    )
                    self._tell("error", detail, True)
                    words = f"Error building Component {component.display_name}: \n\n{error}"
                    self._end(component, following, messages.failed_content(words), words, is_valid=False)
                    raise RunFailed(detail, f"Error running graph: {words}") from error
                except NotBuilt as error:
                    words = f"Error building Component {component.display_name}: \n\n{error}"
                    self._end(component, following, messages.failed_content(words), words, is_valid=False)
                    return
                if component.type != OUTPUT:
                    source = component
                    content = messages.plain_content(passed, logs)
                else:
                    told = self._message(passed, source, is_user=False)
                    self._tell("add_message", told, True)
                    content = messages.chat_content(told)
                    self.told = told
            self._end(component, following, content, "None", is_valid=True)
            if component.type == OUTPUT:
                event = messages.output_event(component, passed.text)
                self._tell("output", event, True)
                self.output = event

    async def _meet_faults(self) -> None:
        faults = self._faults
        while faults.holds:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if faults.out_of_memory:
            faults.out_of_memory -= 1
            raise ComponentError("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB.")
        if faults.fail_runs:
            faults.fail_runs -= 1
            raise ComponentError("ValueError", "the fake was told to fail")

    def _message(self, passed: Passed, source: Any, *, is_user: bool) -> dict[str, Any]:
        return messages.message(
            passed,
            run_id=self._run_id,
            flow=self._flow,
            session=self._request.session,
            source=source,
            is_user=is_user,
        )

    def _around(self, component_id: str, fields: Mapping[str, Any], logs: list[str]) -> Surroundings:
        def log(text: str) -> None:
            logs.append(text)
            event = {
                "name": f"Log {len(logs)}",
                "message": text,
                "type": "text",
                "output": "out",
                "component_id": component_id,
            }
            self._tell("log", event, False)

        return Surroundings(
            self._flow.flow_id,
            fields,
            self._clock,
            log,
            self._storage,
            self._request.global_variables,
            self._block,
        )

    def _end(self, component: Any, following: Any, content: Any, params: str, *, is_valid: bool) -> None:
        event = messages.end_vertex(component, following, content, is_valid=is_valid, params=params)
        self._tell("end_vertex", event, True)
