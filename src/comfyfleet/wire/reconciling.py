"""What was found between the store and tenants' databases, as it is told over HTTP, and the routes that tell it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from comfyfleet.model.ledger import HoldId
from comfyfleet.wire.route import ADMIN, OPERATORS, get_route, of_noun, post_route


class FindingView(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: str
    tenant: str
    message: str
    mends_itself: bool
    """Whether the hub knows what to do about it. Otherwise somebody has to look."""
    job_id: str | None = None
    round: int | None = None


class FindingList(msgspec.Struct, frozen=True):
    findings: tuple[FindingView, ...]
    is_mended: bool
    """Whether what mends itself was mended. In a dry run nothing is changed."""


def finding_view(
    kind: str, tenant: str, message: str, mends_itself: bool, hold_id: HoldId | None
) -> FindingView:
    job_id, number = (None, None) if hold_id is None else hold_id
    return FindingView(kind, tenant, message, mends_itself, job_id, number)


def finding_list(found: Iterable[FindingView], *, is_mended: bool) -> FindingList:
    return FindingList(tuple(found), is_mended)


RECONCILING = of_noun(
    "tenants",
    get_route(
        "look_for_differences",
        "/api/reconcile",
        "Where the store and tenants' databases differ, and books that do not add up; nothing is changed",
        OPERATORS,
        FindingList,
    ),
    post_route(
        "reconcile",
        "/api/reconcile",
        "The same, and what mends itself is mended; hubs do so by themselves every minute",
        ADMIN,
        FindingList,
    ),
)
