"""The type of one route and helpers that build routes. `routes.py` and `admin_routes.py` have the table."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from comfyfleet.model.access import Role
from comfyfleet.model.errors import RefusalCode

ADMIN = frozenset({Role.ADMIN})
OPERATORS = frozenset({Role.ADMIN, Role.OPERATOR})
FLEET_VIEWERS = frozenset({Role.ADMIN, Role.OPERATOR, Role.VIEWER})
CALLERS = frozenset({Role.ADMIN, Role.OPERATOR, Role.TENANT})
JOB_READERS = frozenset({Role.ADMIN, Role.OPERATOR, Role.TENANT, Role.VIEWER})
WORKERS = frozenset({Role.ADMIN, Role.WORKER})
ANYBODY: frozenset[Role] = frozenset()
"""No key is needed."""


WORKER_TAG = "worker protocol"

_KIB, _MIB = 1024, 1024 * 1024
TINY_BYTES = 4 * _KIB
"""For callers without a key."""
SMALL_BYTES = 64 * _KIB
LISTED_BYTES = _MIB
"""For lists of a thousand names."""
INVENTORY_BYTES = 8 * _MIB
"""For inventories of servers and previews."""
LARGE_BYTES = 32 * _MIB
"""For workflows and results: graphs are usually below 5 MiB, but some embed pictures."""


class Route(msgspec.Struct, frozen=True, eq=False):
    name: str
    method: str
    path: str
    summary: str
    roles: frozenset[Role]
    aliases: tuple[str, ...] = ()
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    reads: type[msgspec.Struct] | None = None
    """The type that decodes the body, if it differs from the documented one."""
    answers: dict[int, Any] = {}
    """By status: the type of the JSON body. `bytes` and `str` are sent as they are; None: no body."""
    refuses: tuple[RefusalCode, ...] = ()
    """Codes in addition to those that every route can answer with."""
    headers: tuple[str, ...] = ()
    is_body_optional: bool = False
    max_bytes: int = SMALL_BYTES
    """The size limit of the body, compressed and decompressed. The hub's settings can change `LARGE_BYTES`."""
    in_parts: bool = False
    """The body is a list; each item is decoded and limited by itself."""
    only_reads: bool = False
    """A POST that changes nothing."""
    takes_form: bool = False
    """The body may be a form with a file, which the handler reads in pieces."""
    takes_bytes: bool = False
    """The body is a file, which the handler reads in pieces."""
    is_long_poll: bool = False
    """The answer can take a while, so the hub watches for a caller that disconnects."""
    takes_token: bool = False
    """The query may contain the key: browsers cannot send headers with a stream or a WebSocket."""
    streams: bool = False
    """The answer may be a stream of Server-Sent Events."""
    is_page: bool = False
    """The answer is HTML; browsers get problems as HTML too."""
    tag: str = ""
    """The tag in the OpenAPI document, and the heading in docs/protocol.md."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)

    @property
    def parameters(self) -> tuple[str, ...]:
        parts = self.path.split("/")
        return tuple(part[1:-1] for part in parts if part.startswith("{"))

    @property
    def audited(self) -> Literal["operations", "jobs"] | None:
        """Which audit log records the call. Of the worker protocol only enrolment: jobs keep the reports."""
        if (
            self.method == "GET"
            or self.only_reads
            or (self.tag == WORKER_TAG and self.name != "worker_enrol")
        ):
            return None
        if self.tag == "files":
            # Uploads by link belong to a file whose creation is already in the log.
            return "jobs" if self.roles else None
        return "jobs" if self.tag == "jobs" else "operations"

    @property
    def decodes(self) -> type[msgspec.Struct] | None:
        return self.reads or self.body

    @property
    def all_refusals(self) -> tuple[RefusalCode, ...]:
        found = list(self.refuses)
        if self.body is not None or self.query is not None:
            found.append(RefusalCode.INVALID_REQUEST)
        if self.body is not None:
            found.append(RefusalCode.TOO_LARGE)
        if self.roles:
            found += [RefusalCode.UNAUTHENTICATED, RefusalCode.NOT_ALLOWED]
        if self.parameters:
            found.append(RefusalCode.NOT_FOUND)
        found += [RefusalCode.RATE_LIMITED, RefusalCode.UNAVAILABLE]
        return tuple(dict.fromkeys(found))


def get_route(name: str, path: str, summary: str, roles: frozenset[Role], answer: Any, **more: Any) -> Route:
    return Route(name, "GET", path, summary, roles, answers={200: answer}, **more)


def post_route(name: str, path: str, summary: str, roles: frozenset[Role], answer: Any, **more: Any) -> Route:
    return Route(name, "POST", path, summary, roles, answers={200: answer}, **more)


def delete_route(name: str, path: str, summary: str, roles: frozenset[Role], **more: Any) -> Route:
    return Route(name, "DELETE", path, summary, roles, answers={204: None}, **more)


def tagged(tag: str, *routes: Route) -> tuple[Route, ...]:
    return tuple(msgspec.structs.replace(route, tag=tag) for route in routes)
