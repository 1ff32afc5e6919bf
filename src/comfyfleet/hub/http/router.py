"""Finds the route of a path in a tree of segments, and decodes the query string into a typed value.

The cost does not grow with the number of routes. An unknown name in a query is refused, so that no filter is
silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.wire.bodies import OptionalPageQuery
from comfyfleet.wire.route import Route

_ANY = "/"
"""Matches every segment. No segment can contain this character."""


class RouteMatch(NamedTuple):
    route: Route
    parameters: dict[str, str]


class _Node:
    __slots__ = ("by_method", "parts")

    def __init__(self) -> None:
        self.parts: dict[str, _Node] = {}
        self.by_method: dict[str, tuple[Route, tuple[str, ...]]] = {}


class Router:
    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._root = _Node()
        self._fixed: dict[str, _Node] = {}
        for route in routes:
            for path in route.paths:
                self._add(route, path)

    def _add(self, route: Route, path: str) -> None:
        node, names = self._root, []
        for part in path.split("/")[1:]:
            if part.startswith("{"):
                names.append(part[1:-1])
                part = _ANY
            node = node.parts.setdefault(part, _Node())
        assert route.method not in node.by_method, f"{route.method} {path} is in the route table twice"
        node.by_method[route.method] = (route, tuple(names))
        if not names:
            self._fixed[path] = node

    def find(self, method: str, raw_path: str) -> RouteMatch | tuple[str, ...]:
        """The route and its path parameters, or the methods that the path allows."""
        values: list[str] = []
        node = self._fixed.get(raw_path) or self._walk(raw_path, values)
        if node is None:
            return ()
        found = node.by_method.get(method)
        if found is None:
            return tuple(node.by_method)
        route, names = found
        return RouteMatch(route, dict(zip(names, values, strict=True)))

    def _walk(self, raw_path: str, values: list[str]) -> _Node | None:
        node = self._root
        for part in raw_path.split("/")[1:]:
            following = node.parts.get(part)
            if following is None:
                following = node.parts.get(_ANY)
                if following is None or not part:
                    return None
                values.append(unquote(part))
            node = following
        return node if node.by_method else None


T = TypeVar("T")

_MAX_FIELDS = 100
_ELSEWHERE = frozenset({"token"})
"""Names that another module reads."""


def read_query(raw: bytes, kind: type[Any]) -> Any:
    """`name[key]=value` and `name.key=value` make a mapping; any other name may appear once."""
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
            raise Refusal(RefusalCode.INVALID_REQUEST, f"{name!r} is in the query twice")
        found[name] = value
    try:
        made = msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the query is not valid: {error}") from error
    for name in found:
        # Lax conversion reads `null` as None, and the filter would not apply.
        if getattr(made, name) is None:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"{name!r} has no value in the query: leave it out")
    return made


def page_of(
    found: Sequence[T], asked: OptionalPageQuery, name: Callable[[T], str]
) -> tuple[Sequence[T], str | None]:
    """One page of a complete list, and the cursor of the next page."""
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
