"""What a command says beside its answer: the command for another machine, the hub asked, what is misspelled."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph

from comfyfleet.cli.hub_connection import LocalHub, write_hub
from comfyfleet.cli.keys import _from_elsewhere
from comfyfleet.client.client import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.wire.answers import WorkerBody


@pytest.fixture(scope="module")
def hub() -> Iterator[Address]:
    with hub_with_a_worker() as address:
        yield address


@pytest.fixture
def run(
    hub: Address, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    return runner(capfd, monkeypatch, hub, str(tmp_path))


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    return path


def test_an_invitation_is_the_whole_command_for_the_other_machine(
    run: Run, hub: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = hub.url.rpartition(":")[2]
    ended = run("key", "invite", "--uses", "2", "--prefix", "gpu-")
    token = ended.output.strip()
    assert token.startswith("cfe_")
    words = f"worker --hub http://{socket.gethostname()}:{port} --enrol TOKEN --server http://127.0.0.1:8188"
    assert f"comfyfleet {words} --name gpu-1" in ended.errors
    assert f"answered at {hub.url}" in ended.errors and "--host" in ended.errors, (
        "no other machine reaches it there"
    )
    assert token not in ended.errors, "what goes there is often kept"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    seen = run("key", "invite").output.splitlines()
    assert f"--enrol {seen[0]} --server" in seen[2], "at a terminal it can be copied as it is"
    monkeypatch.undo()
    monkeypatch.setenv("COMFYFLEET_HUB", hub.url)
    monkeypatch.setenv("COMFYFLEET_KEY", hub.keys[Role.ADMIN])
    made = run("key", "invite", "--json").json
    assert f"--enrol {made['token']} " in made["command"] and f":{port} " in made["command"]
    assert _from_elsewhere("https://hub.example:4001") == ("https://hub.example:4001", False)


def test_a_hint_names_the_hub_that_was_asked(
    run: Run, hub: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def nobody(_: FleetClient) -> list[WorkerBody]:
        return []

    monkeypatch.setattr(FleetClient, "workers", nobody)
    assert f"comfyfleet worker --hub {hub.url} --server" in run("workers").output
    write_hub(tmp_path, LocalHub("http://127.0.0.1:4321"))
    assert "is at http://127.0.0.1:4321" in run("jobs", "--hub", "nonsense").errors


def test_a_variable_that_begins_like_ours_and_means_nothing_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMFYFLEET_PROT", "1")
    ended = run("jobs")
    assert ended.code == 0
    assert ended.errors.startswith(
        "Warning: COMFYFLEET_PROT is not a setting; did you mean 'COMFYFLEET_PORT'?\n"
    )
    monkeypatch.setenv("COMFYFLEET_XYZZY", "1")
    assert "COMFYFLEET_XYZZY is not a setting; `comfyfleet config show`" in run("jobs").errors
    assert "Warning" not in run("jobs", "--json").errors, "programs read that"
    for name in ("COMFYFLEET_PROT", "COMFYFLEET_XYZZY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("COMFYFLEET_POOLS", "a=sqlite:///a.db")
    assert "Warning" not in run("jobs").errors, "an old name of a setting"


def test_outputs_are_saved_by_a_pattern(run: Run, workflow: Path, tmp_path: Path) -> None:
    wrong = run("submit", workflow, "--watch", "--out", "out/{jobb}")
    assert (wrong.code, "the fields are {job}" in wrong.errors) == (2, True)
    for command in ("submit", "run", "job watch"):
        assert "{job}_{node}_{index}{ext}" in "".join(run(*command.split(), "--help").output.split())


def test_a_key_that_may_not_do_something_is_told_with_its_place(
    run: Run, hub: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after `export COMFYFLEET_KEY=…` for a program: the next command of the operator uses that key too."""
    monkeypatch.setenv("COMFYFLEET_KEY", hub.keys[Role.TENANT])
    refused = "a key of role 'tenant' may not do this; allowed roles: admin, operator, viewer"
    place = "The key comes from: environment COMFYFLEET_KEY."
    assert run("workers").errors == f"Error: {refused}. {place}\n"
    write_hub(tmp_path, LocalHub(hub.url, hub.keys[Role.ADMIN]))
    ended = run("workers")
    other = f"Without it, commands use the admin key in {tmp_path / 'hub.json'}."
    assert (ended.code, ended.errors) == (3, f"Error: {refused}. {place} {other}\n")
    monkeypatch.delenv("COMFYFLEET_KEY")
    assert run("workers").code == 0


@pytest.mark.parametrize(
    ("command", "kind", "hint"),
    [
        ("job show", "job", "`comfyfleet jobs` lists the jobs."),
        ("workers drain", "worker", "`comfyfleet workers` lists the workers."),
        ("key revoke", "key", "`comfyfleet key list` lists the keys."),
    ],
)
def test_an_unknown_name_is_told_with_the_command_that_lists_them(
    run: Run, command: str, kind: str, hint: str
) -> None:
    ended = run(*command.split(), "nobody")
    assert ended.code == 3 and ended.errors.startswith(f"Error: there is no {kind} 'nobody'")
    assert ended.errors.endswith(f". {hint}\n")


def test_a_folder_for_outputs_needs_somebody_who_waits_for_them(
    run: Run, workflow: Path, tmp_path: Path
) -> None:
    ended = run("submit", workflow, "--out", tmp_path / "out")
    assert ended.code == 2 and "--out needs --watch" in ended.errors
    assert not (tmp_path / "out").exists()


def test_a_data_folder_in_which_no_hub_was_started_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that is named relative to another one, or misspelled."""
    monkeypatch.delenv("COMFYFLEET_HUB")
    monkeypatch.delenv("COMFYFLEET_KEY")
    # Port 3001 may be that of a working hub.
    monkeypatch.setattr("comfyfleet.cli.hub_connection.DEFAULT_URL", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    ended = run("jobs", "--data", "tenants-trail")
    assert ended.code == 4
    assert f"No hub was started with the data folder {tmp_path / 'tenants-trail'}." in ended.errors
    write_hub(tmp_path, LocalHub("http://127.0.0.1:9", "cfk_0_0"))
    assert "No hub was started" not in run("jobs").errors
