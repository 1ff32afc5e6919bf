"""Programs of the product as real processes: started, listened to, interrupted, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CLI = (sys.executable, "-m", "comfyfleet.cli.main")
LIMIT_S = 150.0
"""Of waiting, on a machine that is busy with much else; nobody waits longer than it takes."""


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what could change the programs, so that a developer's own settings cannot fail a test."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COMFYFLEET_", "TWO_STAGE_"))
    }
    return {**kept, **(changes or {})}


def run_program(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(env),
        input=given,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def run_cli(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    return run_program(*CLI, *arguments, cwd=cwd, env=env, given=given)


@contextlib.contextmanager
def started(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A program that runs; told to stop at the end should it still do so, and killed if it does not listen."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        # One that is killed cannot remove its temporary files.
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def read_until(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> list[str]:
    """The lines of its output up to the wanted one. A program that ends before fails the test with what it said."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if wanted(lines[-1]):
            return lines
    _, errors = process.communicate(timeout=LIMIT_S)
    raise AssertionError(f"the program ended with {process.returncode} after {lines}: {errors}")


def stop(process: subprocess.Popen[str], signal_number: int) -> tuple[int, str, str]:
    """Its exit code, the rest of its output, and its errors."""
    process.send_signal(signal_number)
    output, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, output, errors


@contextlib.contextmanager
def fake_servers(*options: str) -> Iterator[list[str]]:
    """Addresses of fake servers that run in a process of their own."""
    with started(*CLI, "fake-comfyui", "--port", "0", *options) as process:
        lines = read_until(process, lambda line: "Ctrl-C" in line)
        yield [line.split()[0] for line in lines if line.startswith("http://")]


def ask(url: str, content: Any = None) -> Any:
    """The JSON a server answers to a GET, or to a POST where there is content."""
    data = None if content is None else json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=60) as response:
        return json.loads(response.read())


def is_listening(url: str) -> bool:
    try:
        ask(f"{url}/fake/stats")
    except urllib.error.URLError:
        return False
    return True


def eventually(condition: Callable[[], bool], within_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def picture_workflow(text: str = "a cat", steps: int = 4) -> dict[str, Any]:
    return {
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd15.safetensors"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": text, "clip": ["4", 1]}},
        "3": {
            "class_type": "KSampler",
            "inputs": {
                "seed": -1,
                "steps": steps,
                "cfg": 7.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
                "model": ["4", 0],
                "positive": ["6", 0],
                "negative": ["6", 0],
                "latent_image": ["5", 0],
            },
        },
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "cat"}},
    }


def written(path: Path, workflow: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(workflow))
    return path
