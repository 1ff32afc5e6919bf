"""What somebody meets at a terminal, or whose shell asks: live views, narrow windows, completion, errors as JSON."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tests.acceptance._process import CLI, environment, run_cli
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph

from comfyfleet.cli.demo_show import LiveShow, Narrator, kinds_by_hash
from comfyfleet.model.access import Role
from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.job import JobResult
from comfyfleet.pool.events import PoolEvent
from comfyfleet.worker.connectors.simulated import Reporter, SimulatedConnector

_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def hub() -> Iterator[Address]:
    with hub_with_a_worker() as address:
        yield address


@pytest.fixture
def env(hub: Address, tmp_path: Path) -> Mapping[str, str]:
    return {
        "COMFYFLEET_HUB": hub.url,
        "COMFYFLEET_KEY": hub.keys[Role.ADMIN],
        "COMFYFLEET_DATA": str(tmp_path),
        "TERM": "xterm",
    }


@pytest.fixture
def run(
    hub: Address, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    return runner(capfd, monkeypatch, hub, str(tmp_path))


class Terminal:
    """The commands' side of it is a real one; here is the side of the person."""

    def __init__(self, process: subprocess.Popen[bytes], keys: int) -> None:
        self._process = process
        self._keys = keys
        self.seen = ""

    def press(self, key: bytes) -> None:
        os.write(self._keys, key)

    def until(self, condition: Callable[[str], bool]) -> None:
        ends_at = time.monotonic() + _LIMIT_S
        while not condition(self.seen):
            assert time.monotonic() < ends_at, self.seen
            if select.select([self._keys], [], [], 0.1)[0]:
                self.seen += os.read(self._keys, 65536).decode(errors="replace")

    def code(self) -> int:
        """Reads on meanwhile: a terminal that nobody reads stops whoever writes to it."""
        while self._process.poll() is None:
            if select.select([self._keys], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self._keys, 65536).decode(errors="replace")
                except OSError:
                    break
        return self._process.wait(_LIMIT_S)


@contextmanager
def terminal(
    *arguments: str, env: Mapping[str, str], rows: int = 24, columns: int = 80
) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [*CLI, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(env),
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_top_ends_with_q_and_gives_the_terminal_back(env: Mapping[str, str]) -> None:
    with terminal("top", env=env) as screen:
        screen.until(lambda seen: "gpu" in seen and "idle slots" in seen)
        screen.press(b"x")
        screen.press(b"q")
        assert screen.code() == 0
        assert screen.seen.rstrip().endswith("\x1b[?1049l"), "the other screen is left"


def test_the_admin_key_is_shown_once_to_whoever_starts_a_hub_at_a_terminal(tmp_path: Path) -> None:
    env = {"COMFYFLEET_DATA": str(tmp_path / "data"), "TERM": "xterm"}
    seen = []
    for _ in range(2):
        with terminal("hub", "--port", "0", env=env, columns=200) as screen:
            screen.until(lambda seen: "status page: http://" in seen)
            seen.append(screen.seen)
    key = json.loads((tmp_path / "data" / "hub.json").read_text())["key"]
    assert f"admin key, shown only once: {key}" in seen[0]
    assert key not in seen[1] and f"admin key: in {tmp_path / 'data' / 'hub.json'}" in seen[1]
    assert "token=" not in "".join(seen)


def test_top_fits_into_a_small_window(env: Mapping[str, str]) -> None:
    with terminal("top", env=env, rows=8, columns=40) as screen:
        screen.until(lambda seen: "running job" in seen)
        screen.press(b"q")
        assert screen.code() == 0
        assert "Traceback" not in screen.seen


def test_top_waits_for_a_hub_that_goes_away(tmp_path: Path) -> None:
    with hub_with_a_worker() as address:
        env = {
            "COMFYFLEET_HUB": address.url,
            "COMFYFLEET_KEY": address.keys[Role.ADMIN],
            "COMFYFLEET_DATA": str(tmp_path),
            "TERM": "xterm",
        }
        view = terminal("top", env=env, columns=200)
        screen = view.__enter__()
        screen.until(lambda seen: "idle slots" in seen)
    try:
        screen.until(lambda seen: "not updated" in seen)
        screen.press(b"q")
        assert screen.code() == 0
    finally:
        view.__exit__(None, None, None)


def test_the_bar_of_several_jobs_counts_those_that_run_and_shows_their_progress(tmp_path: Path) -> None:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))

    async def half(job: LeasedJob, report: Reporter) -> JobResult:
        report(ProgressReport(job.ref, ProgressKind.STARTED))
        report(ProgressReport(job.ref, ProgressKind.PROGRESS, {"value": 1, "max": 2}))
        await asyncio.sleep(600)
        return JobResult()

    with hub_with_a_worker(connectors={"gpu": SimulatedConnector(behaviour=half)}) as address:
        env = {
            "COMFYFLEET_HUB": address.url,
            "COMFYFLEET_KEY": address.keys[Role.ADMIN],
            "COMFYFLEET_DATA": str(tmp_path),
            "TERM": "xterm",
        }
        with terminal("submit", str(path), "--count", "3", "--watch", env=env, columns=120) as screen:
            screen.until(lambda seen: "0 of 3 jobs done, 1 running" in seen and "17%" in seen)
            screen.press(b"\x03")


def test_messages_break_between_words(env: Mapping[str, str]) -> None:
    wrong = ("jobs", "--key", "cfk_0_0")
    with terminal(*wrong, env=env, columns=40) as screen:
        assert screen.code() == 3
    lines = screen.seen.replace("\r", "").splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 40
    assert " ".join(lines) in run_cli(*wrong, env=env).stderr.strip()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_live_table_of_the_demo_is_readable_at_any_width(columns: int) -> None:
    console = Console(width=columns, record=True, force_terminal=True, file=io.StringIO())
    show = LiveShow(console, Narrator(0.0))
    kind = next(iter(kinds_by_hash()))
    for server in ("gpu-a", "gpu-b"):
        for name in ("job:accepted", "client:blocked_workflow"):
            event = PoolEvent(name, 1.0, client_id=server, job_id=server, workflow_hash=kind)
            show.on_event(msgspec.structs.replace(event, metadata={"title": "cat 12"}))
    console.print(show._draw())
    text = console.export_text()
    for word in ("server", "gpu-a", "online", "cat 12", "done", "blocked"):
        assert word in text, text
    assert max(map(len, text.splitlines())) <= columns


def shown(arguments: Sequence[str], env: Mapping[str, str], columns: int) -> list[str]:
    with terminal(*arguments, env=env, columns=columns) as screen:
        assert screen.code() == 0, screen.seen
        return screen.seen.replace("\r", "").splitlines()


def test_a_list_of_jobs_fits_the_window_and_the_end_of_an_id_that_it_shows_is_enough(
    run: Run, env: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    (job_id,) = [each["id"] for each in run("submit", path, "--watch", "--json").json]
    assert job_id in run("jobs").output, "in a pipe nothing is shortened"
    lines = shown(["jobs"], env, 60)
    assert max(map(len, lines)) <= 60
    assert lines[0].split() == ["job", "status", "prio", "worker", "age", "error"]
    short = lines[1].split()[0]
    assert job_id.endswith(short) and len(short) >= 8
    assert run("job", "show", short).output.startswith(f"{job_id}  completed")
    for columns in (80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        for command in ("jobs", "workers", "key list", "config show", "audit list", "blocks"):
            lines = run(*command.split()).output.splitlines()
            assert max(map(len, lines)) <= columns, command


@pytest.mark.parametrize(("key", "code"), [(b"n\n", 1), (b"y\n", 0)])
def test_a_question_takes_no_for_an_answer(env: Mapping[str, str], key: bytes, code: int) -> None:
    with terminal("dead", "purge", env=env) as screen:
        screen.until(lambda seen: "for good?" in seen)
        screen.press(key)
        assert screen.code() == code
        assert ("nothing was deleted" in screen.seen) == (code == 1)


def test_where_nobody_can_be_asked_nothing_is_forgotten(run: Run) -> None:
    ended = run("dead", "purge")
    assert (ended.code, "--yes" in ended.errors) == (1, True)


def test_without_a_terminal_top_looks_once(run: Run) -> None:
    ended = run("top")
    assert ended.code == 0
    assert "\x1b" not in ended.output and "gpu" in ended.output


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("job", "show", "nobody's"), 3, "not_found"),
        (("jobs", "--nonsense"), 2, None),
        (("jobs", "--hub", "http://127.0.0.1:1"), 4, None),
        (("jobs", "--hub", "nonsense"), 2, None),
        (("hash", "/nowhere/workflow.json"), 2, None),
    ],
)
def test_with_json_an_error_is_json_too(
    run: Run, arguments: tuple[str, ...], code: int, problem: str | None
) -> None:
    ended = run(*arguments, "--json")
    assert (ended.code, ended.output) == (code, "")
    told = json.loads(ended.errors)["error"]
    assert (told["exit_code"], told["code"]) == (code, problem)
    assert told["message"]


def test_worker_in_the_singular_has_the_commands_too(run: Run) -> None:
    assert run("worker", "pause", "gpu", "--json").json["status"] == "paused"
    assert run("worker", "resume", "gpu").output == "gpu idle\n"
    wrong = run("worker", "--name", "x", "drain", "gpu")
    assert (wrong.code, "Put the options after `drain`" in wrong.errors) == (2, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("comfyfleet work", {"worker", "workers"}),
        ("comfyfleet workers drain ", {"gpu"}),
        ("comfyfleet worker drain g", {"gpu"}),
        ("comfyfleet submit --prio", {"--priority"}),
    ],
)
def test_a_shell_is_told_commands_options_and_ids(
    env: Mapping[str, str], words: str, expected: set[str]
) -> None:
    parts = words.split(" ")
    asked = {
        "_COMFYFLEET_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(parts) - 1),
    }
    ended = run_cli(env={**env, **asked})
    assert {line.partition(",")[2] for line in ended.stdout.splitlines()} == expected, ended.stderr


def test_without_a_hub_a_shell_is_told_nothing_and_nothing_is_printed(tmp_path: Path) -> None:
    asked = {
        "COMFYFLEET_HUB": "http://127.0.0.1:1",
        "COMFYFLEET_DATA": str(tmp_path),
        "_COMFYFLEET_COMPLETE": "bash_complete",
        "COMP_WORDS": "comfyfleet workers drain ",
        "COMP_CWORD": "3",
    }
    ended = run_cli(env=asked)
    assert (ended.stdout.strip(), ended.stderr) == ("", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(run: Run, shell: str) -> None:
    ended = run("completion", shell)
    assert ended.code == 0, ended.errors
    assert "_COMFYFLEET_COMPLETE" in ended.output
