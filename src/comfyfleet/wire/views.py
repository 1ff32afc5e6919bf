"""How values of the model are shown: records as answers, times as text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

V = TypeVar("V", bound=msgspec.Struct)


def view_of(kind: type[V], record: msgspec.Struct, **own: Any) -> V:
    """`own` has the fields that the record lacks, or that the view shows otherwise."""
    for name in kind.__struct_fields__:
        if name not in own:
            own[name] = getattr(record, name)
    return kind(**own)


def timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
