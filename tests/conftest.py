"""What all tests share: how random ones are played on machines that others use too."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a shared machine. Where a verdict is wanted rather than a find, the same
# examples are played each time.
settings.register_profile(
    "shared",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("shared")
