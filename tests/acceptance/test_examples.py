"""The examples run as they are, and say clearly what is wrong with a setting."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.acceptance._process import CLI, ROOT, ask, fake_servers, read_until, run_program, started, stop
from tests.acceptance.test_up import online, url_in

TWO_STAGE = ROOT / "examples" / "two_stage_edit.py"
HUB_STAGES = ROOT / "examples" / "hub_two_stages.py"
QUICKSTART = ROOT / "examples" / "pool_quickstart.py"


def test_the_quickstart_runs_without_any_server(tmp_path: Path) -> None:
    ended = run_program(sys.executable, QUICKSTART, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "quickstart_00001_.png").read_bytes().startswith(b"\x89PNG")
    assert run_program(sys.executable, QUICKSTART, cwd=tmp_path).returncode == 0
    assert len(list(tmp_path.iterdir())) == 2, "the second picture is beside the first"


def test_the_quickstart_uses_the_servers_it_is_given(tmp_path: Path) -> None:
    with fake_servers("--count", "2") as urls:
        ended = run_program(sys.executable, QUICKSTART, *urls, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert any(url.removeprefix("http://") in ended.stdout for url in urls)


def last_statistics(output: str) -> dict[str, tuple[str, int]]:
    """By server: its stage and its jobs, from the last table."""
    table = output[output.rindex("\nafter ") :]
    rows = re.findall(r"^  (server\d) +(\w+) +(\d+) ", table, re.MULTILINE)
    return {server: (stage, int(jobs)) for server, stage, jobs in rows}


def test_two_stages_run_on_their_own_servers() -> None:
    ended = run_program(sys.executable, TWO_STAGE, env={"TWO_STAGE_RUNTIME_MS": "4000"})
    assert ended.returncode == 0, ended.stderr
    found = last_statistics(ended.stdout)
    assert {server: stage for server, (stage, _) in found.items()} == {
        "server1": "generation",
        "server2": "edit",
        "server3": "edit",
    }
    assert found["server1"][1] >= 2
    # Every picture that was generated was edited, and nowhere else.
    assert found["server2"][1] + found["server3"][1] == found["server1"][1]
    assert "100%" in ended.stdout
    assert "disconnects" in ended.stdout


def test_a_single_host_does_both_stages() -> None:
    with fake_servers("--time-scale", "0.05") as urls:
        settings = {
            "TWO_STAGE_HOSTS": urls[0],
            "TWO_STAGE_RUNTIME_MS": "500",
            "TWO_STAGE_SEED_STRATEGY": "auto",
        }
        ended = run_program(sys.executable, TWO_STAGE, env=settings)
    assert ended.returncode == 0, ended.stderr
    stage, jobs = last_statistics(ended.stdout)["server1"]
    assert stage == "both"
    assert jobs >= 2


def test_ctrl_c_ends_with_the_statistics() -> None:
    with started(sys.executable, "-u", TWO_STAGE) as process:
        read_until(process, lambda line: line.startswith("server3"))
        code, output, errors = stop(process, signal.SIGINT)
    assert code == 130
    assert set(last_statistics(output)) == {"server1", "server2", "server3"}
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"TWO_STAGE_RUNTIME_MS": "long"}, "TWO_STAGE_RUNTIME_MS"),
        ({"TWO_STAGE_CONCURRENCY": "0"}, "at least 1"),
        ({"TWO_STAGE_MIN_DELAY_MS": "9", "TWO_STAGE_MAX_DELAY_MS": "3"}, "TWO_STAGE_MAX_DELAY_MS (3)"),
        ({"TWO_STAGE_SEED_STRATEGY": "lucky"}, "random, auto or fixed"),
        ({"TWO_STAGE_HOSTS": "127.0.0.1:9"}, "no server of TWO_STAGE_HOSTS answers"),
    ],
)
def test_a_wrong_setting_is_told_by_its_name(settings: dict[str, str], why: str) -> None:
    ended = run_program(sys.executable, TWO_STAGE, env=settings)
    assert ended.returncode == 1
    assert why in ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_stages_at_a_hub_and_a_picture_of_ones_own(tmp_path: Path) -> None:
    data = {"COMFYFLEET_DATA": str(tmp_path / "data")}
    with started(*CLI, "up", "--fake", "2", "--open", "--port", "0", env=data) as process:
        where = {"COMFYFLEET_HUB": url_in(online(process))}
        ended = run_program(sys.executable, HUB_STAGES, cwd=tmp_path, env=where)
        assert ended.returncode == 0, ended.stderr
        assert " waits for " in ended.stdout
        (large,) = tmp_path.glob("large*.png")
        assert large.read_bytes().startswith(b"\x89PNG")
        again = run_program(sys.executable, HUB_STAGES, large.name, cwd=tmp_path, env=where)
        assert again.returncode == 0, again.stderr
        missing = run_program(sys.executable, HUB_STAGES, "nowhere.png", cwd=tmp_path, env=where)
        assert missing.returncode == 1 and "cannot read nowhere.png" in missing.stderr
        stop(process, signal.SIGTERM)


def test_the_two_stages_without_a_hub_end_with_one_line(tmp_path: Path) -> None:
    env = {"COMFYFLEET_HUB": "http://127.0.0.1:9"}
    ended = run_program(sys.executable, HUB_STAGES, cwd=tmp_path, env=env)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("cannot reach the hub at http://127.0.0.1:9: connection refused")


def test_the_fastapi_app_submits_streams_progress_and_serves_the_picture(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "COMFYFLEET_OPEN": "true", "XDG_DATA_HOME": ""}
    serve = (
        sys.executable,
        "-m",
        "uvicorn",
        "--app-dir",
        ROOT / "examples",
        "fastapi_app:app",
        "--port",
        "0",
    )
    with started(*CLI, "up", "--fake", "1", "--port", "0", cwd=tmp_path, env=env) as hub:
        env["COMFYFLEET_HUB"] = url_in(online(hub))
        # uvicorn writes its address to standard error, here to the one pipe that is read.
        with started("sh", "-c", f"exec {shlex.join(str(part) for part in serve)} 2>&1", env=env) as app:
            line = read_until(app, lambda line: "running on" in line)[-1]
            url = re.findall(r"http://[\d.]+:\d+", line)[0]
            job_id = ask(f"{url}/pictures?prompt=a+red+boat", {})["id"]
            with urllib.request.urlopen(f"{url}/pictures/{job_id}/progress", timeout=60) as stream:
                events = stream.read().decode()
            with urllib.request.urlopen(f"{url}/pictures/{job_id}", timeout=60) as picture:
                assert picture.read().startswith(b"\x89PNG")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                ask(f"{url}/pictures/nonesuch/progress")
    assert "event: progress" in events
    assert "event: completed" in events.split("\n\n")[-2]
