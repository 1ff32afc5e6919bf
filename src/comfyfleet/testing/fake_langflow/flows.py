"""The flows of a fake LangFlow: chains of components, from a chat input to a chat output.

The components between them are laboratory components: each does one thing that tests need, with the text that it gets.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from comfyfleet.testing.fake_comfyui.clock import FakeClock

OUTPUT = "ChatOutput"


class FakeComponent(msgspec.Struct, frozen=True):
    component_id: str
    type: str

    @property
    def display_name(self) -> str:
        return _DISPLAY_NAMES[self.type]

    @property
    def fields(self) -> dict[str, Any]:
        return dict(_FIELDS[self.type])


class FakeFlow(msgspec.Struct, frozen=True):
    flow_id: str
    name: str
    middle: str | None = None
    """The type of the component between input and output."""
    endpoint_name: str | None = None

    @property
    def components(self) -> tuple[FakeComponent, ...]:
        middle = (FakeComponent(f"{self.middle}-m", self.middle),) if self.middle is not None else ()
        return (FakeComponent("ChatInput-a", "ChatInput"), *middle, FakeComponent("ChatOutput-z", OUTPUT))


class ComponentError(Exception):
    """A component raises."""

    def __init__(self, exception_type: str, words: str) -> None:
        super().__init__(words)
        self.exception_type = exception_type


class NotBuilt(Exception):
    """A component cannot be made from its fields. LangFlow counts such a run as completed."""


class Suspended(Exception):
    """A component waits for a person."""


class Passed(msgspec.Struct):
    """The message that components pass on."""

    text: str
    files: list[str] = []


class Surroundings(msgspec.Struct):
    """What a component may use."""

    flow_id: str
    fields: Mapping[str, Any]
    clock: FakeClock
    log: Callable[[str], None]
    storage: dict[str, bytes]
    """By path: the id of a flow or user, and the name."""
    global_variables: Mapping[str, str]
    block: Callable[[float], Awaitable[None]]
    """Stalls the whole process, as a component that does not await."""


async def run_component(kind: str, passed: Passed, around: Surroundings) -> Passed:
    return await _COMPONENTS[kind](passed, around)


async def _pass_on(passed: Passed, _around: Surroundings) -> Passed:
    return Passed(passed.text)


async def _sleep(passed: Passed, around: Surroundings) -> Passed:
    try:
        seconds = float(around.fields.get("seconds", 1.0))
    except (TypeError, ValueError):
        raise NotBuilt(
            f"Value error, Could not convert {around.fields.get('seconds')!r} to float for input seconds."
        ) from None
    for step in range(4):
        around.log(f"step {step + 1} of 4")
        if around.fields.get("blocking"):
            await around.block(seconds / 4)
        else:
            await around.clock.sleep(seconds / 4)
    return Passed(f"slept {seconds}: {passed.text}")


async def _raise(passed: Passed, around: Surroundings) -> Passed:
    match around.fields.get("kind", "value"):
        case "value":
            raise ComponentError("ValueError", f"the lab component refuses: {passed.text}")
        case "oom":
            raise ComponentError("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB.")
        case "memory":
            raise ComponentError("MemoryError", "")
    return Passed("did not raise")


async def _picture(passed: Passed, around: Surroundings) -> Passed:
    digest = hashlib.sha256(passed.text.encode()).hexdigest()[:12]
    path = f"{around.flow_id}/lab-{digest}.txt"
    around.storage[path] = f"made from: {passed.text}".encode()
    return Passed(f"drew {passed.text}", [path])


async def _read(passed: Passed, around: Surroundings) -> Passed:
    single = around.fields.get("path")
    paths = [*passed.files, *([single] if isinstance(single, str) and single else [])]
    try:
        words = [around.storage[path].decode("utf-8", "replace") for path in paths]
    except KeyError as error:
        raise ComponentError("FileNotFoundError", f"No such file: {error}") from error
    return Passed(f"{passed.text} read: {', '.join(words)}")


async def _global(passed: Passed, around: Surroundings) -> Passed:
    variables = ", ".join(f"{name}={value}" for name, value in sorted(around.global_variables.items()))
    return Passed(f"{passed.text} globals: {variables or 'none'}")


async def _ask_person(_passed: Passed, _around: Surroundings) -> Passed:
    await asyncio.sleep(0)
    raise Suspended


_COMPONENTS: dict[str, Callable[[Passed, Surroundings], Awaitable[Passed]]] = {
    OUTPUT: _pass_on,
    "LabSleep": _sleep,
    "LabRaise": _raise,
    "LabPicture": _picture,
    "LabRead": _read,
    "LabGlobal": _global,
    "LabPerson": _ask_person,
}
_DISPLAY_NAMES = {
    "ChatInput": "Chat Input",
    OUTPUT: "Chat Output",
    "LabSleep": "Lab Sleep",
    "LabRaise": "Lab Raise",
    "LabPicture": "Lab Picture",
    "LabRead": "Lab Read",
    "LabGlobal": "Lab Global",
    "LabPerson": "Lab Person",
}


def _field(kind: str, value: Any = "", *, is_list: bool = False) -> dict[str, Any]:
    return {"type": kind, "value": value, "list": is_list}


_CODE = {"code": _field("code")}
_FIELDS: dict[str, dict[str, Any]] = {
    "ChatInput": {**_CODE, "input_value": _field("str"), "files": _field("file", is_list=True)},
    OUTPUT: {**_CODE, "input_value": _field("str"), "sender_name": _field("str", "AI")},
    "LabSleep": {
        **_CODE,
        "text": _field("str"),
        "seconds": _field("float", 1.0),
        "blocking": _field("bool", False),
    },
    "LabRaise": {**_CODE, "text": _field("str"), "kind": _field("str", "value")},
    "LabPicture": {**_CODE, "text": _field("str")},
    "LabRead": {**_CODE, "message": _field("other"), "path": _field("file")},
    "LabGlobal": {**_CODE, "text": _field("str")},
    "LabPerson": {**_CODE, "text": _field("str")},
}

# The first three have the ids of the recordings.
STANDARD_FLOWS = (
    FakeFlow("61ad970a-132e-4f09-a4be-31397f1edc7e", "lab-sleep", "LabSleep", "lab-sleep"),
    FakeFlow("432341df-02b8-4123-b80d-2f2d8e91b25f", "lab-raise", "LabRaise", "lab-raise"),
    FakeFlow("a72fe339-fc94-4085-aca5-e39c1a6937d7", "lab-echo", None, "lab-echo"),
    FakeFlow("0c1b6f0e-5d3a-4f0e-9a53-2e6b9b3c2501", "lab-picture", "LabPicture", "lab-picture"),
    FakeFlow("0c1b6f0e-5d3a-4f0e-9a53-2e6b9b3c2502", "lab-read", "LabRead", "lab-read"),
    FakeFlow("0c1b6f0e-5d3a-4f0e-9a53-2e6b9b3c2503", "lab-global", "LabGlobal", "lab-global"),
    FakeFlow("0c1b6f0e-5d3a-4f0e-9a53-2e6b9b3c2504", "Lab Person", "LabPerson", None),
)
