"""Compares how streams ended with what the callers of their jobs submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Ended(msgspec.Struct, frozen=True):
    """How a stream ended: by a final fact of a round with what came of it, or in other words."""

    how: str
    round: int = 0
    made: str | None = None
    """From what the result was made; a failure says it too."""


class Streamed(msgspec.Struct, frozen=True):
    job: str
    ended: Ended | None
    """None: it was still open when its time was over."""


class Streams(msgspec.Struct, frozen=True):
    jobs: int = 0
    streams: int = 0
    open: int = 0
    without: int = 0
    """Those that ended otherwise than with the end of their job and what came of it."""
    wrong: tuple[str, ...] = ()

    def __add__(self, other: Streams) -> Streams:
        return Streams(*(getattr(self, name) + getattr(other, name) for name in Streams.__struct_fields__))


def check_streams(asked: Mapping[str, str], found: Sequence[Streamed], *, wrong_at_most: int = 5) -> Streams:
    """`asked`: for each job what its result must be made from. A round that fails is followed by one that completes."""
    wrong: list[str] = []
    still_open = without = 0
    for stream in found:
        ended = stream.ended
        if ended is None:
            still_open += 1
            wrong.append(f"still open: a stream of {stream.job}")
        elif ended.how not in ("completed", "failed") or ended.made != asked[stream.job]:
            without += 1
            what = "nothing" if ended.made is None else "another job's result"
            wrong.append(f"a stream of {stream.job} ended by {ended.how}, round {ended.round}, with {what}")
    return Streams(len(asked), len(found), still_open, without, tuple(wrong[:wrong_at_most]))
