"""Looks up the state of a prompt on its server (waiting, running, ended or unknown), and stops one prompt and no other.

A server moves a prompt from its queue to its history in one step, so the history is asked after the queue.
The WebSocket may lose messages; queue and history are the truth. A waiting prompt is deleted, a running one is
interrupted. It may start between the lookup and the action, so `stop` repeats both until it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from comfyfleet.model.workflow_graph import MAX_NODES, InvalidWorkflow, check_workflow
from comfyfleet.worker.connectors.comfyui.api import LARGE_BODY, ApiAnswer, ComfyApi, Unreachable
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings

# The server unwraps a value that looks like a link, and the link leads nowhere.
_POISON = frozenset({"missing_inputs", "linked_node_missing"})


T = TypeVar("T")


class PromptState(StrEnum):
    UNKNOWN = "unknown"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class PromptStatus(msgspec.Struct, frozen=True):
    state: PromptState
    number: float | None = None
    entry: dict[str, Any] | None = None
    """The history entry of an ended prompt."""
    is_server_idle: bool = False
    running: str | None = None
    """The prompt that runs while this one waits."""
    is_running_poison: bool = False
    """The graph of that prompt is of a kind that kills a server's execution thread."""


async def fetch_prompt_state(api: ComfyApi, prompt_id: str, *, is_end_reported: bool = False) -> PromptStatus:
    """Raises `Unreachable` unless the server answers as ComfyUI does.

    After an announced end it asks the history first: the queue contains all waiting graphs and may be large.
    """
    if is_end_reported:
        standing = await _in_history(api, prompt_id)
        if standing is not None:
            return standing
    standing = await _in_queue(api, find_in_queue, prompt_id)
    if standing.state is not PromptState.UNKNOWN:
        return standing
    return await _in_history(api, prompt_id) or standing


async def _in_history(api: ComfyApi, prompt_id: str) -> PromptStatus | None:
    entry = _object(await api.history(prompt_id), "the history").get(prompt_id)
    if not isinstance(entry, dict):
        return None
    return PromptStatus(PromptState.ENDED, _number(entry.get("prompt")), entry)


async def prompts_of(api: ComfyApi) -> tuple[frozenset[str], frozenset[str]]:
    """The ids of all running and all waiting prompts. Raises `Unreachable`."""
    return await _in_queue(api, _ids)


async def _in_queue(api: ComfyApi, find: Callable[..., T], *given: str) -> T:
    answer = await api.queue()
    queue = _object(answer, "the queue")
    # In a thread: the queue contains other clients' graphs of any number and size.
    return await asyncio.to_thread(find, queue, *given) if answer.size > LARGE_BODY else find(queue, *given)


def _ids(queue: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    running, waiting = _items(queue.get("queue_running")), _items(queue.get("queue_pending"))
    return frozenset(str(item[1]) for item in running), frozenset(str(item[1]) for item in waiting)


def find_in_queue(queue: Mapping[str, Any], prompt_id: str) -> PromptStatus:
    running = _items(queue.get("queue_running"))
    for item in running:
        if item[1] == prompt_id:
            return PromptStatus(PromptState.RUNNING, _number(item))
    for item in _items(queue.get("queue_pending")):
        if item[1] == prompt_id:
            first = running[0] if running else None
            return PromptStatus(
                PromptState.WAITING,
                _number(item),
                is_server_idle=first is None,
                running=None if first is None else str(first[1]),
                is_running_poison=first is not None and len(first) > 2 and is_poison(first[2]),
            )
    return PromptStatus(PromptState.UNKNOWN, is_server_idle=not running)


def is_poison(graph: Any) -> bool:
    """Whether the graph has a fault that can kill the server's execution thread. It does no harm if no output
    depends on it. Graphs that are too large are not checked."""
    if not isinstance(graph, dict):
        return False
    try:
        check_workflow(graph, max_chain=MAX_NODES)
    except InvalidWorkflow as error:
        kinds = {each["type"] for entry in error.node_errors.values() for each in entry["errors"]}
        return not kinds.isdisjoint(_POISON)
    return False


def _object(answer: ApiAnswer, what: str) -> dict[str, Any]:
    if answer.is_ok and isinstance(answer.body, dict):
        return answer.body
    reason = f"the server answered {answer.status} to a request for {what}: {str(answer.body)[:200]}"
    raise Unreachable(reason, status=answer.status)


def _items(listing: Any) -> list[list[Any]]:
    if not isinstance(listing, list):
        return []
    return [item for item in listing if isinstance(item, list) and len(item) > 1]


def _number(item: Any) -> float | None:
    number = item[0] if isinstance(item, list) and item else None
    return number if isinstance(number, int | float) else None


INTERRUPTS_BY_ID = (0, 3, 57)
UNAIMED_REPEAT_S = 2.0
"""How often an interrupt without a prompt id is repeated: each one may hit a prompt that has just started."""
MAX_INTERVAL_S = 2.0


class CancelResult(msgspec.Struct, frozen=True):
    status: PromptStatus
    """Waiting or running only if the time was over."""
    was_seen: bool = False
    """The prompt was found waiting or running."""


async def stop(
    api: ComfyApi, settings: ComfyUISettings, prompt_id: str, version: tuple[int, ...] | None, within_s: float
) -> CancelResult:
    """Raises `Unreachable` if the server does not answer until the end."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    interval_s = settings.cancel_interval_s
    is_aimed = version is not None and version >= INTERRUPTS_BY_ID
    interrupted_at: float | None = None
    was_seen = False
    while True:
        standing: PromptStatus | None = None
        try:
            standing = await fetch_prompt_state(api, prompt_id)
            if standing.state is PromptState.WAITING:
                await api.delete(prompt_id)
                interval_s = settings.cancel_interval_s
            elif standing.state is PromptState.RUNNING:
                now = loop.time()
                # Servers that ignore the id interrupt any run, so each interrupt follows a lookup.
                if is_aimed or interrupted_at is None or now - interrupted_at >= UNAIMED_REPEAT_S:
                    await api.interrupt(prompt_id)
                    interrupted_at = now
            else:
                return CancelResult(standing, was_seen)
            was_seen = True
        except Unreachable:
            if loop.time() >= deadline:
                raise
        if standing is not None and loop.time() >= deadline:
            return CancelResult(standing, was_seen)
        await asyncio.sleep(min(interval_s, max(0.01, deadline - loop.time())))
        interval_s = min(interval_s * 1.5, MAX_INTERVAL_S)


def parse_version(text: object) -> tuple[int, ...] | None:
    """The leading numbers of a version. None: there are none, which counts as the oldest version."""
    numbers: list[int] = []
    for part in text.removeprefix("v").split(".") if isinstance(text, str) else ():
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers) or None
