"""The settings, the faults and the counters of a fake Comfy Cloud account."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from comfyfleet.testing.fake_comfyui.settings import default_models

PLANS = {"free": 0, "standard": 1, "creator": 3, "pro": 5}
"""Jobs at a time. The free plan has no interface for programs."""


class FakeCloudSettings(msgspec.Struct, frozen=True, kw_only=True):
    plan: Literal["free", "standard", "creator", "pro"] = "creator"
    key: str = "comfyui-fake-key"
    credits: float = 1000.0
    price: float = 1.0
    """Credits that a run costs. They are charged when it starts."""
    queue_limit: int = 100
    run_cap_s: float = 1800.0
    """A run that takes longer is cancelled."""
    job_life_s: float = 86_400.0
    link_life_s: float = 300.0
    max_upload_bytes: int = 104_857_600
    models: dict[str, dict[str, float]] = msgspec.field(default_factory=default_models)
    node_classes: tuple[str, ...] | None = None
    time_scale: float = 1.0
    """Wall-clock seconds per simulated second."""
    seed: int = 0


class ScriptedAnswer(msgspec.Struct, kw_only=True):
    """The answer to a submission that makes no job. Its key is released."""

    status: int
    body: dict[str, Any]
    retry_after: int | None = None


class CloudFaults(msgspec.Struct, kw_only=True):
    """The switches of one fake account, all off by default. They may change at any time; counters count down."""

    lose_before: int = 0
    """So many submissions are cut off before they arrive."""
    lose_after: int = 0
    """So many make a job, and their answer is cut off."""
    error_before: int = 0
    """So many are answered with 500 and make no job. Their key stays claimed, because nobody knows."""
    error_after: int = 0
    """So many make a job and are answered with 500."""
    answers: list[ScriptedAnswer] = msgspec.field(default_factory=list)
    """The answers to the next submissions."""
    run_errors: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """The next runs start and fail with these errors."""
    is_key_refused: bool = False
    is_forbidden: bool = False
    forgets_jobs: bool = False
    """v2 does not know any job."""
    hides_jobs: bool = False
    """The list of v1 is empty."""
    loses_marks: bool = False
    """Graphs come back without prefixes of files and without `_meta`."""
    hides_v2_workflows: bool = False
    """The graph of a job is found in v1 only."""
    are_outputs_gone: bool = False
    are_outputs_endless: bool = False
    streams: Literal["on", "missing", "full", "cut"] = "on"
    redirect_outputs_to: str = ""
    """Downloads lead there instead of to the storage."""
    slow_s: float = 0.0
    rate_limited: int = 0
    """So many requests for jobs are answered with 429."""
    drop_paths: list[str] = msgspec.field(default_factory=list)
    """Requests to these path prefixes are cut off."""
    endless_paths: list[str] = msgspec.field(default_factory=list)
    garbage_paths: list[str] = msgspec.field(default_factory=list)
    echoes_key: bool = False
    """Errors repeat the request's key, as a careless proxy does."""
    never_starts: bool = False
    stalls: bool = False
    """Runs begin and make no progress."""
    ignores_cancel: bool = False


class CloudStats(msgspec.Struct, kw_only=True):
    """What really happened, for tests."""

    submissions: int = 0
    """Requests to submit that arrived."""
    jobs_made: list[str] = msgspec.field(default_factory=list)
    charges: dict[str, float] = msgspec.field(default_factory=dict)
    """Credits by job."""
    cancels: list[str] = msgspec.field(default_factory=list)
    interrupts: int = 0
    """Uses of v1's interrupt, which hits every job of the account."""
    uploads: int = 0
    downloads: int = 0
    keys_at_storage: int = 0
    """Requests to the storage that carried the key."""
    requests: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def charged(self) -> float:
        return sum(self.charges.values())
