"""Encryption as an operator meets it: keys from the settings, told where they will not do, changed while a hub runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.engine._rig import graph

from comfyfleet.cli.bootstrap import run_hub
from comfyfleet.cli.encryption import encrypted_by, keep_keys_fresh, keyring_of, master_keys
from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.main import main
from comfyfleet.cli.settings import ResolvedSettings, read_settings
from comfyfleet.client.client import FleetClient
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId
from comfyfleet.model.job import Submission
from comfyfleet.stores.factory import MASTER_KEYS, open_store

ONE, TWO = "k1=" + "11" * 32, "k2=" + "22" * 32


def resolved(tmp_path: Path, *lines: str, **more: str) -> ResolvedSettings:
    """Settings of a hub whose master keys stand in a file."""
    environment = {f"COMFYFLEET_{name.upper()}": value for name, value in more.items()}
    if lines:
        write_keys(tmp_path, *lines)
        environment["COMFYFLEET_ENCRYPTION_KEY_FILE"] = str(tmp_path / "keys")
    flags = {"data": str(tmp_path / "data"), "port": 0, "open": True}
    return read_settings(flags, config=os.devnull, environment=environment)


def write_keys(tmp_path: Path, *lines: str) -> None:
    (tmp_path / "new").write_text("\n".join(lines))
    (tmp_path / "new").rename(tmp_path / "keys")


def test_keys_come_from_the_environment_or_a_file_and_are_never_shown(tmp_path: Path) -> None:
    both = resolved(
        tmp_path, TWO, encryption_keys=f"{ONE} {TWO.replace('k2', 'k3')}", encryption_current="k2"
    )
    read = master_keys(both)
    assert read is not None
    keys = read()
    assert (set(keys.keys), keys.current) == ({"k1", "k2", "k3"}, "k2")
    shown = {name: value for name, value, _ in both.shown() if name.startswith("encryption")}
    assert shown["encryption.keys"] == "…" and "1111" not in str(shown)
    assert "1111" not in repr(keys)


def test_without_keys_nothing_is_sealed(tmp_path: Path) -> None:
    assert master_keys(resolved(tmp_path)) is None


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        ((), {"encryption_key_file": "/nowhere/keys"}, r"key_file'.*cannot read it: No such file"),
        (("k1=short",), {}, "the key 'k1' is not 32 bytes"),
        ((ONE,), {"encryption_current": "k9"}, "to be 'k9', but the keys are k1"),
        ((), {"encryption_current": "k1"}, "needs 'keys' or 'key_file'"),
        ((), {"encryption_keys": "11" * 32}, "ID=KEY"),
    ],
)
def test_keys_that_will_not_do_are_told_by_name_and_not_repeated(
    tmp_path: Path, lines: tuple[str, ...], more: dict[str, str], said: str
) -> None:
    with pytest.raises(CommandFailed, match=said) as error:
        master_keys(resolved(tmp_path, *lines, **more))
    assert "1111" not in str(error.value) and "short" not in str(error.value)


async def test_a_master_key_is_changed_in_its_file_while_a_hub_serves(tmp_path: Path) -> None:
    settings = resolved(tmp_path, ONE)
    clock = SystemClock()
    plain = open_store(f"sqlite:///{tmp_path}/fleet.db", clock)
    keyring = keyring_of(settings, plain.documents, clock)
    assert keyring is not None
    store = encrypted_by(keyring, plain)
    async with Engine(store, clock=clock) as engine, keep_keys_fresh(keyring, store, 0.02):
        first = (await engine.submit(Submission(graph(text="fox")))).job_id
        write_keys(tmp_path, TWO, ONE)
        async with asyncio.timeout(60):
            while [each.name for each in await store.documents.listing(MASTER_KEYS)] != ["k2"]:
                assert (await engine.get(first)).job.payload.workflow["1"]["inputs"]["text"] == "fox"
                await asyncio.sleep(0.01)
        second = (await engine.submit(Submission(graph(text="owl")))).job_id
    # The old one is not needed any more.
    again = open_store(f"sqlite:///{tmp_path}/fleet.db", clock)
    later = keyring_of(resolved(tmp_path, TWO), again.documents, clock)
    async with Engine(encrypted_by(later, again)) as engine:
        jobs = [(await engine.get(each)).job for each in (first, second)]
        assert [job.payload.workflow["1"]["inputs"]["text"] for job in jobs] == ["fox", "owl"]


@pytest.mark.parametrize(
    ("mode", "is_warned"), [(0o644, True), (0o640, True), (0o600, False), (0o400, False)]
)
async def test_a_file_of_keys_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    settings = resolved(tmp_path, ONE)
    (tmp_path / "keys").chmod(mode)
    async with run_hub(settings):
        assert ("chmod 600" in caplog.text) is is_warned


async def test_a_hub_seals_by_its_settings_and_says_when_its_keys_do_not_fit(tmp_path: Path) -> None:
    async with run_hub(resolved(tmp_path, ONE)) as running_hub:
        job_id = (await running_hub.engine.submit(Submission(graph(text="fox-in-the-snow")))).job_id
    data = tmp_path / "data"
    lies_there = b"".join(path.read_bytes() for path in data.iterdir() if path.name.startswith("fleet.db"))
    assert b"fox-in-the-snow" not in lies_there and str(job_id).encode() in lies_there
    for lines, said in (
        ((), "encrypted, and this process has no key"),
        ((TWO,), "'k1', which is not among the keys"),
        ((TWO.replace("k2", "k1"),), "another key has its id"),
    ):
        with pytest.raises(Refusal, match=said):
            async with run_hub(resolved(tmp_path, *lines)):
                pass
    async with run_hub(resolved(tmp_path, ONE)) as running_hub:
        job = (await running_hub.engine.get(job_id)).job
        assert job.payload.workflow["1"]["inputs"]["text"] == "fox-in-the-snow"


async def test_what_a_tenant_has_in_its_own_database_is_sealed_too(tmp_path: Path) -> None:
    async with (
        run_hub(resolved(tmp_path, ONE)) as running_hub,
        FleetClient(running_hub.url, running_hub.key) as client,
    ):
        await client.create_tenant("acme")
        job_id = (
            await running_hub.engine.submit(
                Submission(graph(text="fox-in-the-snow"), tenant=TenantId("acme"))
            )
        ).job_id
        job = (await running_hub.engine.get(job_id)).job
        assert job.payload.workflow["1"]["inputs"]["text"] == "fox-in-the-snow"
    lies_there = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir() if path.is_file()}
    assert str(job_id).encode() in lies_there["tenants.db"]
    assert not [name for name, content in lies_there.items() if b"fox-in-the-snow" in content]


class Command:
    def __init__(self, capfd: pytest.CaptureFixture[str], data: Path) -> None:
        self._capfd, self._data = capfd, data

    def __call__(self, *arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["encryption", *arguments, "--data", str(self._data)])
        output, errors = self._capfd.readouterr()
        return ended.value.code, output, errors


def test_the_commands_make_show_rotate_and_destroy_keys(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(SystemExit):
        main(["encryption", "new-key", "2026-11"])
    line = capfd.readouterr().out.strip()
    (tmp_path / "comfyfleet.toml").write_text('[encryption]\nkey_file = "keys"\n')
    write_keys(tmp_path, line)
    run = Command(capfd, data)
    code, output, _ = run("status")
    assert code == 0 and "Nothing in this store is encrypted yet" in output

    async def seal_one() -> None:
        async with run_hub(read_settings({"data": str(data), "port": 0, "open": True})) as running_hub:
            await running_hub.engine.submit(Submission(graph()))

    asyncio.run(seal_one())
    code, output, _ = run("status", "--json")
    assert code == 0 and '"2026-11": 1' in output
    write_keys(tmp_path, TWO, line)
    code, output, _ = run("rotate", "--data-keys", "--json")
    assert code == 0 and '"k2": 2' in output and "2026-11" not in output
    code, output, _ = run("shred", DEFAULT_TENANT, "--yes")
    assert code == 0 and output == "2 data keys of tenant 'default' destroyed\n"
    code, _, errors = run("shred", DEFAULT_TENANT, "--yes")
    assert code == 3 and "has no data key here" in errors
    write_keys(tmp_path, "k2=" + "33" * 32)
    code, _, errors = run("status")
    assert code == 3 and "another key has its id" in errors
