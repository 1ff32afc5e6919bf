"""Old records of every kind go by themselves when it was said, whether anybody asks the hub something or not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.settings import read_settings
from comfyfleet.engine.engine import Engine
from comfyfleet.files.local import LocalFileStore
from comfyfleet.files.records import PAGE
from comfyfleet.hub.app import Hub
from comfyfleet.hub.maintenance import HubMaintenance
from comfyfleet.model.access import AuditEntry, Role
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId
from comfyfleet.policy.rules import DAY_S, RULES, Retention, Rules
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock


async def nothing() -> None:
    """Done without a trace."""


async def piece() -> AsyncIterator[bytes]:
    yield b"x"


async def test_files_and_the_audit_log_go_without_anybody_asking_for_something(tmp_path: Path) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    assets = LocalFileStore(tmp_path, store.documents, clock, keep_s=2 * DAY_S)
    # Days pass here, and the engine need not look every second of them.
    async with Engine(store, clock=clock, rules=Rules(sweep_s=1e9, round_s=1e9)) as engine:
        kept = Retention(audit_days=4, audit_jobs_days=2)
        hub = Hub(engine, store.documents, clock, assets=assets, retention=kept)
        entry = AuditEntry(0.0, "k", Role.ADMIN, "pause_queue")
        await hub.audit.operation(entry, nothing, lambda _: None)
        await hub.audit.job_change(entry, nothing, lambda _: "job")
        file = await assets.reserve(TenantId("acme"))
        await assets.receive(file, piece())

        async def there() -> tuple[bool, bool, bool]:
            noted = [
                any(each.entry.action == "pause_queue" for each in (await hub.audit.page(kind, "", 9))[0])
                for kind in ("operations", "jobs")
            ]
            return noted[0], noted[1], await assets.get(file.file_id) is not None

        await clock.advance(1.9 * DAY_S)
        await hub.maintenance.clean_up()
        assert await there() == (True, True, True)
        await clock.advance(0.9 * DAY_S)
        await hub.maintenance.clean_up()
        assert await there() == (True, False, False)
        await clock.advance(2 * DAY_S)
        await hub.maintenance.clean_up()
        assert await there() == (False, False, False)


async def test_more_files_than_a_page_has_go_in_one_look(tmp_path: Path) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    assets = LocalFileStore(tmp_path, store.documents, clock, keep_s=10 * DAY_S)
    old = [await assets.reserve(TenantId("acme")) for _ in range(2 * PAGE + 50)]
    await clock.advance(11 * DAY_S)
    young = await assets.reserve(TenantId("acme"))

    async def left() -> int:
        return len([each for each in old if await assets.get(each.file_id) is not None])

    assert await left() == PAGE + 50, "whoever brings a file waits for one page at most"
    await assets.clean_up()
    assert await left() == 0
    assert await assets.get(young.file_id) is not None


async def test_a_duty_that_fails_keeps_no_other_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def away() -> None:
        raise Fault("the disk is gone")

    async def broken() -> None:
        raise ValueError("a mistake of ours")

    async def fine() -> None:
        done.append("fine")

    maintenance = HubMaintenance({"files": away, "entries": broken, "others": fine}, every_s=0.001)
    await maintenance.clean_up()
    assert done == ["fine"]
    assert "cannot delete old files; will try again: the disk is gone" in caplog.text
    assert "a mistake of ours" in caplog.text
    maintenance.start()
    maintenance.start()
    async with asyncio.timeout(60):
        while len(done) < 3:
            await asyncio.sleep(0.001)
    await maintenance.close()
    await maintenance.close()
    told = len(done)
    await asyncio.sleep(0.01)
    assert len(done) == told


def test_every_time_is_a_setting_of_one_table() -> None:
    environment = {f"COMFYFLEET_RETENTION_{name.upper()}": "3" for name in Retention.__struct_fields__}
    resolved = read_settings(config=os.devnull, environment=environment)
    kept = resolved.retention()
    assert {getattr(kept, name) for name in Retention.__struct_fields__} == {3.0}
    rules = resolved.rules()
    assert {getattr(rules, name) for name in RULES.values()} == {3 * DAY_S}
    assert {name for name in Rules.__struct_fields__ if name.startswith("keep_")} == set(RULES.values())


def test_what_is_said_nowhere_is_the_same_in_both_places() -> None:
    for days, seconds in RULES.items():
        assert getattr(Retention(), days) * DAY_S == getattr(Rules(), seconds)
    assert read_settings(config=os.devnull, environment={}).rules().keep_failed_s == 7 * DAY_S


@pytest.mark.parametrize("name", ["RETENTION_FAILED_DAYS", "RETENTION_AUDIT_DAYS"])
def test_less_than_an_hour_is_refused(name: str) -> None:
    with pytest.raises(CommandFailed, match="is not valid"):
        read_settings(config=os.devnull, environment={f"COMFYFLEET_{name}": "0.01"})


def test_a_rule_that_is_a_time_to_keep_is_told_where_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "comfyfleet.toml"
    file.write_text("[rules]\nkeep_failed_s = 60\n")
    with pytest.raises(CommandFailed, match=r"'rules\.keep_failed_s' .* is not a setting"):
        read_settings(config=file, environment={})
