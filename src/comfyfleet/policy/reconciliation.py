"""Compares a round in the central store and in the tenant's database. The reconciler repairs the differences."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import TenantId
from comfyfleet.model.ledger import HoldId


class FindingKind(StrEnum):
    UNSENT = "unsent"
    """Open in the tenant's database and missing in the store: the reconciler sends it again."""
    UNSETTLED = "unsettled"
    """Ended in the store and open in the tenant's database: the reconciler settles it."""
    UNCONFIRMED = "unconfirmed"
    """Ended in both, but not marked as settled in the store: the reconciler marks it."""
    OUTLIVED = "outlived"
    """Ended in the tenant's database and open in the store: the reconciler ends it there."""
    UNKNOWN = "unknown"
    """Open in the store and unknown to the tenant's database: the reconciler ends it without a charge."""
    AHEAD = "ahead"
    """The store has a later round, or an ended round that the tenant's database lacks. The database was restored from
    an older state: an operator must act."""
    OLD_HOLD = "old_hold"
    """The hold is older than jobs usually are: an operator should look."""
    WRONG_LEDGER = "wrong_book"
    """A ledger is inconsistent: an operator must act."""
    UNSEEN = "unseen"
    """The tenant's database was not reachable, so nothing could be compared."""

    @property
    def mends_itself(self) -> bool:
        return self not in (
            FindingKind.AHEAD,
            FindingKind.OLD_HOLD,
            FindingKind.WRONG_LEDGER,
            FindingKind.UNSEEN,
        )


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: FindingKind
    tenant: TenantId
    message: str
    hold_id: HoldId | None = None


def check_open_round(hold_id: HoldId, dispatch: Dispatch | None) -> FindingKind | None:
    """Compare a sent, open round of a tenant's database with the dispatch in the store."""
    if dispatch is None or dispatch.round < hold_id.round:
        return FindingKind.UNSENT
    if dispatch.round > hold_id.round:
        return FindingKind.AHEAD
    return FindingKind.UNSETTLED if dispatch.phase.is_final else None


def check_dispatch(dispatch: Dispatch, is_known: bool, ended: Phase | None) -> FindingKind | None:
    """Compare a dispatch with the tenant's database, which may know the round and its end."""
    if dispatch.phase.is_final:
        if dispatch.settled_at is not None:
            return None
        if not is_known:
            # Whether it must be paid is not known any more.
            return FindingKind.AHEAD
        return None if ended is None else FindingKind.UNCONFIRMED
    if not is_known:
        return FindingKind.UNKNOWN
    return None if ended is None else FindingKind.OUTLIVED
