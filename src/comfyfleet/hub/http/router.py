"""Which route a path means: a tree of segments, so that the cost does not grow with the number of routes.

The query of a request as a typed value. A name that is not known is refused: a filter that nobody reads must not
look applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.wire.bodies import WholeQuery
from comfyfleet.wire.route import Route

_ANY = "/"
"""No segment of a path is that."""


class RouteMatch(NamedTuple):
    route: Route
    parameters: dict[str, str]


class _Place:
    __slots__ = ("by_method", "parts")

    def __init__(self) -> None:
        self.parts: dict[str, _Place] = {}
        self.by_method: dict[str, tuple[Route, tuple[str, ...]]] = {}


class Router:
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

    def find(self, method: str, raw_path: str) -> RouteMatch | tuple[str, ...]:
        """The route with what stands in its path; or the methods that the path does have."""
        values: list[str] = []
        place = self._fixed.get(raw_path) or self._walk(raw_path, values)
        if place is None:
            return ()
        found = place.by_method.get(method)
        if found is None:
            return tuple(place.by_method)
        route, names = found
        return RouteMatch(route, dict(zip(names, values, strict=True)))

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


T = TypeVar("T")

_MAX_FIELDS = 100
_ELSEWHERE = frozenset({"token"})
"""Read by others."""


def read_query(raw: bytes, kind: type[Any]) -> Any:
    """`name[key]=value` and `name.key=value` make a mapping; every other name stands once."""
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict"
        )
    except ValueError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the query cannot be read: {error}") from error
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in _ELSEWHERE:
            continue
        head, key = _key(name)
        if key is not None and head in kind.__struct_fields__:
            within = found.setdefault(head, {})
            if isinstance(within, dict):
                within[key] = value
                continue
        if name in found:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"{name!r} stands in the query twice")
        found[name] = value
    try:
        made = msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the query is not what is expected: {error}") from error
    for name in found:
        # Whoever reads text as something else also reads `null` as nothing: the filter would not be applied.
        if getattr(made, name) is None:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"{name!r} has no value in the query: leave it out")
    return made


def page_of(
    found: Sequence[T], asked: WholeQuery, name: Callable[[T], str]
) -> tuple[Sequence[T], str | None]:
    """Of a list that is at hand as a whole: what was asked for of it, and where to go on."""
    if asked.limit is None and asked.cursor is None:
        return found, None
    behind = sorted((each for each in found if asked.cursor is None or name(each) > asked.cursor), key=name)
    page = behind[: asked.limit]
    return page, name(page[-1]) if len(page) < len(behind) else None


def _key(name: str) -> tuple[str, str | None]:
    if name.endswith("]") and "[" in name:
        head, _, key = name[:-1].partition("[")
        return head, key
    head, dot, key = name.partition(".")
    return head, key if dot else None
