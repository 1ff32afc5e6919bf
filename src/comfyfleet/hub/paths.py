"""Which route a path means: a tree of segments, so that the cost does not grow with the number of routes."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

from comfyfleet.wire.route import Route

_ANY = "/"
"""No segment of a path is that."""


class Found(NamedTuple):
    route: Route
    parameters: dict[str, str]


class _Place:
    __slots__ = ("by_method", "parts")

    def __init__(self) -> None:
        self.parts: dict[str, _Place] = {}
        self.by_method: dict[str, tuple[Route, tuple[str, ...]]] = {}


class Paths:
    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._root = _Place()
        self._fixed: dict[str, _Place] = {}
        for route in routes:
            for path in route.paths:
                self._add(route, path)

    def _add(self, route: Route, path: str) -> None:
        place, names = self._root, []
        for part in path.split("/")[1:]:
            if part.startswith("{"):
                names.append(part[1:-1])
                part = _ANY
            place = place.parts.setdefault(part, _Place())
        assert route.method not in place.by_method, f"{route.method} {path} stands in the table twice"
        place.by_method[route.method] = (route, tuple(names))
        if not names:
            self._fixed[path] = place

    def find(self, method: str, raw_path: str) -> Found | tuple[str, ...]:
        """The route with what stands in its path; or the methods that the path does have."""
        values: list[str] = []
        place = self._fixed.get(raw_path) or self._walk(raw_path, values)
        if place is None:
            return ()
        found = place.by_method.get(method)
        if found is None:
            return tuple(place.by_method)
        route, names = found
        return Found(route, dict(zip(names, values, strict=True)))

    def _walk(self, raw_path: str, values: list[str]) -> _Place | None:
        place = self._root
        for part in raw_path.split("/")[1:]:
            following = place.parts.get(part)
            if following is None:
                following = place.parts.get(_ANY)
                if following is None or not part:
                    return None
                values.append(unquote(part))
            place = following
        return place if place.by_method else None
