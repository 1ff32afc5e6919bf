"""The command line as a person or a script uses it: real processes, exit codes, one line for an error."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance._process import (
    CLI,
    LIMIT_S,
    ask,
    eventually,
    fake_servers,
    is_listening,
    picture_workflow,
    read_until,
    run_cli,
    run_program,
    started,
    stop,
    written,
)
from tests.sim._client import text_to_image

from comfyfleet.policy.rules import MAX_PRIORITY, MIN_PRIORITY

REFUSED = "connection refused. Is ComfyUI running there, and is the port right?"
"""As `comfyfleet workers` and a pool's log say it."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with fake_servers("--time-scale", "0.05") as urls:
        yield urls[0]


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    return written(tmp_path / "workflow.json", picture_workflow())


def only_line(errors: str) -> str:
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    assert lines[0].startswith("Error: ")
    return lines[0]


# the group


def test_the_help_lists_every_command_and_the_version_is_told() -> None:
    shown = run_cli("--help")
    assert shown.returncode == 0
    for command in ("demo", "fake-comfyui", "hash", "run"):
        assert f"\n  {command} " in shown.stdout
    assert run_cli("--version").stdout.startswith("comfyfleet ")


def test_starting_imports_nothing_heavy() -> None:
    listing = "[group.get_command(None, name) for name in group.list_commands(None)]"
    code = f"import sys; from comfyfleet.cli.main import comfyfleet as group; {listing}; print(*sys.modules)"
    imported = set(run_program(sys.executable, "-c", code).stdout.split())
    assert "comfyfleet.cli.demo" in imported
    assert not imported & {"aiohttp", "asyncio", "msgspec", "rich"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["hash"],
        ["hash", "missing.json"],
        ["fake-comfyui", "--port", "many"],
        ["demo", "--loud"],
    ],
)
def test_a_wrong_command_line_is_told_and_ends_with_2(arguments: list[str], tmp_path: Path) -> None:
    ended = run_cli(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert "Error: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_only_debug_shows_a_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "Traceback" not in run_cli("hash", broken).stderr
    assert "Traceback" in run_cli("--debug", "hash", broken).stderr


# hash


def test_workflows_that_differ_in_their_prompt_share_the_structural_hash_only() -> None:
    found = [
        json.loads(run_cli("hash", "--json", "-", given=json.dumps(picture_workflow(text))).stdout)
        for text in ("a cat", "a dog")
    ]
    assert found[0]["workflow_hash"] == found[1]["workflow_hash"]
    assert found[0]["exact_hash"] != found[1]["exact_hash"]


def test_hash_tells_what_a_workflow_needs(tmp_path: Path) -> None:
    graph = picture_workflow()
    graph["10"] = {"class_type": "LoadImage", "inputs": {"image": "photo.png"}}
    path = written(tmp_path / "workflow.json", graph)
    found = json.loads(run_cli("hash", "--json", path).stdout)
    assert found["models"] == ["sd15.safetensors"]
    assert found["input_files"] == ["photo.png"]
    assert found["nodes"] == 7
    assert {"KSampler", "LoadImage"} < set(found["node_classes"])
    for text in (found["workflow_hash"], found["exact_hash"], "sd15.safetensors", "photo.png", "KSampler"):
        assert text in run_cli("hash", path).stdout


@pytest.mark.parametrize(
    ("content", "why"),
    [("{", "not valid JSON"), ("[]", "list"), ('{"nodes": [], "links": []}', "API"), ("{}", "no nodes")],
)
def test_what_is_no_workflow_is_refused_in_one_line(content: str, why: str) -> None:
    ended = run_cli("hash", "-", given=content)
    assert ended.returncode == 3
    assert why in only_line(ended.stderr)


# run


def test_run_downloads_the_outputs_and_overwrites_nothing(
    server: str, workflow: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pictures"
    for _ in range(2):
        ended = run_cli("run", workflow, "--server", server, "--out", out)
        assert ended.returncode == 0, ended.stderr
        assert Path(ended.stdout.strip()).read_bytes().startswith(b"\x89PNG")
        assert "runs on" in ended.stderr
    assert sorted(path.name for path in out.iterdir()) == ["cat_00001_-2.png", "cat_00001_.png"]


def test_a_quiet_run_prints_paths_only_and_takes_its_servers_from_the_environment(
    server: str, workflow: Path, tmp_path: Path
) -> None:
    ended = run_cli("run", workflow, "-q", cwd=tmp_path, env={"COMFYFLEET_SERVERS": server})
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "cat_00001_.png", "")


def test_a_run_of_an_editors_file_tells_everything_as_json(server: str, tmp_path: Path) -> None:
    nodes = [
        {"id": 1, "type": "EmptyImage", "widgets_values": [64, 64, 1, 255]},
        {"id": 2, "type": "SaveImage", "inputs": [{"name": "images", "type": "IMAGE", "link": 1}]},
    ]
    path = written(tmp_path / "editor.json", {"nodes": nodes, "links": [[1, 1, 0, 2, 0, "IMAGE"]]})
    ended = run_cli("run", path, "-s", server, "--json", "--set", "2.filename_prefix=made", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["status"], told["outputs"]) == ("completed", ["made_00001_.png"])
    assert (tmp_path / "made_00001_.png").read_bytes().startswith(b"\x89PNG")


def test_inputs_can_be_set_and_text_stays_text(server: str, workflow: Path, tmp_path: Path) -> None:
    ended = run_cli(
        "run",
        workflow,
        "-s",
        server,
        "--set",
        "6.text=1984",
        "--set",
        "3.steps=7",
        "--set",
        "3.seed=5",
        "-o",
        tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    prompts = [entry["prompt"][2] for entry in ask(f"{server}/history").values()]
    wanted = [prompt for prompt in prompts if "6" in prompt and prompt["6"]["inputs"]["text"] == "1984"]
    assert [(prompt["3"]["inputs"]["steps"], prompt["3"]["inputs"]["seed"]) for prompt in wanted] == [(7, 5)]


def test_an_attached_file_reaches_the_server(server: str, workflow: Path, tmp_path: Path) -> None:
    made = run_cli("run", workflow, "-s", server, "-q", "-o", tmp_path).stdout.strip()
    graph = {
        "10": {"class_type": "LoadImage", "inputs": {"image": "?"}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["10", 0], "filename_prefix": "copy"}},
    }
    path = written(tmp_path / "copy.json", graph)
    ended = run_cli("run", path, "-s", server, "-q", "-o", tmp_path, "--attach", f"10.image={made}")
    assert ended.returncode == 0, ended.stderr
    assert Path(ended.stdout.strip()).name == "copy_00001_.png"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("3.sed=5", "no input 'sed'"),
        ("99.text=x", "no node '99'"),
        ("text", "NODE.INPUT=VALUE"),
    ],
)
def test_a_change_that_meets_nothing_is_a_usage_error(workflow: Path, change: str, why: str) -> None:
    ended = run_cli("run", workflow, "-s", "127.0.0.1:9", "--set", change)
    assert ended.returncode == 2
    assert why in ended.stderr


def test_an_address_that_cannot_be_one_is_a_usage_error(workflow: Path) -> None:
    ended = run_cli("run", workflow, "-s", "ftp://somewhere")
    assert ended.returncode == 2
    assert "ftp" in ended.stderr


def test_a_workflow_that_no_server_can_run_is_refused(server: str, workflow: Path, tmp_path: Path) -> None:
    ended = run_cli("run", workflow, "-s", server, "--set", "4.ckpt_name=nowhere.safetensors", "-o", tmp_path)
    assert ended.returncode == 3
    assert "nowhere.safetensors" in only_line(ended.stderr)


def test_no_server_that_answers_ends_with_4_and_tells_no_password(workflow: Path, tmp_path: Path) -> None:
    ended = run_cli("run", workflow, "-s", "http://me:secret@127.0.0.1:9", "-o", tmp_path)
    assert ended.returncode == 4
    assert "127.0.0.1:9" in only_line(ended.stderr)
    assert "secret" not in ended.stderr


def test_a_failed_job_ends_with_1_and_says_why(workflow: Path, tmp_path: Path) -> None:
    fault = 'fail_nodes=[{"class_type": "KSampler", "times": -1, "message": "no luck"}]'
    with fake_servers("--time-scale", "0.01", "--fault", fault) as urls:
        ended = run_cli("run", workflow, "-s", urls[0], "--max-attempts", "1", "-o", tmp_path)
    assert ended.returncode == 1
    assert "no luck" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_a_run_that_takes_too_long_fails(tmp_path: Path) -> None:
    path = written(tmp_path / "slow.json", picture_workflow(steps=10_000))
    with fake_servers() as urls:
        ended = run_cli("run", path, "-s", urls[0], "--timeout", "0.5", "-o", tmp_path)
    assert ended.returncode == 1
    assert "total_timeout" in ended.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_takes_the_job_back(number: int, code: int, tmp_path: Path) -> None:
    path = written(tmp_path / "slow.json", picture_workflow(steps=10_000))
    with (
        fake_servers() as urls,
        started(*CLI, "run", path, "-s", urls[0], "-o", tmp_path) as process,
    ):
        assert eventually(lambda: bool(ask(f"{urls[0]}/queue")["queue_running"]))
        ended, output, errors = stop(process, number)
        assert (ended, output) == (code, "")
        assert "Traceback" not in errors
        assert "retrying" not in errors
        assert "Cancelling the job …" in errors
        assert "Warning" not in errors
        assert eventually(lambda: not ask(f"{urls[0]}/queue")["queue_running"])


@contextlib.contextmanager
def blocked_run(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run on a server whose node blocks: it hears of an interrupt only at its end, whenever that comes."""
    blocking = {
        "1": {"class_type": "LabBlock", "inputs": {"seconds": 60, "seed": 1}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "late"}},
    }
    path = written(folder / "blocking.json", blocking)
    with (
        fake_servers() as urls,
        started(*CLI, "run", path, *options, "-s", urls[0], "-o", folder) as process,
    ):
        assert eventually(lambda: "LabBlock" in ask(f"{urls[0]}/fake/stats")["nodes_by_class"])
        yield process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_that_its_server_does_not_confirm_warns(
    number: int, code: int, tmp_path: Path
) -> None:
    with blocked_run(tmp_path, "-q") as process:
        ended, _, errors = stop(process, number)
    assert ended == code
    line = only_line(errors.replace("Warning: ", "Error: "))
    assert line.endswith("did not confirm that it stopped the job, which may still run there.")


def test_a_second_ctrl_c_leaves_at_once_and_says_what_may_still_run(tmp_path: Path) -> None:
    with blocked_run(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("Ctrl-C again exits at once" in line for line in process.stderr)
        ended, _, errors = stop(process, signal.SIGINT)
    assert ended == 130
    assert "did not wait until" in only_line(errors.replace("Warning: ", "Error: "))


def test_a_workflow_that_the_server_finds_invalid_ends_with_3(
    server: str, workflow: Path, tmp_path: Path
) -> None:
    ended = run_cli("run", workflow, "-s", server, "--set", "3.sampler_name=nothing", "-o", tmp_path)
    assert ended.returncode == 3
    assert "sampler_name" in ended.stderr


def test_a_priority_out_of_its_range_is_a_usage_error(workflow: Path) -> None:
    for priority in (MIN_PRIORITY - 1, MAX_PRIORITY + 1):
        ended = run_cli("run", workflow, "-s", "127.0.0.1:9", f"--priority={priority}")
        assert ended.returncode == 2
        assert "--priority" in ended.stderr


def test_servers_in_the_environment_are_told_apart_by_commas_or_spaces(
    server: str, workflow: Path, tmp_path: Path
) -> None:
    for separator in (",", " ", ", "):
        names = f"127.0.0.1:9{separator}{server}"
        ended = run_cli("run", workflow, cwd=tmp_path, env={"COMFYFLEET_SERVERS": names})
        assert ended.returncode == 0, ended.stderr
        assert (
            f"127.0.0.1:9 is offline and is tried again: comfyui at http://127.0.0.1:9: {REFUSED}"
            in ended.stderr
        )


def test_where_no_server_answers_each_is_told_with_the_cause_that_workers_show(
    workflow: Path, tmp_path: Path
) -> None:
    ended = run_cli("run", workflow, "-s", "127.0.0.1:9", "-s", "127.0.0.1:19", "-o", tmp_path)
    assert ended.returncode == 4
    line = only_line(ended.stderr)
    for address in ("127.0.0.1:9", "127.0.0.1:19"):
        assert f"{address} is offline: comfyui at http://{address}: {REFUSED}" in line
    assert line.count("is the port right?") == 2 and line.endswith("right?")


def test_an_address_without_a_port_gets_a_hint_where_nothing_answers(workflow: Path, tmp_path: Path) -> None:
    ended = run_cli("run", workflow, "-s", "nowhere.invalid", "-o", tmp_path)
    assert ended.returncode == 4
    assert "8188" in only_line(ended.stderr)
    assert "8188" not in run_cli("run", workflow, "-s", "127.0.0.1:9", "-o", tmp_path).stderr


@pytest.mark.parametrize("command", ["run", "demo"])
def test_a_folder_that_cannot_be_made_is_told_with_its_option(
    command: str, workflow: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    arguments: list[str | Path] = [workflow, "-s", "127.0.0.1:9"] if command == "run" else []
    ended = run_cli(command, *arguments, "--out", tmp_path / "file" / "folder")
    assert ended.returncode == 2
    assert "--out" in ended.stderr.splitlines()[-1]


# Output that nobody reads


def test_a_hub_whose_output_nobody_reads_any_more_still_finishes_its_jobs(
    workflow: Path, tmp_path: Path
) -> None:
    """As after Ctrl-C in `comfyfleet up | tee log`, which ends tee too."""
    data = tmp_path / "data"
    hub = {"COMFYFLEET_DATA": str(data)}
    with fake_servers() as (fake,):
        ask(f"{fake}/fake/faults", {"hold": "KSampler"})
        with started(*CLI, "up", "--server", fake, "--open", "--port", "0", env=hub) as process:
            url = read_until(process, lambda line: line.endswith(": online"))[0].split()[-1]
            assert run_cli("submit", workflow, env=hub).returncode == 0
            assert eventually(lambda: bool(ask(f"{url}/api/jobs?status=leased")["jobs"]))
            assert process.stdout is not None
            process.stdout.close()
            process.send_signal(signal.SIGINT)
            ask(f"{fake}/fake/faults", {"hold": None})
            _, errors = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, errors.strip()) == (130, "")
    found = json.loads(run_cli("store", "check", f"sqlite:///{data}/fleet.db", "--json").stdout)["holds"]
    assert (found["completed"], found["queued"]) == (1, 0)


# fake-comfyui


def test_several_fakes_listen_until_ctrl_c_and_then_no_more() -> None:
    with started(*CLI, "fake-comfyui", "--port", "0", "--count", "2") as process:
        lines = read_until(process, lambda line: "Ctrl-C" in line)
        urls = [line.split()[0] for line in lines if line.startswith("http://")]
        assert len(set(urls)) == 2
        assert all(ask(f"{url}/system_stats")["devices"] for url in urls)
        assert any(f"curl {urls[0]}/fake/faults" in line for line in lines)
        code, output, errors = stop(process, signal.SIGINT)
    assert (code, output, errors.strip()) == (130, "", "")
    assert not any(map(is_listening, urls))


def test_a_ctrl_c_that_a_shell_has_it_ignore_is_ignored() -> None:
    command = " ".join(shlex.quote(part) for part in (*CLI, "fake-comfyui", "--port", "0"))
    with started("sh", "-c", f"trap '' INT; exec {command}") as process:
        lines = read_until(process, lambda line: "Ctrl-C" in line)
        process.send_signal(signal.SIGINT)
        assert ask(f"{lines[0].split()[0]}/system_stats")["devices"]
        code, _, _ = stop(process, signal.SIGTERM)
    assert code == 0


def test_a_fake_that_is_told_to_stop_ends_well() -> None:
    with started(*CLI, "fake-comfyui", "--port", "0") as process:
        read_until(process, lambda line: "Ctrl-C" in line)
        assert stop(process, signal.SIGTERM) == (0, "", "")


def test_a_fake_is_what_its_options_say() -> None:
    options = ["--version", "0.3.57", "--vram", "8", "--model", "checkpoints/mine/a.safetensors=3.5"]
    options += [
        "--node-class",
        "SaveImage",
        "--node-class",
        "ControlNetLoader",
        "--fault",
        "never_start",
        "--fault",
    ]
    with fake_servers(*options, "slow_paths=[]", "--cache-lru", "9") as urls:
        about = ask(f"{urls[0]}/system_stats")
        assert about["system"]["argv"][-2:] == ["--cache-lru", "9"]
        assert about["system"]["comfyui_version"] == "0.3.57"
        assert about["devices"][0]["vram_total"] == 8 * 1024**3
        assert ask(f"{urls[0]}/models/checkpoints") == ["mine/a.safetensors"]
        assert set(ask(f"{urls[0]}/object_info")) == {"SaveImage", "ControlNetLoader"}
        assert ask(f"{urls[0]}/fake/faults")["never_start"] is True


def test_a_fake_loads_models_as_slowly_as_it_is_told() -> None:
    options = ("--time-scale", "0", "--load-seconds-per-gb", "3", "--model", "checkpoints/a=2")
    with fake_servers(*options) as urls:
        ask(f"{urls[0]}/prompt", {"prompt": text_to_image("a", edge=64, steps=1)})
        assert eventually(lambda: bool(ask(f"{urls[0]}/history")))
        stats = ask(f"{urls[0]}/fake/stats")
    assert (stats["model_loads"], stats["load_seconds"]) == (1, 6.0)


def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_cli("fake-comfyui", "--port", str(port))
    assert ended.returncode == 1
    assert f"port {port}" in only_line(ended.stderr)


@pytest.mark.parametrize(
    "options",
    [
        ["--fault", "no_such_switch=1"],
        ["--fault", "never_start=maybe"],
        ["--fault", "crash"],
        ["--model", "sdxl.safetensors=6"],
        ["--model", "checkpoints/sdxl.safetensors=big"],
        ["--version", "newest"],
        ["--version", "0.1.0"],
        ["--node-class", "NoSuchClass"],
        ["--port", "65535", "--count", "2"],
        ["--cache-lru", "9", "--cache-none"],
        ["--load-seconds-per-gb", "-1"],
    ],
)
def test_a_fake_with_impossible_options_is_a_usage_error(options: list[str]) -> None:
    ended = run_cli("fake-comfyui", *options)
    assert ended.returncode == 2
    assert options[0] in ended.stderr.splitlines()[-1]
