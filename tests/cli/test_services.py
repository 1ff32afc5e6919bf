"""Other services on the command line: submit, hash, services, up with fakes, run with a connector."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance._process import CLI, read_until, run_cli, started
from tests.hub._hub import running_hub
from tests.hub.test_other_services import Workers, result_of

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.run import change_payload
from comfyfleet.cli.servers import FAKES, fakes
from comfyfleet.cli.services import fields_of
from comfyfleet.cli.settings import read_settings
from comfyfleet.model.payload import OpaqueFormat
from comfyfleet.worker.connectors.registry import names
from comfyfleet.worker.connectors.simulated_payload import SimulatedFormat


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    path = tmp_path / "request.json"
    path.write_text(
        json.dumps({"seconds": 0, "outputs": {"out": {"texts": ["a"]}}, "inputs": {"image": None}})
    )
    return path


async def test_a_payload_is_submitted_changed_and_watched_to_its_end(
    request_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "photo.png").write_bytes(b"a photo")
    async with running_hub(is_open=True, folder=tmp_path / "files") as rig:
        workers = Workers()
        await workers.add(rig)
        options = ("--set", "outputs.out.texts=[1984]", "--attach", f"inputs.image={tmp_path}/photo.png")
        command = (
            "submit",
            "--service",
            "simulated",
            str(request_file),
            *options,
            "--json",
            "--hub",
            rig.url,
        )
        submitted = await asyncio.to_thread(run_cli, *command, env={"COMFYFLEET_DATA": str(tmp_path)})
        assert submitted.returncode == 0, submitted.stderr
        (job,) = json.loads(submitted.stdout)
        outputs = await result_of(rig, job["id"])
        assert outputs["out"] == {"texts": [1984]}
        assert outputs["payload"]["files"] == [["image", sha256(b"a photo").hexdigest()]]
        listed = await asyncio.to_thread(
            run_cli, "services", "--hub", rig.url, env={"COMFYFLEET_DATA": str(tmp_path)}
        )
        assert "simulated  1        seconds, steps, outputs, models, seed" in listed.stdout
        assert max(map(len, listed.stdout.splitlines())) <= 80
        schema = await asyncio.to_thread(
            run_cli, "services", "simulated", "--hub", rig.url, env={"COMFYFLEET_DATA": str(tmp_path)}
        )
        assert json.loads(schema.stdout) == SimulatedFormat().json_schema()
        await workers.close()


def test_a_payload_runs_on_a_service_without_a_hub(request_file: Path, tmp_path: Path) -> None:
    ended = run_cli(
        *("run", str(request_file), "--service", "simulated=0", "--set", "seed=-1", "--json"),
        *("--out", str(tmp_path)),
        env={"COMFYFLEET_DATA": str(tmp_path), "COMFYFLEET_SERVERS": "http://127.0.0.1:9"},
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["status"], told["client_id"]) == ("completed", "simulated-1")
    assert told["seeds"].keys() == {"seed"} and "seed used the seed" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--service", "nothing=x"), "there is no connector for 'nothing'"),
        (("--service", "simulated=soon"), "seconds"),
        (("--service", "simulated=0", "--service", "comfyui=http://a:1"), "a payload is of one service"),
        (("--service", "simulated"), "--store"),
    ],
)
def test_a_service_that_cannot_run_the_payload_is_told(
    arguments: tuple[str, ...], told: str, request_file: Path, tmp_path: Path
) -> None:
    ended = run_cli("run", str(request_file), *arguments, env={"COMFYFLEET_DATA": str(tmp_path)})
    assert ended.returncode == 2 and told in " ".join(ended.stderr.split())


def test_the_hash_of_a_payload_belongs_to_its_service(request_file: Path) -> None:
    payload = json.loads(request_file.read_text())
    shown = json.loads(run_cli("hash", str(request_file), "--service", "simulated", "--json").stdout)
    assert shown["workflow_hash"] == SimulatedFormat().read(payload).workflow_hash
    assert shown["inputs"] == ["inputs.image"]
    other = json.loads(run_cli("hash", str(request_file), "--service", "own", "--json").stdout)
    assert other["workflow_hash"] == OpaqueFormat("own").read(payload).workflow_hash
    assert other["inputs"] is None


def test_a_file_that_is_no_payload_is_told(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("[1]")
    ended = run_cli("hash", str(path), "--service", "simulated")
    assert ended.returncode != 0 and "its top level is not an object" in ended.stderr


@pytest.mark.parametrize(
    ("change", "becomes"),
    [
        ("body.prompt=1984", {"body": {"prompt": "1984", "steps": 20}}),
        ("body.steps=8", {"body": {"prompt": "a cat", "steps": 8}}),
        ("body.seed=-1", {"body": {"prompt": "a cat", "steps": 20, "seed": -1}}),
        ("name=x", {"body": {"prompt": "a cat", "steps": 20}, "name": "x"}),
    ],
)
def test_a_field_of_a_payload_is_changed(change: str, becomes: dict[str, Any]) -> None:
    payload: dict[str, Any] = {"body": {"prompt": "a cat", "steps": 20}}
    change_payload(payload, change)
    assert payload == becomes


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        (None, "any JSON object"),
        ({"type": "object"}, "a JSON object"),
        ({"title": "a graph"}, "a graph"),
        ({"properties": {"b": {}, "a": {}}, "required": ["a"]}, "a (required), b"),
        (
            {"$ref": "#/$defs/P", "$defs": {"P": {"title": "P", "properties": {"a": {}}, "required": ["a"]}}},
            "a (required)",
        ),
        ({"$ref": "#/elsewhere"}, "a JSON object"),
        ({"properties": {str(number): {} for number in range(20)}}, "13 and 6 more"),
    ],
)
def test_the_fields_of_a_payload_fit_on_a_line(schema: dict[str, Any] | None, shown: str) -> None:
    assert fields_of(schema).endswith(shown)


# fakes


def test_every_connector_with_a_fake_has_one_that_can_be_made() -> None:
    assert set(names()) & FAKES.keys() == set(names()) - {"comfyui", "simulated"}


@pytest.mark.parametrize("given", ["x=1", "simulated=1"])
async def test_a_fake_that_does_not_exist_is_refused_by_its_option(given: str, tmp_path: Path) -> None:
    resolved = read_settings({"fake": (given,), "data": str(tmp_path)}, config=os.devnull, environment={})
    async with AsyncExitStack() as stack:
        with pytest.raises(CommandFailed, match=r"there is no fake server of .*; choose one of: comfyui"):
            await fakes(stack, "here", resolved)


def test_fakes_are_counted_by_connector() -> None:
    found = read_settings({"fake": ("a1111=1", "2", "a1111=2", "langflow=0")}, environment={})
    assert found.fakes() == {"a1111": 3, "comfyui": 2}
    assert read_settings(environment={"COMFYFLEET_FAKE": "0"}).values.fake == ()
    with pytest.raises(CommandFailed, match="neither a number below 1000 nor NAME=NUMBER"):
        read_settings({"fake": ("a1111=many",)})


def test_up_works_on_services_and_on_fakes_of_every_connector(request_file: Path, tmp_path: Path) -> None:
    with_fakes = [each for each in names() if each in FAKES]
    options = [part for each in with_fakes for part in ("--fake", f"{each}=1")]
    command = (*CLI, "up", "--port", "0", "--open", "--name", "here", "--service", "simulated=0", *options)
    expected = {"here-simulated", *(f"here-{each}-fake-1" for each in with_fakes)}
    online: set[str] = set()

    def is_complete(line: str) -> bool:
        if line.endswith(": online"):
            online.add(line.removesuffix(": online"))
        return online == expected

    environment = {"COMFYFLEET_DATA": str(tmp_path)}
    with started(*command, env=environment) as process:
        read_until(process, is_complete)
        ended = run_cli("submit", str(request_file), "--service", "simulated", "--watch", env=environment)
        assert ended.returncode == 0, ended.stderr
        shown = run_cli("workers", "--json", env=environment)
        assert {each["id"]: each["is_fake"] for each in json.loads(shown.stdout)} == dict.fromkeys(
            expected, True
        )
        process.terminate()
        process.wait(60)
