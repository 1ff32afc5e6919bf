"""Keys, enrolment tokens and the audit log in the API.

The audit log is a hash chain: the hash of an entry covers the entry as JSON with sorted names, and the previous hash.
`AuditVerifier` checks a list of entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.access import ApiKey, AuditEntry, Enrolment, Role
from comfyfleet.model.bounds import Name, PageSize, Seconds, Text
from comfyfleet.wire.bodies import Time
from comfyfleet.wire.views import view_of


class KeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Role
    name: Text = ""
    tenant: Name | None = None
    worker_id: Name | None = None
    expires_in_s: Seconds | None = None


class RotateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    overlap_s: Seconds = 0.0
    """Seconds for which the old secret stays valid."""


class EnrolmentBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    uses: Annotated[int, Meta(ge=1, le=100_000)] = 1
    expires_in_s: Annotated[float, Meta(gt=0, le=1e8)] = 3600.0
    worker_prefix: Text = ""
    replace: bool = False
    """A worker that already has a key gets a new one, which revokes the old. Otherwise it is refused."""


class KeyView(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    role: Role
    created_at: float
    name: str = ""
    tenant: str | None = None
    worker_id: str | None = None
    expires_at: float | None = None
    revoked_at: float | None = None


class CreatedKey(KeyView, frozen=True):
    key: str = ""
    """The whole key. The hub stores only its hash and cannot show it again."""


class KeyList(msgspec.Struct, frozen=True):
    keys: tuple[KeyView, ...]
    cursor: str | None = None


class CreatedEnrolment(msgspec.Struct, frozen=True):
    token: str
    expires_at: float
    uses: int
    id: str = ""
    created_at: float = 0.0
    uses_left: int = 0


class EnrolmentView(msgspec.Struct, frozen=True):
    id: str
    created_at: float
    expires_at: float
    uses_left: int
    is_good: bool
    """Whether the token is neither used up nor expired."""
    worker_prefix: str = ""
    replace: bool = False


class EnrolmentList(msgspec.Struct, frozen=True):
    enrolments: tuple[EnrolmentView, ...]
    cursor: str | None = None


class AuditQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    kind: Literal["operations", "jobs"] = "operations"
    """`operations`: changes of keys, queue and workers. `jobs`: changes of jobs."""
    since: Time | None = None
    cursor: Name | None = None
    limit: PageSize = 100


class AuditView(AuditEntry, frozen=True):
    id: str = ""
    number: int = 0
    """The number of the entry in its chain, from 1 without gaps."""
    previous: str = ""
    """The hash of the previous entry."""
    hash: str = ""
    """SHA-256 of `previous`, a line feed, and the entry as JSON with sorted names, without `id`, `number`, `previous`
    and `hash`."""


class AuditList(msgspec.Struct, frozen=True):
    entries: tuple[AuditView, ...]
    cursor: str | None = None


class AuditPage(msgspec.Struct, frozen=True):
    """`AuditList` for clients: it keeps unknown fields of newer hubs, because the hash covers them."""

    entries: tuple[dict[str, Any], ...]
    cursor: str | None = None


def entry_view(entry: AuditEntry, entry_id: str, number: int, previous: str, hash_: str) -> AuditView:
    return view_of(AuditView, entry, id=entry_id, number=number, previous=previous, hash=hash_)


def enrolment_view(token: Enrolment, now: float) -> EnrolmentView:
    is_good = token.uses_left > 0 and now < token.expires_at
    return view_of(EnrolmentView, token, id=token.token_id, is_good=is_good, replace=token.replaces)


def view(key: ApiKey) -> KeyView:
    return view_of(KeyView, key, id=key.key_id)


def made(key: ApiKey, secret: str) -> CreatedKey:
    return view_of(CreatedKey, key, id=key.key_id, key=secret)


BEGINNING = "0" * 64
"""The previous hash of the first entry."""
FORGET = "forget_audit"
"""The action of the entry that records a deletion of old entries; its target is the note of the last of them."""
_OUTSIDE = frozenset({"id", "number", "previous", "hash"})
"""Fields that the hash does not cover."""


def hash_of(previous: str, entry: Mapping[str, Any]) -> str:
    text = msgspec.json.encode(entry, order="deterministic")
    return hashlib.sha256(previous.encode() + b"\n" + text).hexdigest()


def note(number: int, hash_: str) -> str:
    """A checkpoint: with it an auditor can later check that the log is complete up to this entry."""
    return f"{number}:{hash_}"


class AuditVerifier:
    """Checks the entries of a list in order and collects problems."""

    def __init__(self, noted: str | None = None) -> None:
        self._noted = noted
        self._is_noted_found = noted is None
        self._chain: str | None = None
        self._number = 0
        self._hash = ""
        self._missing: tuple[int, str] | None = None
        """The entry before the first that is present, until an entry records its deletion."""
        self.entries = 0
        self.problems: list[str] = []

    @property
    def head(self) -> str:
        return note(self._number, self._hash) if self.entries else note(0, BEGINNING)

    def take(self, entry: Mapping[str, Any]) -> None:
        number, previous, shown = entry["number"], entry["previous"], entry["hash"]
        chain = str(entry["id"]).partition("/")[0]
        if chain != self._chain:
            self._end_chain()
            self._chain = chain
            # Older entries were deleted: a later entry must record that.
            self._missing = None if (number, previous) == (1, BEGINNING) else (number - 1, previous)
            self._find(note(number - 1, previous))
        elif number != self._number + 1:
            self._wrong(f"entries {self._number + 1} to {number - 1} of chain {chain} are missing")
        elif previous != self._hash:
            self._wrong(
                f"entry {number} of chain {chain} does not match entry {number - 1}: one of them was changed"
            )
        own = {name: value for name, value in entry.items() if name not in _OUTSIDE}
        if hash_of(previous, own) != shown:
            self._wrong(f"entry {number} of chain {chain} was changed")
        self._number, self._hash = number, shown
        self.entries += 1
        self._find(note(number, shown))
        if own.get("action") == FORGET and self._missing is not None:
            last, _, hash_ = str(own.get("target")).partition(":")
            # A deletion that covers more entries may still be running.
            if int(last) > self._missing[0] or (int(last), hash_) == self._missing:
                self._missing = None

    def end(self) -> None:
        self._end_chain()
        if not self._is_noted_found:
            assert self._noted is not None
            self.problems.append(
                f"the log does not contain the noted entry {self._noted.partition(':')[0]} as it was noted: "
                "the log was truncated, rewritten, or the entry was deleted because of its age"
            )

    def _end_chain(self) -> None:
        if self._missing is not None:
            self._wrong(
                f"chain {self._chain} is missing entries up to {self._missing[0]}, and no entry records their deletion"
            )
        self._missing = None

    def _find(self, found: str) -> None:
        self._is_noted_found |= found == self._noted

    def _wrong(self, problem: str) -> None:
        self.problems.append(problem)
