"""Pending prompts, the running one and the history, as ComfyUI keeps them in memory.

The heap holds plain tuples on purpose: two prompts with the same number and id cannot be compared and kill
the worker, which is a fault of the real server too.
"""

from __future__ import annotations

import heapq
from typing import Any

from comfyfleet.testing.fake_comfyui.signal import Signal
from comfyfleet.testing.fake_comfyui.sockets import FakeSockets

Item = tuple[float, str, dict[str, Any], dict[str, Any], list[str], dict[str, Any]]
"""Number, prompt id, graph, extra data, output node ids, hidden keys."""

_HISTORY_MAX = 10000


def public_part(item: Item) -> list[Any]:
    """What the queue and the history show of an item: everything but the hidden keys."""
    return list(item[:5])


class PromptQueue:
    """The queue of one server process."""

    def __init__(self, sockets: FakeSockets, signal: Signal) -> None:
        self._sockets = sockets
        self._signal = signal
        self.pending: list[Item] = []
        self.running: dict[int, Item] = {}
        self.history: dict[str, dict[str, Any]] = {}
        self.flags: dict[str, bool] = {}
        self._tasks = 0

    @property
    def remaining(self) -> int:
        return len(self.pending) + len(self.running)

    def put(self, item: Item) -> None:
        """Queue a prompt. Raises TypeError, after queueing, when number and id equal those of a pending
        one."""
        heapq.heappush(self.pending, item)
        self._changed()

    def take(self) -> tuple[int, Item]:
        """Start the first pending prompt. Raises TypeError when two of them cannot be ordered."""
        item = heapq.heappop(self.pending)
        task = self._tasks
        self._tasks += 1
        self.running[task] = item
        self._changed()
        return task, item

    def finish(self, task: int, result: dict[str, Any], status: dict[str, Any]) -> None:
        """Move a running prompt into the history, replacing an older entry of the same id."""
        item = self.running.pop(task)
        if len(self.history) > _HISTORY_MAX:
            del self.history[next(iter(self.history))]
        self.history[item[1]] = {"prompt": public_part(item), "outputs": {}, "status": status, **result}
        self._changed()

    def clear(self) -> None:
        """Removes all pending prompts."""
        self.pending = []
        self._changed()

    def delete(self, prompt_id: str) -> bool:
        """Removes the first pending prompt of that id."""
        for index, item in enumerate(self.pending):
            if item[1] == prompt_id:
                if len(self.pending) == 1:
                    self.clear()
                else:
                    del self.pending[index]
                    heapq.heapify(self.pending)
                self._changed()
                return True
        return False

    def is_running(self, prompt_id: str) -> bool:
        return any(item[1] == prompt_id for item in self.running.values())

    def history_page(self, max_items: int | None, offset: int) -> dict[str, Any]:
        """A part of the history; a negative offset counts from the end."""
        if offset < 0 and max_items is not None:
            offset = len(self.history) - max_items
        entries = list(self.history.items())[max(offset, 0) :]
        # Like the real server, it checks the limit after adding an entry, so 0 still gives one.
        return dict(entries if max_items is None else entries[: max(max_items, 1)])

    def set_flag(self, name: str) -> None:
        """Leaves a request that the worker reads between prompts."""
        self.flags[name] = True
        self._signal.notify()

    def take_flags(self) -> dict[str, bool]:
        flags, self.flags = self.flags, {}
        return flags

    def info(self) -> dict[str, Any]:
        """The body of `GET /prompt` and of every status message."""
        return {"exec_info": {"queue_remaining": self.remaining}}

    def _changed(self) -> None:
        self._sockets.post("status", {"status": self.info()})
        self._signal.notify()
