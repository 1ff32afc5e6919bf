"""What all tests share: how random ones are played on machines that others use too, and what is told at the end."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from tests import _skips
from tests._home import offences, own_home
from tests.keep_out.sitecustomize import OFFENCES

# How long an example takes says nothing on a shared machine. `make test` gives a verdict: it plays the same examples
# each time, and fewer of them. `make test-all` looks for what nobody has seen: `--hypothesis-profile=full`.
_SHARED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", _SHARED, derandomize=True, max_examples=30)
settings.register_profile("verdict", _SHARED, derandomize=True, max_examples=100)
settings.register_profile("full", _SHARED, derandomize=False, max_examples=100, print_blob=True)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    _skips.add_option(parser)
    parser.addoption(
        "--soak",
        type=int,
        default=2000,
        metavar="JOBS",
        help="How many jobs go through the Redis store in its soak.",
    )


_HOME = ExitStack()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    home = _HOME.enter_context(own_home())
    if hasattr(config, "workerinput"):
        # Each of several processes notes what its own tests did.
        os.environ[OFFENCES] = str(home / f"offences-{os.getpid()}")
    _skips.register(config)
    # Tables are judged by the widths that tests name, not by that of the terminal that these tests run in.
    os.environ.pop("COLUMNS", None)
    # A shell without job control starts what it puts in the background with Ctrl-C ignored, and children inherit that:
    # the commands under test would never hear theirs.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    _HOME.close()


@pytest.fixture(autouse=True)
def _chance(request: pytest.FixtureRequest) -> None:
    """What the product draws, such as the jitter of a wait, a test draws the same each time."""
    random.seed(request.node.nodeid)


@pytest.fixture(autouse=True)
def _keeps_out() -> Iterator[None]:
    """What is the user's own (see `_home.py`) is refused to a test, and a test that tries has failed."""
    before = len(offences())
    yield
    tried = offences()[before:]
    assert not tried, f"this test reached for what is the user's own: {tried}"
