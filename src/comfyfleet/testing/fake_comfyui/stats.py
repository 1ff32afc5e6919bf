"""What really happened on a fake server, for tests to assert on.

Stats belong to the test and survive a crash. The server never reads them.
"""

from __future__ import annotations

import msgspec


class FakePromptRun(msgspec.Struct, kw_only=True):
    """One start of one prompt; `ended_at` stays None if the server died first."""

    prompt_id: str
    started_at: float
    ended_at: float | None = None
    outcome: str | None = None
    """"success", "error" or "interrupted"."""


class FakeStats(msgspec.Struct, kw_only=True):
    """Counts since the fake was made."""

    prompts_accepted: int = 0
    prompts_run: dict[str, int] = msgspec.field(default_factory=dict)
    """How often each prompt id was started."""
    prompt_log: list[FakePromptRun] = msgspec.field(default_factory=list)
    nodes_executed: int = 0
    nodes_by_class: dict[str, int] = msgspec.field(default_factory=dict)
    model_loads: int = 0
    """Model files that loaders read."""
    load_seconds: float = 0.0
    """Simulated seconds that reading them took."""
    model_swaps: int = 0
    """Models that took the place of others on the card."""
    previews_sent: int = 0
    uploads: int = 0
    bytes_without_end: int = 0
    """How many bytes of endless answers were read."""
    crashes: int = 0
    requests: dict[str, int] = msgspec.field(default_factory=dict)
    """How often each path was requested."""

    def starts(self, prompt_id: str, now: float) -> FakePromptRun:
        """Records the start of a prompt and returns its entry."""
        self.prompts_run[prompt_id] = self.prompts_run.get(prompt_id, 0) + 1
        run = FakePromptRun(prompt_id=prompt_id, started_at=now)
        self.prompt_log.append(run)
        return run

    def loads(self, seconds: float) -> None:
        """Counts one model file that is read."""
        self.model_loads += 1
        self.load_seconds += seconds

    def executes(self, class_type: str) -> None:
        """Counts one node that ran (not one from the cache)."""
        self.nodes_executed += 1
        self.nodes_by_class[class_type] = self.nodes_by_class.get(class_type, 0) + 1
