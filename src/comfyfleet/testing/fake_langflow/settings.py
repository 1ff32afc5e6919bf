"""What a fake LangFlow is like, and its faults, as switches."""

from __future__ import annotations

import msgspec

from comfyfleet.testing.fake_langflow.flows import STANDARD_FLOWS, FakeFlow


class FakeLangFlowSettings(msgspec.Struct, frozen=True, kw_only=True):
    version: str = "1.13.0"
    """Before 1.11 it has no background jobs."""
    key: str | None = "sk-fake"
    """The API key. None: every request is allowed."""
    flows: tuple[FakeFlow, ...] = STANDARD_FLOWS
    max_concurrency: int = 5
    """LANGFLOW_BACKGROUND_MAX_CONCURRENCY."""
    time_scale: float = 1.0
    """Simulated seconds last so many wall-clock seconds each."""
    job_timeout_s: float | None = None
    """LANGFLOW_BACKGROUND_JOB_TIMEOUT."""
    unclear_s: float = 0.0
    """How long a stopped job shows as failed without a reason before it shows as cancelled."""
    is_fake: bool = True
    """Whether the version route says that this server only simulates work."""


class LangFlowFaults(msgspec.Struct, kw_only=True):
    """The switches of one fake server, all off by default. They can be changed while it runs. Counters count down."""

    refuses_key: bool = False
    """Every request with a key gets 403."""
    stalls: bool = False
    """The process does not answer until the switch is cleared."""
    holds: bool = False
    """Runs stop before their middle component until the switch is cleared."""
    fail_runs: int = 0
    """So many runs fail in their middle component."""
    out_of_memory: int = 0
    """So many runs fail for lack of memory."""
    missing_flows: frozenset[str] = frozenset()
    """Names of flows that are gone."""
    forgets_submits: int = 0
    """So many jobs stay queued, as after a restart; jobs submitted later start. -1 means always."""
    cut_submits_before: int = 0
    """The connection is cut before the job exists."""
    cut_submits_after: int = 0
    """The connection is cut when the job exists."""
    busy_submits: int = 0
    """Submits get 503 DATABASE_ERROR."""
    cut_streams: int = 0
    """The connection of an event stream is cut after its next event."""
    deaf_streams: bool = False
    """Event streams stay open and send nothing."""
    slow_errors_s: float = 0.0
    """Simulated seconds between an error and its report: the default logging of LangFlow is slow."""
    endless_answers: str | None = None
    """Answers to paths that contain this text never end."""
    garbage: str | None = None
    """Answers to paths that contain this text are no JSON."""
    redirects: str | None = None
    """Answers to paths that contain this text redirect to this server's front page."""
