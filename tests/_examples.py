"""How many examples a test of Hypothesis plays. Each says how many it plays in full, as `make test-all` does; the
profiles of `conftest.py` say how many of each hundred are played."""

from __future__ import annotations

from hypothesis import settings

_FULL = 100


def examples(full: int) -> int:
    """Of this many, as many as the profile plays."""
    return max(1, full * settings().max_examples // _FULL)
