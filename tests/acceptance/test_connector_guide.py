"""The last step of docs/connectors.md: a connector from another package runs a job of a hub, in real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from tests._connector_example import PAGE, install_example
from tests.acceptance._process import CLI, ask, eventually, read_until, started


def test_a_worker_runs_jobs_of_a_service_that_another_package_connects(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(install_example(tmp_path / "site")), "COMFYFLEET_DATA": str(tmp_path / "data")}
    (sent,) = re.findall(r"--data '(\{\"service\".*\})'", PAGE.read_text())
    with ExitStack() as stack:
        service = stack.enter_context(
            started(sys.executable, "-u", "-m", "textmill.service", "--port", "0", env=env)
        )
        address = _address_in(read_until(service, lambda line: "http://" in line))
        hub = stack.enter_context(started(*CLI, "hub", "--port", "0", "--open", env=env))
        url = _address_in(read_until(hub, lambda line: "http://" in line))
        command = ("worker", "--hub", url, "--service", f"textmill={address}")
        worker = stack.enter_context(started(*CLI, *command, env=env))
        read_until(worker, lambda line: ": online" in line)

        assert _result(url, json.loads(sent)) == {"text": {"text": ["HELLO FLEET"]}}
        assert _submitted_as_the_guide_says(tmp_path, url, env) == {"text": {"text": ["HELLO FLEET"]}}
        other = {"service": "textmill", "payload": {"style": "mirror", "text": "hello"}}
        assert _result(url, other) == {"text": {"text": ["olleh"]}}

        with pytest.raises(HTTPError) as refused:
            ask(f"{url}/api/jobs", {"service": "textmill", "payload": {"style": "shout"}})
        assert refused.value.code in (400, 422)
        assert "text" in refused.value.read().decode()

        waits = ask(f"{url}/api/jobs", {"service": "textmill", "payload": {"style": "sing", "text": "la"}})
        explained = json.dumps(ask(f"{url}/api/jobs/{waits['id']}/explain"))
        assert "sing" in explained, "the missing style is named"


def _submitted_as_the_guide_says(folder: Path, url: str, env: dict[str, str]) -> Any:
    ((payload, name, command),) = re.findall(
        r"echo '(.*)' > (\S+)\ncomfyfleet (submit --service .*)", PAGE.read_text()
    )
    (folder / name).write_text(payload)
    environment = {**os.environ, **env, "COMFYFLEET_HUB": url}
    ended = subprocess.run(
        [*CLI, *command.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (job,) = json.loads(ended.stdout)
    return job["result"]["outputs"]


def _address_in(lines: list[str]) -> str:
    (found,) = re.findall(r"http://[\w.]+:\d+", lines[-1])[:1]
    return str(found)


def _result(url: str, submission: dict[str, Any]) -> Any:
    job = ask(f"{url}/api/jobs", submission)["id"]
    assert eventually(lambda: ask(f"{url}/api/jobs/{job}")["status"] in ("completed", "failed"))
    return ask(f"{url}/api/jobs/{job}/result")["result"]["outputs"]
