"""The order in which the nodes of a prompt run, and the keys of the result cache."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from typing import Any

Graph = dict[str, Any]


def is_link(value: Any) -> bool:
    """A link to another node's output: [node id, slot]."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int | float)
    )


class Schedule:
    """The nodes that still have to run, and what each of them waits for.

    A node enters when an output needs it; cached nodes do not count. Ready nodes that show a result soonest
    run first.
    """

    def __init__(
        self,
        inputs_of: Callable[[str], dict[str, Any]],
        is_cached: Callable[[str], bool],
        is_output: Callable[[str], bool],
        is_async: Callable[[str], bool],
    ) -> None:
        self._inputs_of = inputs_of
        self._is_cached = is_cached
        self._is_output = is_output
        self._is_async = is_async
        self._waits_for: dict[str, set[str]] = {}
        self._held: set[str] = set()

    def add(self, node_id: str) -> None:
        """Adds a node and everything it needs that is not cached."""
        todo = [node_id]
        while todo:
            current = todo.pop()
            if current in self._waits_for:
                continue
            sources = [value[0] for value in self._inputs_of(current).values() if is_link(value)]
            needed = [source for source in sources if not self._is_cached(source)]
            self._waits_for[current] = set(needed)
            todo.extend(needed)

    def wait_for(self, node_id: str, source: str) -> None:
        """Makes a node wait for one more."""
        self.add(source)
        self._waits_for[node_id].add(source)

    def hold(self, node_id: str) -> None:
        """The node works in the background and is skipped until it is released."""
        self._held.add(node_id)

    def release(self, node_id: str) -> None:
        self._held.discard(node_id)

    def done(self, node_id: str) -> None:
        del self._waits_for[node_id]
        for sources in self._waits_for.values():
            sources.discard(node_id)

    @property
    def is_empty(self) -> bool:
        return not self._waits_for

    def pick(self) -> str | None:
        """The next node to run. None: all others wait for background work."""
        ready = [
            node_id
            for node_id, sources in self._waits_for.items()
            if not sources and node_id not in self._held
        ]
        return min(ready, key=self._distance_to_user) if ready else None

    def _distance_to_user(self, node_id: str) -> int:
        if self._is_output(node_id) or self._is_async(node_id):
            return 0
        followers = self._followers(node_id)
        if any(self._is_output(follower) for follower in followers):
            return 1
        if any(self._is_output(second) for follower in followers for second in self._followers(follower)):
            return 2
        return 3

    def _followers(self, node_id: str) -> list[str]:
        return [follower for follower, sources in self._waits_for.items() if node_id in sources]


def signatures(graph: Graph, fingerprint: Callable[[str, dict[str, Any]], str]) -> dict[str, str]:
    """What each node's result depends on: its class, its inputs and those of all nodes before it.

    `fingerprint` adds what the graph does not show, such as a file's content. Raises KeyError for a node
    without inputs, as a real server does.
    """
    found: dict[str, str] = {}

    def sign(node_id: str, path: tuple[str, ...]) -> str:
        if node_id in found:
            return found[node_id]
        if node_id in path or node_id not in graph:
            return uncacheable_key()
        node = graph[node_id]
        inputs: dict[str, Any] = node["inputs"]
        parts: list[Any] = [node["class_type"], fingerprint(node["class_type"], inputs)]
        for name in sorted(inputs.keys()):
            value = inputs[name]
            source = sign(value[0], (*path, node_id)) if is_link(value) else None
            parts.append((name, source, value[1] if source is not None else value))
        found[node_id] = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        return found[node_id]

    return {node_id: sign(node_id, ()) for node_id in graph}


def uncacheable_key() -> str:
    """A key that keeps a node, and all that depend on it, out of the cache."""
    return uuid.uuid4().hex
