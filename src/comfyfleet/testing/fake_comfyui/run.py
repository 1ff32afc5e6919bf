"""One running prompt: its nodes, the nodes it makes itself, and the messages to its client.

`execution` decides what happens next; behaviours report progress through a `NodeCall`.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from comfyfleet.testing.fake_comfyui import pictures
from comfyfleet.testing.fake_comfyui.catalogue import NodeClass
from comfyfleet.testing.fake_comfyui.errors import Interrupted
from comfyfleet.testing.fake_comfyui.machine import FakeMachine
from comfyfleet.testing.fake_comfyui.result_cache import NodeMemory
from comfyfleet.testing.fake_comfyui.sockets import (
    JPEG,
    PNG,
    preview_frame,
    preview_frame_with_metadata,
    text_frame,
)


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """A node's result: values, something to show, or more nodes to run in its place."""

    values: tuple[Any, ...] = ()
    ui: dict[str, Any] = msgspec.field(default_factory=dict)
    expand: dict[str, Any] | None = None
    """New nodes; `values` are then links to them."""


class FakeRun:
    """A prompt in execution."""

    def __init__(
        self, machine: FakeMachine, prompt_id: str, graph: dict[str, Any], extra_data: dict[str, Any]
    ) -> None:
        self.machine = machine
        self.prompt_id = prompt_id
        self.graph = graph
        self.extra_data = extra_data
        self.messages: list[list[Any]] = []
        self.executed: list[str] = []
        self.ui_outputs: dict[str, dict[str, Any]] = {}
        self._made: dict[str, dict[str, Any]] = {}
        self._parents: dict[str, str] = {}
        self._progress: dict[str, dict[str, Any]] = {}

    @property
    def client_id(self) -> str | None:
        return self.machine.sockets.client_id

    def node(self, node_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._made[node_id] if node_id in self._made else self.graph[node_id]
        return found

    def node_class(self, node_id: str) -> NodeClass:
        return self.machine.catalogue[self.node(node_id)["class_type"]]

    def add_made_node(self, node_id: str, node: dict[str, Any], parent: str) -> None:
        """Adds a node that another node made while it ran."""
        self._made[node_id] = node
        self._parents[node_id] = parent

    def is_made(self, node_id: str) -> bool:
        return node_id in self._made

    def display_id(self, node_id: str) -> str:
        """The node of the submitted graph that this one belongs to."""
        while node_id in self._parents:
            node_id = self._parents[node_id]
        return node_id

    def meta(self, node_id: str) -> dict[str, Any]:
        display = self.display_id(node_id)
        parent = self._parents.get(node_id)
        return {"node_id": node_id, "display_node": display, "parent_node": parent, "real_node_id": display}

    def send(self, event: str, data: dict[str, Any], is_broadcast: bool = False) -> None:
        """Sends a message that also goes into the history."""
        stamped = {**data, "timestamp": int(time.time() * 1000)}
        self.messages.append([event, stamped])
        if self.client_id is not None or is_broadcast:
            self.machine.sockets.post(event, stamped, self.client_id)

    def send_to_client(self, event: str, data: dict[str, Any]) -> None:
        """Sends a message only to the client that queued the prompt."""
        if self.client_id is not None:
            self.machine.sockets.post(event, data, self.client_id)

    def start_progress(self, node_id: str) -> None:
        self._set_progress(node_id, 0.0, 1.0, "running")

    def finish_progress(self, node_id: str) -> None:
        maximum = self._progress.get(node_id, {"max": 1})["max"]
        self._set_progress(node_id, maximum, maximum, "finished")

    def report(self, node_id: str, value: int, maximum: int, image: tuple[int, bytes] | None) -> None:
        """Reports progress in a node, with a picture if given. Raises if the run was interrupted."""
        self.check_interrupt()
        sockets = self.machine.sockets
        self._set_progress(node_id, value, maximum, "running")
        with_metadata = image is not None and sockets.wants_metadata(self.client_id)
        if image is not None and with_metadata:
            sockets.post("preview", self._preview_with_metadata(node_id, image), self.client_id)
        progress = {"value": value, "max": maximum, "prompt_id": self.prompt_id, "node": node_id}
        sockets.post("progress", progress, self.client_id)
        if image is not None:
            self.machine.stats.previews_sent += 1
            if not with_metadata:
                sockets.post("preview", preview_frame(image[1], image[0]), self.client_id)

    def check_interrupt(self) -> None:
        """Raises if an interrupt is pending, and clears it."""
        if self.machine.is_interrupted:
            self.machine.is_interrupted = False
            raise Interrupted

    def _preview_with_metadata(self, node_id: str, image: tuple[int, bytes]) -> bytes:
        metadata = {
            "node_id": node_id,
            "prompt_id": self.prompt_id,
            "display_node_id": self.display_id(node_id),
            "parent_node_id": self._parents.get(node_id),
            "real_node_id": self.display_id(node_id),
            "image_type": "image/png" if image[0] == PNG else "image/jpeg",
        }
        return preview_frame_with_metadata(image[1], metadata)

    def _set_progress(self, node_id: str, value: float, maximum: float, state: str) -> None:
        self._progress[node_id] = {
            "value": value,
            "max": maximum,
            "state": state,
            "node_id": node_id,
            "prompt_id": self.prompt_id,
            "display_node_id": self.display_id(node_id),
            "parent_node_id": self._parents.get(node_id),
            "real_node_id": self.display_id(node_id),
        }
        if self.machine.behaviour.sends_progress_state:
            nodes = {known: dict(entry) for known, entry in self._progress.items()}
            data = {"prompt_id": self.prompt_id, "nodes": nodes}
            self.machine.sockets.post("progress_state", data, self.client_id)


class NodeCall:
    """One execution of one node, as its behaviour sees it."""

    def __init__(self, run: FakeRun, node_id: str, inputs: dict[str, Any], memory: NodeMemory) -> None:
        self.run = run
        self.machine = run.machine
        self.node_id = node_id
        self.node_class = run.node_class(node_id)
        self.inputs = inputs
        self.memory = memory

    async def work(self, seconds: float) -> None:
        """Keeps the card busy for this long (at speed 1)."""
        if seconds > 0:
            await self.machine.clock.sleep(seconds / self.machine.settings.speed)

    async def sleep(self, seconds: float) -> None:
        """Waits for this long at any speed of the card."""
        await self.machine.clock.sleep(seconds)

    def progress(
        self, value: int, maximum: int, *, preview_seed: int | None = None, png: bytes | None = None
    ) -> None:
        """Reports progress with a drawn preview or a finished picture."""
        image = None
        if png is not None:
            image = (PNG, png)
        elif preview_seed is not None:
            image = (JPEG, pictures.preview(preview_seed, value / maximum))
        self.run.report(self.node_id, value, maximum, image)

    def text(self, text: str) -> None:
        """Shows a line of text at the node to all clients."""
        self.machine.sockets.post("text", text_frame(self.node_id, text))

    async def stall_if_switched_on(self) -> None:
        """Waits while the stall or hold switch names this node. Raises if a held run is interrupted."""
        names, faults = (self.node_class.name, self.node_id), self.machine.faults
        while faults.stall in names or faults.hold in names:
            if faults.stall not in names:
                self.run.check_interrupt()
            await self.machine.signal.wait()
