"""`comfyfleet up`, `hub` and `worker --hub` as real processes: used, interrupted, started again, reached over TLS."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.acceptance._process import (
    CLI,
    eventually,
    fake_servers,
    picture_workflow,
    read_until,
    run_cli,
    started,
    stop,
    written,
)

from comfyfleet.cli.servers import found_here
from comfyfleet.client.sync import SyncFleetClient
from comfyfleet.testing.fake_comfyui import FakeComfyUI

Process = subprocess.Popen[str]


class Place:
    """A data folder, and whoever works with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env: Mapping[str, str] = {"COMFYFLEET_DATA": str(folder), "REDIS_URL": "", "HUB_PORT": ""}

    def start(self, stack: ExitStack, *arguments: str | Path) -> Process:
        return stack.enter_context(started(*CLI, *arguments, env=self.env))

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run_cli(*arguments, cwd=self.folder, env=self.env)

    def json(self, *arguments: str | Path) -> object:
        ended = self.run(*arguments, "--json")
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "data").mkdir()
    return Place(tmp_path / "data")


def url_in(lines: list[str]) -> str:
    return next(line.split()[-1] for line in lines if line.startswith("The hub answers at"))


def online(process: Process) -> list[str]:
    return read_until(process, lambda line: line.endswith(": online"))


def test_up_runs_a_job_and_after_ctrl_c_and_a_restart_knows_it_and_its_keys(place: Place) -> None:
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with fake_servers("--time-scale", "0.02") as (server,), ExitStack() as stack:
        process = place.start(stack, "up", "--server", server, "--port", "0", "--name", "gpu")
        lines = online(process)
        key = json.loads((place.folder / "hub.json").read_text())["key"]
        ended = place.run("submit", workflow, "--watch", "--out", "pictures", "--set", "6.text=a dog")
        assert ended.returncode == 0, ended.stderr
        assert (place.folder / ended.stdout.strip()).read_bytes().startswith(b"\x89PNG")
        assert "runs on gpu" in ended.stderr
        listed = place.json("jobs")
        assert isinstance(listed, dict) and [job["status"] for job in listed["jobs"]] == ["completed"]
        assert place.run("jobs", "--hub", url_in(lines), "--key", "cfk_0_0").returncode == 3
        code, output, errors = stop(process, signal.SIGINT)
        assert (code, errors.strip()) == (130, "")
        assert "Draining" in output

        again = place.start(stack, "up", "--server", server, "--port", "0", "--name", "gpu")
        lines = online(again)
        assert place.json("jobs") == listed
        assert place.run("key", "list", "--hub", url_in(lines), "--key", key).returncode == 0
        assert stop(again, signal.SIGTERM)[0] == 0


def test_the_admin_key_is_in_a_file_and_not_in_what_is_printed_to_a_log(place: Place) -> None:
    with ExitStack() as stack:
        hub = place.start(stack, "up", "--fake", "1", "--port", "0", "--log-level", "debug")
        lines = online(hub)
        _, output, errors = stop(hub, signal.SIGTERM)
        printed = "\n".join([*lines, output, errors])
        assert "cfk_" not in printed.replace("cfk_…", "") and "token=" not in printed
        file = place.folder / "hub.json"
        assert f"admin key: in {file}, which only you can read" in printed
        assert (file.stat().st_mode & 0o777, json.loads(file.read_text())["key"][:4]) == (0o600, "cfk_")


def test_the_commands_of_this_machine_go_on_when_the_owners_key_is_rotated(place: Place) -> None:
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0")
        url = url_in(read_until(hub, _answers))
        old = json.loads((place.folder / "hub.json").read_text())["key"]
        ended = place.run("key", "rotate", old.split("_")[1])
        assert ended.returncode == 0, ended.stderr
        assert place.run("jobs", "--hub", url, "--key", old).returncode == 3, "the old one is over"
        assert place.run("jobs").returncode == 0
        assert json.loads((place.folder / "hub.json").read_text())["key"] == ended.stdout.strip()
        other = place.run("key", "create", "viewer").stdout.strip()
        assert place.run("key", "rotate", other.split("_")[1]).returncode == 0
        assert json.loads((place.folder / "hub.json").read_text())["key"] == ended.stdout.strip()
        assert stop(hub, signal.SIGTERM)[0] == 0
        again = place.start(stack, "hub", "--port", "0")
        read_until(again, _answers)
        assert place.run("jobs").returncode == 0
        assert json.loads((place.folder / "hub.json").read_text())["key"] == ended.stdout.strip()


def test_a_worker_enrols_is_drained_and_keeps_its_key(place: Place, tmp_path: Path) -> None:
    far = Place(tmp_path / "far")
    far.folder.mkdir()
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with fake_servers("--time-scale", "0.02") as (server,), ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0")
        url = url_in(read_until(hub, lambda line: line.startswith("The hub answers at")))
        token = place.run("key", "invite").stdout.strip()
        options = ("worker", "--hub", url, "--server", server, "--name", "gpu")
        worker = far.start(stack, *options, "--enrol", token)
        assert "gpu: enrolled" in online(worker)
        assert place.run("submit", workflow, "--watch", "--out", "pictures").returncode == 0
        assert place.run("workers", "drain", "gpu").returncode == 0
        output, errors = worker.communicate(timeout=60)
        assert (worker.returncode, errors) == (0, ""), output

        # The token is used up; the key that it got is not.
        again = far.start(stack, *options, "--enrol", token)
        assert "gpu: enrolled" not in online(again)
        code, output, errors = stop(again, signal.SIGTERM)
        assert (code, errors) == (0, "")
        assert "Draining" in output
        assert stop(hub, signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_a_worker_waits_for_its_hub_and_comes_back_to_it(
    place: Place, tmp_path: Path, transport: str
) -> None:
    far = Place(tmp_path)
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0", "--open")
        url = url_in(read_until(hub, lambda line: line.startswith("The hub answers at")))
        options = ("--simulated", "2", "--name", "gpu", "--transport", transport)
        worker = far.start(stack, "worker", "--hub", url, *options)
        online(worker)
        assert place.run("submit", workflow, "--reference", "under-way").returncode == 0
        read_until(worker, lambda line: line.startswith("run "))
        hub.kill()
        hub.wait()
        hub = place.start(stack, "hub", "--port", url.rpartition(":")[2], "--open")
        read_until(hub, lambda line: line.startswith("The hub answers at"))
        ended = place.run("submit", workflow, "--reference", "under-way", "--watch")
        assert ended.returncode == 0, ended.stderr
        listed = place.json("jobs")
        assert isinstance(listed, dict) and [job["status"] for job in listed["jobs"]] == ["completed"]
        assert read_until(worker, lambda line: line.startswith("ran ")), "it was run once, and reported"
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=60)
        assert worker.returncode == 0


def test_ctrl_c_ends_the_watching_and_not_the_job(place: Place) -> None:
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0")
        url = url_in(read_until(hub, _answers))
        named = ("worker", "--hub", url, "--name", "gpu")
        online(place.start(stack, *named, "--simulated", "600", "--grace", "0"))
        watching = place.start(stack, "submit", workflow, "--watch")
        assert watching.stderr is not None
        assert any(line == "runs on gpu\n" for line in watching.stderr)
        code, output, errors = stop(watching, signal.SIGINT)
        assert (code, output) == (130, "")
        listed = place.json("jobs", "--status", "leased")
        assert isinstance(listed, dict)
        (job,) = listed["jobs"]
        assert f"the hub continues with {job['id']}" in errors
        assert (
            f"`comfyfleet job watch {job['id']}`" in errors
            and f"`comfyfleet job cancel {job['id']}`" in errors
        )


def test_who_watches_is_told_of_a_hub_that_goes_away_and_how_to_go_on(place: Place) -> None:
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0")
        url = url_in(read_until(hub, _answers))
        online(place.start(stack, "worker", "--hub", url, "--simulated", "600", "--grace", "0"))
        out = place.folder / "pictures"
        watching = place.start(stack, "submit", workflow, "--count", "3", "--watch", "--out", out)
        assert watching.stderr is not None
        told = iter(watching.stderr.readline, "")
        submitted = [next(told) for _ in range(6)]
        ids = [line.split()[1] for line in submitted if line.startswith("submitted ")]
        assert len(ids) == 3 and sum(" uses the seed " in line for line in submitted) == 3
        assert any("runs on" in line for line in told)
        hub.kill()
        hub.wait()
        assert any(
            line.startswith(f"trying again for up to 60 s: cannot reach the hub at {url}") for line in told
        )
        code, output, errors = stop(watching, signal.SIGINT)
        assert (code, output) == (130, "")
        assert "the hub has stored 3 jobs and continues when it is back" in errors
        assert f"`comfyfleet job watch {' '.join(ids)}`" in errors
        assert not out.exists(), "nothing was saved"


def test_a_hub_over_tls_is_found_and_trusted_on_its_own_machine_alone(place: Place) -> None:
    certificate, key = place.folder / "certificate.pem", place.folder / "key.pem"
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate of this test, is not installed")
    command = (
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=hub.example",
        "-days",
        "1",
    )
    made = subprocess.run(
        [*command, "-keyout", key, "-out", certificate], capture_output=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0", "--certificate", certificate, "--certificate-key", key)
        url = url_in(read_until(hub, lambda line: line.startswith("The hub answers at")))
        assert url.startswith("https://")
        assert place.run("jobs").returncode == 0
        stranger = run_cli(
            "jobs", "--hub", url, cwd=place.folder, env={"COMFYFLEET_DATA": str(place.folder / "x")}
        )
        assert stranger.returncode == 4
        assert f"at {url}: its certificate is not trusted (self-signed certificate)" in stranger.stderr
        worker = place.start(stack, "worker", "--hub", url, "--simulated", "0.1", "--name", "gpu")
        online(worker)
        assert stop(worker, signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--open", "--host", "0.0.0.0"), "the setting 'host' (flag --host) is not valid"),
        (
            ("--certificate", "nothing.pem"),
            "the setting 'certificate' (flag --certificate) is not valid: there is no file nothing.pem",
        ),
        (("--certificate-key", "nothing.pem"), "the setting 'certificate_key'"),
        (("--config", "nothing.toml"), "cannot read the settings in nothing.toml"),
    ],
)
def test_what_must_not_be_is_refused_before_anything_starts(
    place: Place, options: tuple[str, ...], words: str
) -> None:
    for command in ("hub", "up"):
        ended = place.run(command, "--port", "0", *options)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert words in ended.stderr
        assert list(place.folder.iterdir()) == []


def test_old_callers_are_refused_over_the_websocket_where_a_setting_says_so(place: Place) -> None:
    (place.folder / "comfyfleet.toml").write_text('legacy_websocket = "warn"\n')
    settings = ("--config", place.folder / "comfyfleet.toml")
    with ExitStack() as stack:
        warns = place.start(stack, "hub", "--port", "0", "--store", "memory:", "--open", *settings)
        said = asyncio.run(_monitor(url_in(read_until(warns, _answers))))
        assert said["type"] == "monitor_subscribed"
        _, _, errors = stop(warns, signal.SIGTERM)
        assert "still sends 'subscribe_monitor' over the WebSocket" in errors
        place.env = {**place.env, "COMFYFLEET_LEGACY_WEBSOCKET": "off"}
        refuses = place.start(stack, "hub", "--port", "0", "--store", "memory:", "--open", *settings)
        said = asyncio.run(_monitor(url_in(read_until(refuses, _answers))))
        assert (said["type"], said["code"]) == ("error", "not_allowed")
        assert stop(refuses, signal.SIGTERM)[2] == ""


def test_a_hub_that_is_short_of_files_refuses_connections_and_keeps_its_store(place: Place) -> None:
    with ExitStack() as stack:
        limited = ("sh", "-c", 'ulimit -n 192; exec "$0" "$@"', *CLI)
        hub = stack.enter_context(started(*limited, "hub", "--port", "0", "--open", env=place.env))
        url = url_in(read_until(hub, _answers))
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        first = stack.enter_context(closing(http.client.HTTPConnection(*address, timeout=60)))

        def asked(method: str, path: str, body: object = None) -> int:
            first.request(method, path, None if body is None else json.dumps(body))
            response = first.getresponse()
            response.read()
            return response.status

        assert asked("GET", "/health") == 200
        others = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(200)]
        assert others[-1].recv(4096).startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: ")
        assert asked("GET", "/health") == 200, "the store answers"
        assert asked("POST", "/api/jobs", {"payload": {"workflow": picture_workflow()}}) == 201


def _answers(line: str) -> bool:
    return line.startswith("The hub answers at")


async def _monitor(url: str) -> dict[str, object]:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/hub") as socket:
        await socket.send_json({"type": "subscribe_monitor"})
        said: dict[str, object] = await socket.receive_json()
        return said


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="another process's limits are Linux's")
def test_sigterm_with_a_full_disk_ends_in_its_grace_with_a_line_for_what_is_lost(place: Place) -> None:
    workflow = picture_workflow(steps=10_000)
    with ExitStack() as stack:
        hub = place.start(stack, "up", "--fake", "1", "--port", "0", "--grace", "0.1")
        online(hub)
        known = json.loads((place.folder / "hub.json").read_text())
        with SyncFleetClient(known["url"], known["key"]) as client:
            jobs = [client.submit(workflow) for _ in range(6)]
            assert eventually(lambda: client.get(jobs[0].id).status == "leased")
        # From now on no file of that process may have more than one byte.
        resource.prlimit(hub.pid, resource.RLIMIT_FSIZE, (1, 1))
        code, output, errors = stop(hub, signal.SIGTERM)
    assert code == 0, errors
    assert "Traceback" not in output + errors
    lost = [line for line in errors.splitlines() if "could not be reported" in line]
    assert len(lost) == 1 and "the store could not write" in lost[0], errors


def test_a_port_that_is_taken_is_told_and_ends_with_4(place: Place) -> None:
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0", "--store", "memory:")
        url = url_in(read_until(hub, lambda line: line.startswith("The hub answers at")))
        ended = place.run("hub", "--store", "memory:", "--port", url.rpartition(":")[2])
        assert (ended.returncode, ended.stdout) == (4, "")
        assert "choose another port" in ended.stderr
        assert place.run("jobs").returncode == 0, "the hub that runs is still found"


def test_a_second_hub_in_the_same_data_folder_is_told_where_the_first_one_is(place: Place) -> None:
    with ExitStack() as stack:
        hub = place.start(stack, "up", "--fake", "1", "--port", "0")
        lines = read_until(hub, lambda line: line.startswith("The hub answers at"))
        ended = place.run("up", "--fake", "1", "--port", "0")
        assert (ended.returncode, ended.stdout) == (4, "")
        assert f"a hub already runs with the data folder {place.folder}" in ended.stderr
        assert f"it answers at {url_in(lines)} (process {hub.pid})" in ended.stderr
        assert f"`kill {hub.pid}`" in ended.stderr and "--data" in ended.stderr


def test_a_tenants_database_that_cannot_be_opened_is_a_warning_without_its_password(place: Place) -> None:
    with ExitStack() as stack:
        url = "postgresql://me:hidden@127.0.0.1:1/tenants"
        there = f"us=sqlite:///{place.folder}/us.db"
        hub = place.start(stack, "hub", "--port", "0", "--database", f"eu={url}", "--pool", there)
        read_until(hub, lambda line: line.startswith("The hub answers at"))
        assert hub.stderr is not None
        line = next(line for line in hub.stderr if "the tenant database" in line)
        assert "WARNING" in line and "'eu' (postgresql://…@127.0.0.1:1/tenants)" in line
        _, output, errors = stop(hub, signal.SIGTERM)
        assert "hidden" not in line + output + errors and "'us'" not in line + errors


async def test_comfyui_servers_of_this_machine_are_found_and_fake_ones_told_apart() -> None:
    async def stats(_: web.Request) -> web.Response:
        return web.json_response({"system": {"comfyui_version": "0.7.0"}, "devices": []})

    real = web.Application()
    real.router.add_get("/system_stats", stats)
    async with FakeComfyUI() as fake, TestServer(real) as server:
        assert server.port is not None
        port = int(fake.url.rpartition(":")[2])
        found = await found_here([server.port, port, 9])
        assert found.servers == (f"http://127.0.0.1:{server.port}",)
        assert found.fakes == (f"http://127.0.0.1:{port}",)


def test_a_fake_worker_joins_a_hub_that_was_named_and_none_that_it_found(place: Place) -> None:
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0")
        url = url_in(read_until(hub, _answers))
        for options in (("--fake", "1"), ("--simulated", "0")):
            for told in ({}, {"COMFYFLEET_HUB": url}):
                ended = run_cli("worker", *options, cwd=place.folder, env={**place.env, **told})
                assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
                assert f"For this one, add: --hub {url}" in ended.stderr
        assert place.json("workers") == []
        online(place.start(stack, "worker", "--hub", url, "--simulated", "0.1", "--name", "gpu"))
        (worker,) = _listed(place)
        assert (worker["id"], worker["is_fake"]) == ("gpu", True)
        assert "idle (fake)" in place.run("workers").stdout


def _listed(place: Place) -> list[dict[str, object]]:
    listed = place.json("workers")
    assert isinstance(listed, list)
    return listed


def test_fake_servers_leave_the_jobs_of_real_ones_alone_after_a_restart_too(place: Place) -> None:
    """A user who had servers, and tries something with fake ones in the same data folder."""
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--port", "0")
        url = url_in(read_until(hub, _answers))
        assert place.run("submit", workflow).returncode == 0
        key = json.loads((place.folder / "hub.json").read_text())["key"]
        offered = {"services": [{"name": "comfyui"}]}
        _post(f"{url}/api/worker/register", key, {"worker_id": "gpu", "capabilities": offered})
        assert stop(hub, signal.SIGTERM)[0] == 0
        again = place.start(stack, "up", "--fake", "1", "--port", "0")
        online(again)
        assert place.run("submit", workflow).returncode == 0
        listed = place.json("jobs")
        assert isinstance(listed, dict) and {job["status"] for job in listed["jobs"]} == {"queued"}
        assert "is a fake" in place.run("job", "explain", listed["jobs"][0]["id"]).stdout
        _, _, errors = stop(again, signal.SIGTERM)
        assert "the fake servers take no jobs, because this fleet has real workers (gpu)" in errors
        assert "workers remove" in errors
        told = place.start(stack, "up", "--fake", "1", "--fake-beside-real", "--port", "0")
        online(told)
        assert place.run("submit", workflow, "--watch", "--out", "pictures").returncode == 0


def test_a_server_that_never_answered_keeps_no_job_from_fake_ones_and_no_warning_says_so(
    place: Place,
) -> None:
    workflow = written(place.folder / "workflow.json", picture_workflow())
    with ExitStack() as stack:
        up = place.start(stack, "up", "--server", "http://127.0.0.1:9", "--port", "0")
        read_until(up, lambda line: ": offline" in line)
        assert stop(up, signal.SIGTERM)[0] == 0
        again = place.start(stack, "up", "--fake", "1", "--port", "0")
        online(again)
        assert place.run("submit", workflow, "--watch", "--out", "pictures").returncode == 0
        assert "take no jobs" not in stop(again, signal.SIGTERM)[2]


def test_a_hub_that_listens_on_all_addresses_says_so_at_its_start_and_in_its_invitations(
    place: Place,
) -> None:
    with ExitStack() as stack:
        hub = place.start(stack, "hub", "--host", "0.0.0.0", "--port", "0")
        first, second = read_until(hub, lambda line: "every other address of this machine" in line)[-2:]
        port = first.rpartition(":")[2]
        assert second.endswith(f"such as http://{socket.gethostname()}:{port}")
        told = place.run("key", "invite").stderr
        assert "The hub listens on 0.0.0.0" in told and "cannot reach" not in told


def _post(url: str, key: str, content: object) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(content).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status in (200, 201)
