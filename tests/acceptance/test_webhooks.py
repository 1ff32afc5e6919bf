"""Webhooks between real processes: a hub, the example's receiver, and a hub that is killed before it could tell."""

from __future__ import annotations

import contextlib
import http.client
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.acceptance._process import (
    ROOT,
    fake_servers,
    picture_workflow,
    read_until,
    run_program,
    started,
    stop,
    written,
)
from tests.acceptance.test_up import Place, online

EXAMPLE = ROOT / "examples" / "webhook_receiver.py"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "data").mkdir()
    return Place(tmp_path / "data")


@contextlib.contextmanager
def receiver(secret: str, port: str = "0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = (sys.executable, EXAMPLE, "--port", port)
    with started(*command, env={"WEBHOOK_SECRET": secret}) as process:
        (line,) = read_until(process, lambda line: line.startswith("listening"))
        yield process, line.split()[-1]


def test_a_job_is_told_to_the_example_and_sent_again_by_hand(place: Place) -> None:
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with fake_servers("--time-scale", "0.02") as (server,), ExitStack() as stack:
        allow = ("--webhook-allow", "127.0.0.1")
        online(place.start(stack, "up", "--server", server, "--port", "0", "--name", "gpu", *allow))
        secret = place.run("webhook", "secret").stdout.strip()
        process, url = stack.enter_context(receiver(secret))
        job_id = place.run("submit", workflow, "--webhook", url).stdout.strip()
        assert read_until(process, lambda _: True) == [f"job.completed {job_id}"]
        delivery_id = f"{job_id}_3_job"
        place.run("webhook", "resend", delivery_id)
        assert read_until(process, lambda _: True) == [f"again: {delivery_id}"]

        place.run("webhook", "secret", "--overlap", "0")
        place.run("webhook", "resend", delivery_id)
        (refused,) = read_until(process, lambda _: True)
        assert "the signature is not the hub's" in refused
        refusal = place.run("submit", workflow, "--webhook", "http://169.254.169.254/")
        assert (refusal.returncode, refusal.stdout) == (3, "")
        assert "not a public address" in refusal.stderr


@pytest.mark.parametrize("length", ["-1", "x", "", "1048577", "9" * 5000])
def test_the_example_reads_no_more_than_it_wants_to(length: str) -> None:
    with receiver("whsec_eA==") as (_, url):
        asking = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        asking.putrequest("POST", "/")
        asking.putheader("content-length", length)
        asking.endheaders()
        assert asking.getresponse().status == 413
        asking.close()


def test_what_a_killed_hub_did_not_tell_is_told_after_its_restart(place: Place) -> None:
    store = f"sqlite:///{place.folder}/fleet.db"
    with ExitStack() as stack:
        with ExitStack() as first:
            hub = place.start(first, "hub", "--store", store, "--port", "0")
            read_until(hub, lambda line: line.startswith("The hub answers at"))
            secret = place.run("webhook", "secret").stdout.strip()
            assert stop(hub, signal.SIGTERM)[0] == 0
        process, url = stack.enter_context(receiver(secret))
        killed = run_program(sys.executable, "-m", "tests.acceptance._dies_with_facts", store, url, cwd=ROOT)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        job_id = killed.stdout.strip()
        place.start(stack, "hub", "--store", store, "--port", "0", "--webhook-allow", "127.0.0.0/8")
        assert read_until(process, lambda _: True) == [f"job.completed {job_id}"]


def test_a_receiver_that_was_away_through_a_kill_is_told_in_the_end(place: Place) -> None:
    """Tried and failed, the hub killed meanwhile: the next one goes on where it was."""
    settings = place.folder / "quick.toml"
    settings.write_text(
        'webhook_allow = ["127.0.0.1"]\n'
        "[rules]\ndelivery_base_s = 0.2\ndelivery_cap_s = 0.5\ndelivery_tries = 1000\n"
    )
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with fake_servers("--time-scale", "0.02") as (server,), ExitStack() as stack:
        options = ("up", "--server", server, "--port", "0", "--name", "gpu", "--config", settings)
        hub = place.start(stack, *options)
        online(hub)
        secret = place.run("webhook", "secret").stdout.strip()
        with receiver(secret) as (_, url):
            port = url.rstrip("/").rpartition(":")[2]
        ended = place.run("submit", workflow, "--webhook", url, "--watch", "--out", "pictures")
        assert ended.returncode == 0, ended.stderr
        stop(hub, signal.SIGKILL)
        process, _ = stack.enter_context(receiver(secret, port))
        online(place.start(stack, *options))
        (line,) = read_until(process, lambda _: True)
        assert line.startswith("job.completed")
