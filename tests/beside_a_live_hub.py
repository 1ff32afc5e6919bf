"""`python -m tests.beside_a_live_hub`: runs `make test` as a user who has a hub at work in the same home folder.

An older ComfyFleet runs as `up` on its usual port, with jobs that wait, jobs that are done, and files; port 8188 is
taken, and the machine is busy. The tests must be green, and the hub's jobs, workers, files and `hub.json` as they were.
Takes as long as the tests do on a busy machine. `--paths` runs a part of them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / "examples" / "workflows" / "text_to_image.json"
OLDER = "493782c"
"""A version whose tests joined the hub that they found."""
_DONE, _WAITING = 2, 5


@click.command()
@click.option("--commit", default=OLDER, show_default=True, help="The version that the hub runs.")
@click.option("--paths", default="", help="Only these tests, such as 'tests/acceptance tests/cli'.")
@click.option("--busy", default=16, show_default=True, help="How many processes keep the machine busy.")
@click.option(
    "--checkout",
    default=str(ROOT),
    help="Where `make test` runs; this checkout unless given.",
    type=click.Path(exists=True, file_okay=False),
)
def main(commit: str, paths: str, busy: int, checkout: str) -> None:
    """Runs the tests beside a live hub, and compares the hub before and after."""
    folder = Path(tempfile.mkdtemp(prefix="beside-a-live-hub-"))
    try:
        with ExitStack() as stack:
            hub = stack.enter_context(_hub(commit, folder))
            hub.fill()
            stack.enter_context(_taken(8188))
            before = hub.look()
            click.echo(f"before: {_summary(before)}")
            for _ in range(busy):
                stack.enter_context(_running([sys.executable, "-c", "while True: pass"]))
            began = time.monotonic()
            told = {"COMFYFLEET_HUB": hub.url, "COMFYFLEET_KEY": hub.key}
            command = ["make", "test", f"OPTIONS={paths}"]
            code = subprocess.run(command, cwd=checkout, env=hub.environment | told, check=False).returncode
            click.echo(f"make test ended with {code} after {time.monotonic() - began:.0f} s")
            after = hub.look()
            click.echo(f"after: {_summary(after)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    changed = [name for name in before if before[name] != after[name]]
    for name in changed:
        click.echo(f"{name} before: {before[name]}\n{name} after: {after[name]}", err=True)
    click.echo("the hub is as it was" if not changed else f"the hub was changed: {', '.join(changed)}")
    sys.exit(1 if code or changed else 0)


class _Hub:
    """`up` of the older version, in the home folder that the tests get."""

    def __init__(self, home: Path, source: Path) -> None:
        ours = ("COMFYFLEET_", "XDG_", "HUB_", "REDIS_URL", "PYTHONPATH", "MAKE", "MFLAGS")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "HOME": str(home),
        }
        self.data = home / ".local" / "share" / "comfyfleet"
        self._older = {**self.environment, "PYTHONPATH": str(source)}
        self._home = home

    @property
    def _known(self) -> dict[str, str]:
        known: dict[str, str] = json.loads((self.data / "hub.json").read_text())
        return known

    @property
    def url(self) -> str:
        return self._known["url"]

    @property
    def key(self) -> str:
        return self._known["key"]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "comfyfleet.cli.main", *arguments]

    @contextmanager
    def serving(self) -> Iterator[None]:
        port = "3001" if _is_free(3001) else "0"
        command = self.command("up", "--port", port)
        with _running(command, self._older, self._home):
            _await((self.data / "hub.json").exists, "the hub did not start")
            yield

    def fill(self) -> None:
        with _running(
            self.command("worker", "--hub", self.url, "--fake", "1", "--name", "gpu"), self._older, self._home
        ):
            done = self._submit(_DONE, "--watch", "--out", str(self._home / "pictures"))
        assert done.returncode == 0, done.stderr
        _await(lambda: all(each["status"] == "offline" for each in self._ask("/api/workers")["workers"]))
        waiting = self._submit(_WAITING)
        assert waiting.returncode == 0, waiting.stderr

    def _submit(self, count: int, *options: str) -> subprocess.CompletedProcess[str]:
        command = self.command("submit", str(WORKFLOW), "--count", str(count), *options)
        return subprocess.run(
            command, cwd=self._home, env=self._older, capture_output=True, text=True, check=False
        )

    def look(self) -> dict[str, Any]:
        """What is the user's own."""
        jobs = self._ask("/api/jobs?limit=1000")["jobs"]
        workers = self._ask("/api/workers")["workers"]
        assert len(jobs) >= _DONE + _WAITING
        file = self.data / "hub.json"
        return {
            "jobs": {job["id"]: self._ask(f"/api/jobs/{job['id']}") for job in jobs},
            "workers": {worker["id"]: (worker["status"], worker["completed"]) for worker in workers},
            "files": dict(self._files()),
            "hub.json": (file.read_text(), file.stat().st_mtime_ns),
        }

    def _files(self) -> Iterator[tuple[str, str]]:
        for path in sorted(self.data.rglob("*")):
            # The store is written by the hub itself, as it looks after it.
            if path.is_file() and not path.name.startswith("fleet.db"):
                yield str(path.relative_to(self.data)), hashlib.sha256(path.read_bytes()).hexdigest()

    def _ask(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())


@contextmanager
def _hub(commit: str, folder: Path) -> Iterator[_Hub]:
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as content:
        content.extractall(folder / "older", filter="data")
    (folder / "home").mkdir()
    hub = _Hub(folder / "home", folder / "older" / "src")
    with hub.serving():
        yield hub


@contextmanager
def _running(
    command: list[str], environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, cwd=folder, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _taken(port: int) -> Iterator[None]:
    """Whoever calls there waits for an answer that does not come."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if _is_free(port):
            taken.bind(("127.0.0.1", port))
            taken.listen(64)
        yield


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _await(condition: Any, otherwise: str = "it took too long", within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.2)


def _summary(found: Mapping[str, Any]) -> str:
    phases = sorted(job["status"] for job in found["jobs"].values())
    return f"{len(found['jobs'])} jobs ({', '.join(phases)}), {len(found['files'])} files"


if __name__ == "__main__":
    main()
