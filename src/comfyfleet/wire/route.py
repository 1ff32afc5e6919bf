"""What one row of the table of routes says, and short words to write rows with. The rows are `routes.py`'s."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from comfyfleet.model.access import Role
from comfyfleet.model.errors import RefusalCode

ADMIN = frozenset({Role.ADMIN})
OPERATORS = frozenset({Role.ADMIN, Role.OPERATOR})
LOOKERS = frozenset({Role.ADMIN, Role.OPERATOR, Role.VIEWER})
CALLERS = frozenset({Role.ADMIN, Role.OPERATOR, Role.TENANT})
READERS = frozenset({Role.ADMIN, Role.OPERATOR, Role.TENANT, Role.VIEWER})
WORKERS = frozenset({Role.ADMIN, Role.WORKER})
ANYBODY: frozenset[Role] = frozenset()
"""No key is needed."""


WORKER_NOUN = "worker protocol"

_KIB, _MIB = 1024, 1024 * 1024
TINY_BYTES = 4 * _KIB
"""A name and a token, from somebody who has no key yet."""
SMALL_BYTES = 64 * _KIB
"""A form."""
LISTED_BYTES = _MIB
"""Lists of a thousand names."""
TOLD_BYTES = 8 * _MIB
"""What a server has, and previews of what it makes."""
LARGE_BYTES = 32 * _MIB
"""Workflows and results: real graphs have less than 5 MiB, and some carry pictures as text."""


class Route(msgspec.Struct, frozen=True):
    name: str
    method: str
    path: str
    summary: str
    roles: frozenset[Role]
    aliases: tuple[str, ...] = ()
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    reads: type[msgspec.Struct] | None = None
    """What the body is decoded as, where that is not what the document shows."""
    answers: dict[int, Any] = {}
    """By status: the type of the body, which is JSON but for `bytes` and `str`; None for none."""
    refuses: tuple[RefusalCode, ...] = ()
    """Beside what every route may answer."""
    headers: tuple[str, ...] = ()
    is_body_optional: bool = False
    max_bytes: int = SMALL_BYTES
    """The most its body may have, sent and unpacked. Of `LARGE_BYTES` the hub's settings make more or less."""
    in_parts: bool = False
    """Its body is a list whose items are decoded, and bounded, one by one."""
    only_reads: bool = False
    """It changes nothing, for all that it is a POST."""
    takes_form: bool = False
    """Its body may also be a form with a file in it, and is then read by the handler piece by piece."""
    takes_bytes: bool = False
    """Its body is a file, and is read by the handler piece by piece."""
    parks: bool = False
    """The answer may take a while: whoever hangs up meanwhile is noticed."""
    takes_token: bool = False
    """The key may stand in the query: browsers cannot send a header with a stream or a socket."""
    streams: bool = False
    """It may be answered with Server-Sent Events."""
    is_page: bool = False
    """It is answered with HTML, and so are its refusals to a browser."""
    noun: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names in the path."""
        parts = self.path.split("/")
        return tuple(part[1:-1] for part in parts if part.startswith("{"))

    @property
    def audited(self) -> Literal["operations", "jobs"] | None:
        """Where a change is noted. Of workers only that one enrolled: what they report stands with their jobs."""
        if (
            self.method == "GET"
            or self.only_reads
            or (self.noun == WORKER_NOUN and self.name != "worker_enrol")
        ):
            return None
        if self.noun == "files":
            # By a link, the bytes come of a file that was noted when it was made.
            return "jobs" if self.roles else None
        return "jobs" if self.noun == "jobs" else "operations"

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


def of_noun(noun: str, *routes: Route) -> tuple[Route, ...]:
    return tuple(msgspec.structs.replace(route, noun=noun) for route in routes)
