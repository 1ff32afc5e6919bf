"""Errors as HTTP problem documents (RFC 9457): each refusal code has one status, a fault is 503, a defect 500.

The caller logs defects under the incident id.
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
    RefusalCode.INVALID_REQUEST: ProblemKind(400, "The request is not valid"),
    RefusalCode.UNAUTHENTICATED: ProblemKind(401, "A valid key is required"),
    RefusalCode.CREDITS_SHORT: ProblemKind(402, "Not enough credits"),
    RefusalCode.NOT_ALLOWED: ProblemKind(403, "The key's role does not allow this"),
    RefusalCode.NOT_FOUND: ProblemKind(404, "Not found"),
    RefusalCode.DUPLICATE_DIFFERS: ProblemKind(409, "The same id was used with different content"),
    RefusalCode.WRONG_PHASE: ProblemKind(409, "Not possible in the current state"),
    RefusalCode.LEASE_LOST: ProblemKind(409, "The lease has ended"),
    RefusalCode.TOO_LARGE: ProblemKind(413, "The request is too large"),
    RefusalCode.INVALID_WORKFLOW: ProblemKind(422, "The workflow is not valid"),
    RefusalCode.UNWORKABLE: ProblemKind(422, "No worker can run the job"),
    RefusalCode.RATE_LIMITED: ProblemKind(429, "Too many requests", retry_after_s=1),
    RefusalCode.QUEUE_FULL: ProblemKind(503, "The queue is full", retry_after_s=5),
    RefusalCode.UNAVAILABLE: ProblemKind(503, "Temporarily unavailable", retry_after_s=1),
}
"""All codes, each with its status."""

INCIDENT = "internal"
"""The code of a defect of the hub. The incident id finds it in the log."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The members of every problem. Refusals add their details."""

    type: str
    """The code as a URN."""
    title: str
    status: int
    """The HTTP status."""
    code: str
    detail: str = ""
    request_id: str = ""
    retry_after_s: float | None = None


class ProblemAnswer(NamedTuple):
    """A problem as it is sent: RFC 9457 wants extension members at the top level."""

    status: int
    body: dict[str, Any]
    retry_after_s: float | None

    def headers(self) -> dict[str, str]:
        found = {}
        if self.retry_after_s is not None:
            # The header has whole seconds: round up.
            found["retry-after"] = str(max(1, -int(-self.retry_after_s // 1)))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def problem_response(error: BaseException, request_id: str = "", incident: str = "") -> ProblemAnswer:
    """`incident` is the id under which the log has an unexpected error."""
    if isinstance(error, Refusal):
        return refused(error, request_id)
    if isinstance(error, Fault):
        return refused(Refusal(RefusalCode.UNAVAILABLE, str(error)), request_id)
    problem = Problem(
        f"urn:comfyfleet:problem:{INCIDENT}",
        "A defect of the hub",
        500,
        INCIDENT,
        f"An unexpected error: search the hub's log for {incident}",
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
    """The answer of a remote hub as the refusal that its engine raised."""
    try:
        members: Mapping[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        code = RefusalCode(members["code"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError):
        return Fault(f"the hub answered with status {status} and without a known problem code")
    rest = {name: value for name, value in members.items() if name not in Problem.__struct_fields__}
    retry_after_s = members.get("retry_after_s")
    if isinstance(retry_after_s, int | float) and not isinstance(retry_after_s, bool) and retry_after_s >= 0:
        rest["retry_after_s"] = retry_after_s
    # These would clash with parameters of `Refusal`, and the answer may not come from a hub.
    for name in ("self", "message"):
        rest.pop(name, None)
    return Refusal(code, str(members.get("detail", "")), **rest)


def _members(problem: Problem) -> dict[str, Any]:
    return {
        name: value
        for name, value in msgspec.structs.asdict(problem).items()
        if value is not None and value != ""
    }
