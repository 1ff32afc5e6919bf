"""What two databases say of one round, and what follows where they differ. Pure: the reconciler carries it out."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import TenantId
from comfyfleet.model.ledger import HoldId


class FindingKind(StrEnum):
    UNSENT = "unsent"
    """Open in the tenant's database and not in the store: it is sent again."""
    UNSETTLED = "unsettled"
    """Ended in the store and open in the tenant's database: it is settled."""
    UNCONFIRMED = "unconfirmed"
    """Ended in both, and the store does not know it yet: it is marked."""
    OUTLIVED = "outlived"
    """Ended in the tenant's database and open in the store: it ends there too."""
    UNKNOWN = "unknown"
    """Open in the store, and the tenant's database has never heard of it: it ends there, and nothing is charged."""
    AHEAD = "ahead"
    """The store is at a later round than the tenant's database, or has ended one that is not there. The database was
    set back: somebody has to look."""
    OLD_HOLD = "old_hold"
    """Held for longer than jobs usually live: somebody may want to look."""
    WRONG_LEDGER = "wrong_book"
    """A book does not add up: somebody has to look."""
    UNSEEN = "unseen"
    """The tenant's database could not be asked, so nothing is known: neither that it agrees nor that it does not."""

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


def judge_open(hold_id: HoldId, dispatch: Dispatch | None) -> FindingKind | None:
    """Of a round that is open in its tenant's database, and was sent: what the store has under its id."""
    if dispatch is None or dispatch.round < hold_id.round:
        return FindingKind.UNSENT
    if dispatch.round > hold_id.round:
        return FindingKind.AHEAD
    return FindingKind.UNSETTLED if dispatch.phase.is_final else None


def judge_dispatch(dispatch: Dispatch, is_known: bool, ended: Phase | None) -> FindingKind | None:
    """Of a dispatch in the store: whether its tenant's database knows the round, and how that ended there."""
    if dispatch.phase.is_final:
        if dispatch.settled_at is not None:
            return None
        if not is_known:
            # Whether it is to be paid for, nobody can say any more.
            return FindingKind.AHEAD
        return None if ended is None else FindingKind.UNCONFIRMED
    if not is_known:
        return FindingKind.UNKNOWN
    return None if ended is None else FindingKind.OUTLIVED
