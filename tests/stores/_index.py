"""The head of a lane index."""

from __future__ import annotations

from collections.abc import Container, Set

from comfyfleet.model.dispatch import LaneKey
from comfyfleet.model.ids import ProfileKey
from comfyfleet.stores.inprocess.lane_index import LaneIndex


def first(
    index: LaneIndex, profile: ProfileKey, skip: Set[str] = frozenset(), skip_jobs: Container[int] = ()
) -> tuple[LaneKey, int] | None:
    seen = index.window(profile, slots=1, lanes=0, quantum_s=0.0, skip=skip, skip_jobs=skip_jobs)
    return seen[0][:2] if seen else None
