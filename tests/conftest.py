"""What all tests share: how random ones are played on machines that others use too, and what is told at the end."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings
from tests import _skips

# How long an example takes says nothing on a shared machine. Where a verdict is wanted rather than a find, the same
# examples are played each time.
settings.register_profile(
    "shared",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    _skips.add_option(parser)
    parser.addoption(
        "--soak",
        type=int,
        default=2000,
        metavar="JOBS",
        help="How many jobs go through the Redis store in its soak.",
    )


def pytest_configure(config: pytest.Config) -> None:
    _skips.register(config)
    # A shell without job control starts what it puts in the background with Ctrl-C ignored, and children inherit that:
    # the commands under test would never hear theirs.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
