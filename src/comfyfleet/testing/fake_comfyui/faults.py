"""The faults of a fake server, as switches.

`Faults` can be changed while the server runs, in process or as JSON. It only stores the switches and notifies
a listener; the worker, the sockets and the routes act on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

THREAD_KILLERS = ("KeyboardInterrupt", "asyncio.exceptions.CancelledError", "SystemExit")
ACTIONS = ("crash", "restart", "drop_sockets")


class NodeFault(msgspec.Struct, kw_only=True):
    """Makes a node raise, chosen by class, by id, or (with neither) every node."""

    class_type: str | None = None
    node_id: str | None = None
    times: int = 1
    """How often it still happens; -1 means always."""
    exception_type: str = "RuntimeError"
    """One of `THREAD_KILLERS` ends the worker thread, because ComfyUI catches no more than `Exception`."""
    message: str = "the fake was told to fail"


class Faults(msgspec.Struct, kw_only=True, dict=True, forbid_unknown_fields=True):
    """The switches of one fake server, all off by default. Counters count down; -1 means always."""

    fail_nodes: list[NodeFault] = msgspec.field(default_factory=list)
    """Nodes that raise."""
    out_of_memory: int = 0
    """This many nodes that use the card raise torch.OutOfMemoryError."""
    never_start: bool = False
    """Prompts are accepted and stay pending."""
    stall: str | None = None
    """A class name or node id: that node stops half-way until the switch is cleared. It does not react to an
    interrupt."""
    hold: str | None = None
    """A class name or node id: that node waits half-way until the switch is cleared, and reacts to an interrupt."""
    dead_worker: bool = False
    """The worker thread dies at the next node or when idle; HTTP answers. A restart clears the switch."""
    crash_after_nodes: int | None = None
    """Crash after this many more nodes."""
    down_seconds: float | None = None
    """Wall-clock seconds until a restart on the same port after a crash by a switch. None: no restart."""
    crash: bool = False
    """Crash now. Turns itself off."""
    restart: bool = False
    """Crash now and come back at once. Turns itself off."""
    drop_sockets: bool = False
    """Cut every WebSocket now. Turns itself off."""
    drop_sockets_after_nodes: int | None = None
    """Cut every WebSocket after this many more nodes."""
    deaf_sockets: bool = False
    """WebSockets stay open and send nothing."""
    slow_answer_s: float = 0.0
    """Delays every HTTP answer by this many wall-clock seconds."""
    slow_paths: list[str] = msgspec.field(default_factory=list)
    """Only paths with these prefixes are slow; empty means all."""
    fail_requests: int = 0
    """This many HTTP requests are answered with 500."""
    fail_request_paths: list[str] = msgspec.field(default_factory=list)
    """Only paths with these prefixes are answered with 500; empty means all."""
    endless_paths: list[str] = msgspec.field(default_factory=list)
    """Answers to these path prefixes never end: the beginning of JSON, for as long as it is read."""
    swollen_paths: list[str] = msgspec.field(default_factory=list)
    """Answers to these path prefixes are lists of a million empty lists: much larger once decoded."""
    redirect_paths: list[str] = msgspec.field(default_factory=list)
    """Requests to these path prefixes, including the WebSocket's, are redirected to `redirect_to`."""
    redirect_to: str = ""
    huge_frame_bytes: int = 0
    """Each WebSocket first gets a frame of this size."""
    lose_submit_answers: int = 0
    """This many prompts are queued, but their submit gets no answer."""
    lost_answer_manner: Literal["drop", "hang"] = "drop"
    """How such an answer is lost: the connection drops, or stays open in silence."""
    missing_models: list[str] = msgspec.field(default_factory=list)
    """File names that are no longer installed."""
    added_models: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """Models installed since the start: folder, then file name, then size in gigabytes."""
    corrupt_models: list[str] = msgspec.field(default_factory=list)
    """File names that are listed but cannot be loaded."""

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the switch's name after every assignment."""
        self.__dict__["listener"] = listener

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        listener: Callable[[str], None] | None = self.__dict__.get("listener")
        if listener is not None:
            listener(name)

    def change(self, switches: dict[str, Any]) -> None:
        """Set several switches from JSON; an unknown name or a wrong type changes nothing and raises."""
        merged = {**msgspec.to_builtins(self), **switches}
        checked = msgspec.convert(merged, Faults)
        for name in switches:
            setattr(self, name, getattr(checked, name))

    def takes_node(self, class_type: str, node_id: str) -> NodeFault | None:
        """The fault for this node. It uses up one of its times."""
        for fault in self.fail_nodes:
            if fault.times == 0:
                continue
            if fault.class_type not in (None, class_type) or fault.node_id not in (None, node_id):
                continue
            fault.times -= 1 if fault.times > 0 else 0
            return fault
        return None

    def takes_one(self, counter: Literal["out_of_memory", "fail_requests", "lose_submit_answers"]) -> bool:
        """Uses up one time of a counted switch."""
        left: int = getattr(self, counter)
        if left > 0:
            setattr(self, counter, left - 1)
        return left != 0

    def counts_down(self, counter: Literal["crash_after_nodes", "drop_sockets_after_nodes"]) -> bool:
        """Counts a node that has run. True: the counter has reached zero."""
        left: int | None = getattr(self, counter)
        if left is None:
            return False
        setattr(self, counter, None if left <= 1 else left - 1)
        return left <= 1


def path_meets(path: str, prefixes: list[str]) -> bool:
    """Whether a path switch with these prefixes applies. `/api/x` counts as `/x`."""
    plain = path.removeprefix("/api")
    return not prefixes or any(path.startswith(prefix) or plain.startswith(prefix) for prefix in prefixes)
