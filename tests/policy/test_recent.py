"""The bounded cache of the newest entries."""

from __future__ import annotations

from comfyfleet.model.recent import RecentDict


def test_it_drops_the_entry_that_was_set_longest_ago() -> None:
    recent: RecentDict[str, int] = RecentDict(2)
    recent["a"] = 1
    recent["b"] = 2
    recent["a"] = 3
    recent["c"] = 4
    assert dict(recent) == {"a": 3, "c": 4}
