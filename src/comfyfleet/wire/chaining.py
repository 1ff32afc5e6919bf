"""The chain of the audit log: the hash of each entry covers the one before it, so whoever has a list can check it.

Hashes are made of the entry as JSON with its names in order, so a verifier needs no more of an entry than its text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

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


class Verifier:
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
