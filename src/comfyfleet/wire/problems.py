"""Every no as an answer: a refusal's code has one HTTP status, a fault is 503, anything else 500 with an incident id.

The bodies are those of RFC 9457 (`application/problem+json`). Logging an incident is for whoever caught it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from comfyfleet.model.errors import Fault, Refusal, RefusalCode

CONTENT_TYPE = "application/problem+json"


class ProblemKind(NamedTuple):
    status: int
    title: str
    retry_after_s: int | None = None


KINDS: dict[RefusalCode, ProblemKind] = {
    RefusalCode.INVALID_REQUEST: ProblemKind(400, "The request cannot be understood"),
    RefusalCode.UNAUTHENTICATED: ProblemKind(401, "A valid key is needed"),
    RefusalCode.CREDITS_SHORT: ProblemKind(402, "Not enough credits"),
    RefusalCode.NOT_ALLOWED: ProblemKind(403, "This key may not do that"),
    RefusalCode.NOT_FOUND: ProblemKind(404, "There is no such thing"),
    RefusalCode.DUPLICATE_DIFFERS: ProblemKind(409, "The same name was used for something else"),
    RefusalCode.WRONG_PHASE: ProblemKind(409, "Not in this phase"),
    RefusalCode.LEASE_LOST: ProblemKind(409, "The lease is over"),
    RefusalCode.TOO_LARGE: ProblemKind(413, "More than is taken"),
    RefusalCode.INVALID_WORKFLOW: ProblemKind(422, "The workflow can run nowhere"),
    RefusalCode.UNWORKABLE: ProblemKind(422, "No worker can run this"),
    RefusalCode.RATE_LIMITED: ProblemKind(429, "Too many requests", retry_after_s=1),
    RefusalCode.QUEUE_FULL: ProblemKind(503, "The queue is full", retry_after_s=5),
    RefusalCode.UNAVAILABLE: ProblemKind(503, "Not now", retry_after_s=1),
}
"""The closed list, each code with its one status."""

INCIDENT = "internal"
"""The one code that is no refusal: a defect of the hub, found again in its log by the incident's id."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The members every problem has. A program reads `code`; what else there is stands beside it."""

    type: str
    title: str
    status: int
    code: str
    detail: str = ""
    request_id: str = ""
    retry_after_s: float | None = None


class ProblemAnswer(NamedTuple):
    """A problem on its way out: flat, as RFC 9457 wants its extension members."""

    status: int
    body: dict[str, Any]
    retry_after_s: float | None

    def headers(self) -> dict[str, str]:
        found = {}
        if self.retry_after_s is not None:
            # Whole seconds, and never sooner than is right.
            found["retry-after"] = str(max(1, -int(-self.retry_after_s // 1)))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def answer_to(error: BaseException, request_id: str = "", incident: str = "") -> ProblemAnswer:
    """`incident` names the line in the log for an error that nobody expected."""
    if isinstance(error, Refusal):
        return refused(error, request_id)
    if isinstance(error, Fault):
        return refused(Refusal(RefusalCode.UNAVAILABLE, str(error)), request_id)
    problem = Problem(
        f"urn:comfyfleet:problem:{INCIDENT}",
        "A defect of the hub",
        500,
        INCIDENT,
        f"This was not expected; the log has it under {incident}",
        request_id,
    )
    return ProblemAnswer(500, {**_members(problem), "incident": incident}, None)


def refused(refusal: Refusal, request_id: str = "") -> ProblemAnswer:
    kind = KINDS[refusal.code]
    retry_after_s = refusal.details.get("retry_after_s", kind.retry_after_s)
    problem = Problem(
        f"urn:comfyfleet:problem:{refusal.code.value}",
        kind.title,
        kind.status,
        refusal.code.value,
        refusal.message,
        request_id,
        retry_after_s,
    )
    return ProblemAnswer(kind.status, {**refusal.details, **_members(problem)}, retry_after_s)


def refusal_in(status: int, body: bytes) -> Refusal | Fault:
    """The other way: what a far hub answered, as the same refusal the engine would have raised."""
    try:
        members: Mapping[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        code = RefusalCode(members["code"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError):
        return Fault(f"the hub answered with status {status} and no problem it is known for")
    rest = {name: value for name, value in members.items() if name not in Problem.__struct_fields__}
    retry_after_s = members.get("retry_after_s")
    if isinstance(retry_after_s, int | float) and not isinstance(retry_after_s, bool) and retry_after_s >= 0:
        rest["retry_after_s"] = retry_after_s
    # Whoever answered may be no hub at all.
    for name in ("self", "message"):
        rest.pop(name, None)
    return Refusal(code, str(members.get("detail", "")), **rest)


def _members(problem: Problem) -> dict[str, Any]:
    return {
        name: value
        for name, value in msgspec.structs.asdict(problem).items()
        if value is not None and value != ""
    }
