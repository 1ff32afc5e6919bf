"""The demo from outside: it ends by itself, tells the truth, and can be interrupted at any moment."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pytest
from rich.console import Console
from tests.acceptance._process import (
    CLI,
    LIMIT_S,
    ROOT,
    ask,
    environment,
    read_until,
    run_cli,
    run_program,
    started,
    stop,
)

from comfyfleet.cli.demo_fleet import loaders_of, stories
from comfyfleet.cli.demo_show import DemoReport, LiveShow, Narrator
from comfyfleet.pool.events import PoolEvent

FREE = ("--port", "0")
FASTER = ("--time-scale", "0.3", *FREE)

# One process plays the demo once for all of them.
pytestmark = pytest.mark.xdist_group("demo")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("demo") / "pictures"
    return run_cli("demo", "--once", *FASTER, "--out", folder), folder


Played = tuple[subprocess.CompletedProcess[str], Path]


def test_the_demo_completes_every_job(played: Played) -> None:
    ended, _ = played
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout.rstrip().splitlines()[-1] == "24 of 24 jobs completed, nothing lost"


def test_the_demo_shows_a_block_and_its_end(played: Played) -> None:
    output = played[0].stdout
    blocked = re.search(r"gpu-b +blocked for (.+) for \d", output)
    assert blocked
    kind = re.escape(blocked[1])
    unblocked = re.search(rf"gpu-b +unblocked for {kind}", output)
    assert unblocked and blocked.start() < unblocked.start()
    assert re.search(rf"^gpu-b +{kind} +\d+\.\d s +\d+\.\d s", output, re.MULTILINE)
    assert "the cooldown is over" in output
    assert "still blocked" not in output


def test_the_demo_shows_a_crash_and_the_return(played: Played) -> None:
    output = played[0].stdout
    assert output.index("gpu-c  is offline") < output.index("gpu-c  is online")
    crashes = re.search(r"^gpu-c .* (\d+)$", output, re.MULTILINE)
    assert crashes and crashes.group(1) == "1"
    retries = output[output.index("\nRetries") :]
    assert "gpu-c → gpu-" in retries
    assert "crashed: " in retries


def test_the_demo_leaves_its_pictures_in_the_folder(played: Played) -> None:
    ended, folder = played
    pictures = list(folder.iterdir())
    assert len(pictures) == 24
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    shown = [line.strip() for line in ended.stdout.splitlines() if line.strip().endswith(".png")]
    assert len(shown) == 1
    assert Path(shown[0]) in pictures


def test_the_counts_of_the_servers_add_up(played: Played) -> None:
    rows = re.findall(r"^gpu-[abcd] +.*%.*$", played[0].stdout, re.MULTILINE)
    numbers = [[0 if cell == "–" else int(cell) for cell in row.split()[1:6]] for row in rows]
    assert len(numbers) == 4
    assert sum(row[4] for row in numbers) == 24
    assert all(sum(row[:4]) == row[4] for row in numbers)


def test_the_demo_compares_its_model_loads_with_first_come_first_served(played: Played) -> None:
    output = played[0].stdout
    found = re.search(
        r"^(\d+) model loads; first come, first served would have made (\d+)$", output, re.MULTILINE
    )
    assert found, output
    rows = re.findall(r"^gpu-[abcd] +.*%.*$", output, re.MULTILINE)
    assert int(found.group(1)) == sum(int(row.split()[8]) for row in rows), "what the servers counted"
    kinds = [kind for story in stories() for kind in (story.kind, story.then) if kind is not None]
    files = [file for kind in kinds for file in loaders_of(kind).values()]
    assert len(set(files)) <= int(found.group(2)) <= len(files)


def test_an_interrupted_demo_ends_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with started(*CLI, "demo", *FREE, env={"TMPDIR": str(tmp_path)}) as process:
        read_until(process, lambda line: " s  gpu-" in line and "completed" in line)
        code, _, errors = stop(process, signal.SIGINT)
    assert code == 130
    assert re.fullmatch(r"interrupted, \d+ of 24 done", errors.strip())
    assert list(tmp_path.iterdir()) == []


def test_in_a_narrow_window_names_and_headings_of_the_report_stay_whole(tmp_path: Path) -> None:
    ended = run_cli("demo", "--once", *FASTER, "--out", tmp_path / "out", env={"COLUMNS": "60"})
    assert ended.returncode == 0, ended.stderr
    table = ended.stdout.partition("Who ran what")[2].partition("Blocks")[0]
    assert table.split("\n")[1].split()[:4] == ["server", "SDXL", "SD", "1.5"]
    assert re.findall(r"^gpu-[abcd]\b", table, re.MULTILINE) == ["gpu-a", "gpu-b", "gpu-c", "gpu-d"]
    assert "…" not in table and max(map(len, table.split("\n"))) <= 60


def test_a_demo_that_nobody_watches_any_more_ends_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with started(*CLI, "demo", *FREE, env={"TMPDIR": str(tmp_path)}) as process:
        read_until(process, lambda line: line.startswith("gpu-d"))
        assert process.stdout is not None
        process.stdout.close()
        code = process.wait(LIMIT_S)
        _, errors = process.communicate()
    assert code == 143
    assert re.fullmatch(r"interrupted, \d+ of 24 done", errors.strip())
    assert list(tmp_path.iterdir()) == []


def test_the_demo_leaves_its_hub_running_until_ctrl_c(tmp_path: Path) -> None:
    temporary, out = tmp_path / "temporary", tmp_path / "pictures"
    temporary.mkdir()
    # As `make demo` does it: the environment is not active.
    called = Path(sys.executable).with_name("comfyfleet")
    command = (called, "demo", *FREE, "--time-scale", "0.1", "--out", out)
    with started(*command, env={"TMPDIR": str(temporary), "PATH": os.defpath}) as process:
        lines = read_until(process, lambda line: line == "Ctrl-C stops it.")
        (url,) = {
            word.rstrip(":") for line in lines for word in line.split() if word.startswith("http://127")
        }
        assert f"  {called} top --hub {url}" in lines, "a line to be copied"
        stats = ask(f"{url}/api/stats")
        assert (stats["completed"], stats["waiting"]) == (24, 0)
        assert "gpu-a" in run_cli("workers", "--hub", url, env={"COMFYFLEET_DATA": str(tmp_path)}).stdout
        assert stop(process, signal.SIGINT) == (0, "", "")
    assert list(temporary.iterdir()) == []
    with pytest.raises(urllib.error.URLError):
        ask(f"{url}/health")


@pytest.mark.parametrize(
    ("variables", "ending"), [(["ONCE=1"], "comfyfleet demo --once"), ([], "comfyfleet demo")]
)
def test_once_is_passed_on_by_make(variables: list[str], ending: str) -> None:
    told = run_program("make", "--dry-run", "--directory", ROOT, "demo", *variables).stdout
    assert any(line.rstrip().endswith(ending) for line in told.splitlines()), told


def test_an_interrupted_demo_leaves_the_terminal_sane() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*CLI, "demo", *FREE],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment({"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}),
    )
    os.close(theirs)
    try:
        shown = _read_pty(ours, until=b"running", within_s=60)
        assert b"\x1b[?25l" in shown, "live bars hide the cursor"
        process.send_signal(signal.SIGINT)
        rest = _read_pty(ours, until=None, within_s=60)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[?25h" in rest
    assert b"Traceback" not in rest


def test_every_job_of_the_demo_is_in_its_line() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    show = LiveShow(console, Narrator(0.0))
    for number in range(3):
        show.on_event(PoolEvent("job:queued", 0.0, f"job-{number}"))
    show.on_event(PoolEvent("job:accepted", 0.0, "job-0", client_id="gpu-a"))
    console.print(show._draw())
    assert isinstance(console.file, io.StringIO)
    assert "0 of 24 done, 1 running, 2 waiting, 21 to come, 0 retried" in console.file.getvalue()


def _read_pty(descriptor: int, *, until: bytes | None, within_s: float) -> bytes:
    """What is written to the terminal, up to some bytes or to its end."""
    shown = b""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        readable, _, _ = select.select([descriptor], [], [], 0.2)
        if not readable:
            continue
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # Linux's word for the end of a terminal
            return shown
        shown += part
        if not part or (until is not None and until in shown):
            return shown
    raise AssertionError(f"not seen in time: {until!r} in {shown[-500:]!r}")


def test_a_demo_that_lost_a_job_does_not_say_that_nothing_was_lost() -> None:
    report = DemoReport(0.0)
    assert not report.is_complete
    report.is_short = True
    console = Console(file=io.StringIO(), width=100)
    report.print_summary(console)
    said = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    assert "0 of 24 jobs completed" in said
    assert "nothing lost" not in said
