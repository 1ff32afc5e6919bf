"""What all tests share: how random ones are played on machines that others use too, and what is told at the end."""

from __future__ import annotations

import os

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
