"""Keys, enrolments and the audit log as an administrator asks for and sees them. A secret is shown once.

The chain of the audit log: the hash of each entry covers the one before it, so whoever has a list can check it.

Hashes are made of the entry as JSON with its names in order, so a verifier needs no more of an entry than its text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.access import ApiKey, AuditEntry, Enrolment, Role
from comfyfleet.wire.bodies import Name, Seconds, Time


class KeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Role
    name: Annotated[str, Meta(max_length=256)] = ""
    tenant: Name | None = None
    worker_id: Name | None = None
    expires_in_s: Seconds | None = None


class RotateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    overlap_s: Seconds = 0.0
    """So long the old secret still opens."""


class EnrolmentBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    uses: Annotated[int, Meta(ge=1, le=100_000)] = 1
    expires_in_s: Annotated[float, Meta(gt=0, le=1e8)] = 3600.0
    worker_prefix: Annotated[str, Meta(max_length=256)] = ""
    replace: bool = False
    """A worker that has a key gets a new one, and its old ones end. Otherwise it is refused."""


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
    """The whole key. It is not kept, and cannot be shown again."""


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
    """Neither used up nor expired."""
    worker_prefix: str = ""
    replace: bool = False


class EnrolmentList(msgspec.Struct, frozen=True):
    enrolments: tuple[EnrolmentView, ...]
    cursor: str | None = None


class AuditQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`operations`: what was done to keys, queue and workers. `jobs`: what callers did to jobs."""

    kind: Literal["operations", "jobs"] = "operations"
    since: Time | None = None
    cursor: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class AuditView(AuditEntry, frozen=True):
    id: str = ""
    number: int = 0
    """Of the entry in its chain, from 1 on without a gap."""
    previous: str = ""
    """The hash of the entry before it."""
    hash: str = ""
    """SHA-256 of `previous`, a line feed, and the entry as JSON with its names in order, without these four."""


class AuditList(msgspec.Struct, frozen=True):
    entries: tuple[AuditView, ...]
    cursor: str | None = None


class AuditPage(msgspec.Struct, frozen=True):
    """The same at a client, with whatever fields a newer hub has: all of them are part of the hash."""

    entries: tuple[dict[str, Any], ...]
    cursor: str | None = None


def entry_view(entry: AuditEntry, entry_id: str, number: int, previous: str, hash_: str) -> AuditView:
    return AuditView(
        **msgspec.structs.asdict(entry), id=entry_id, number=number, previous=previous, hash=hash_
    )


def enrolment_view(token: Enrolment, now: float) -> EnrolmentView:
    return EnrolmentView(
        token.token_id,
        token.created_at,
        token.expires_at,
        token.uses_left,
        token.uses_left > 0 and now < token.expires_at,
        token.worker_prefix,
        token.replaces,
    )


def view(key: ApiKey) -> KeyView:
    return KeyView(**_fields(key))


def made(key: ApiKey, secret: str) -> CreatedKey:
    return CreatedKey(**_fields(key), key=secret)


def _fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "role": key.role,
        "created_at": key.created_at,
        "name": key.name,
        "tenant": key.tenant,
        "worker_id": key.worker_id,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }


BEGINNING = "0" * 64
"""Before the first entry."""
FORGET = "forget_audit"
"""The action of the entry that is made when old ones are forgotten; its target is the note of the last of them."""
_OUTSIDE = frozenset({"id", "number", "previous", "hash"})
"""What a list says of an entry beside what it says itself."""


def hash_of(previous: str, entry: Mapping[str, Any]) -> str:
    text = msgspec.json.encode(entry, order="deterministic")
    return hashlib.sha256(previous.encode() + b"\n" + text).hexdigest()


def note(number: int, hash_: str) -> str:
    """What an auditor writes down to find out later whether the log still has all it had then."""
    return f"{number}:{hash_}"


class AuditVerifier:
    """Given every entry of a list in order, says what is wrong with it."""

    def __init__(self, noted: str | None = None) -> None:
        self._noted = noted
        self._is_noted_found = noted is None
        self._chain: str | None = None
        self._number = 0
        self._hash = ""
        self._missing: tuple[int, str] | None = None
        """The last entry before the first that is there, while no entry tells that it was forgotten."""
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
            # Something older was forgotten, or removed: an entry that follows must tell of it.
            self._missing = None if (number, previous) == (1, BEGINNING) else (number - 1, previous)
            self._find(note(number - 1, previous))
        elif number != self._number + 1:
            self._wrong(f"entries {self._number + 1} to {number - 1} of chain {chain} are missing")
        elif previous != self._hash:
            self._wrong(
                f"entry {number} of chain {chain} does not follow on entry {number - 1}: one was changed"
            )
        own = {name: value for name, value in entry.items() if name not in _OUTSIDE}
        if hash_of(previous, own) != shown:
            self._wrong(f"entry {number} of chain {chain} was changed")
        self._number, self._hash = number, shown
        self.entries += 1
        self._find(note(number, shown))
        if own.get("action") == FORGET and self._missing is not None:
            last, _, hash_ = str(own.get("target")).partition(":")
            # One that tells of more was not carried out to its end yet.
            if int(last) > self._missing[0] or (int(last), hash_) == self._missing:
                self._missing = None

    def end(self) -> None:
        self._end_chain()
        if not self._is_noted_found:
            assert self._noted is not None
            self.problems.append(
                f"the noted entry {self._noted.partition(':')[0]} is not in the log as it was noted: "
                "its end was cut off, it was written anew, or it is so old that it was forgotten"
            )

    def _end_chain(self) -> None:
        if self._missing is not None:
            self._wrong(
                f"the beginning of chain {self._chain} up to entry {self._missing[0]} is missing, and no entry tells "
                "that it was forgotten"
            )
        self._missing = None

    def _find(self, found: str) -> None:
        self._is_noted_found |= found == self._noted

    def _wrong(self, problem: str) -> None:
        self.problems.append(problem)
