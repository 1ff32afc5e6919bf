"""The audit log on the command line: shown, checked entry by entry, and held against a head that was noted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli._hub import Address, Run, hub_with_a_worker, runner

from comfyfleet.client.client import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.wire.keys import AuditPage


@pytest.fixture(scope="module")
def hub() -> Iterator[Address]:
    with hub_with_a_worker() as address:
        yield address


@pytest.fixture
def run(
    hub: Address, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    return runner(capfd, monkeypatch, hub, str(tmp_path))


def test_what_was_done_is_listed_and_the_log_is_whole(run: Run) -> None:
    run("queue", "pause")
    run("queue", "resume")
    listed = run("audit", "list", "--json").json
    assert [entry["action"] for entry in listed[-2:]] == ["pause_queue", "resume_queue"]
    assert len(run("audit", "list", "--limit", 1, "--json").json) == 1
    shown = run("audit", "list")
    assert shown.code == 0 and "pause_queue" in shown.output and "done" in shown.output
    assert run("audit", "list", "--jobs").output.strip() == "No entry matches."
    for flag in ("--since", "--hours"):
        assert len(run("audit", "list", flag, "1", "--json").json) == len(listed)
    found = run("audit", "verify", "--json")
    assert found.code == 0
    head = found.json["operations"]["head"]
    assert head == f"{listed[-1]['number']}:{listed[-1]['hash']}" and not found.json["jobs"]["problems"]
    run("queue", "pause")
    run("queue", "resume")
    again = run("audit", "verify", "--known-head", f"operations={head}")
    assert again.code == 0 and f"{found.json['operations']['entries'] + 2} entries, intact" in again.output


def test_a_head_that_is_not_there_any_more_is_told(run: Run) -> None:
    ended = run("audit", "verify", "--known-head", f"operations=1:{'ab' * 32}")
    assert ended.code == 1 and "does not contain the noted entry 1" in ended.output
    assert "changed the audit log" in ended.errors
    before = run("audit", "verify", "--since", f"operations=1:{'ab' * 32}")
    assert (before.code, before.output) == (1, ended.output), "the flag's old name works"
    assert run("audit", "verify", "--known-head", "operations=1").code == 2
    assert run("audit", "verify", "--known-head", f"other=1:{'ab' * 32}").code == 2


def test_an_entry_that_was_changed_on_its_way_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("queue", "pause")
    run("queue", "resume")
    honest = FleetClient.audit

    async def lies(client: FleetClient, kind: str, **more: object) -> AuditPage:
        page = await honest(client, kind, **more)  # type: ignore[arg-type]
        if page.entries:
            page.entries[0]["key_id"] = "somebody else"
        return page

    monkeypatch.setattr(FleetClient, "audit", lies)
    ended = run("audit", "verify")
    assert ended.code == 1 and "entry 1 of chain" in ended.output and "was changed" in ended.output


def test_only_administrators_see_it(run: Run, hub: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYFLEET_KEY", hub.keys[Role.OPERATOR])
    assert run("audit", "verify").code == 3


def test_a_client_reads_it_page_by_page(run: Run, hub: Address) -> None:
    for word in ("pause", "resume") * 3:
        run("queue", word)

    async def read() -> list[int]:
        async with FleetClient(hub.url, hub.keys[Role.ADMIN]) as client:
            page = await client.audit(limit=1)
            numbers = [entry["number"] for entry in page.entries]
            while page.cursor is not None:
                page = await client.audit(limit=1, cursor=page.cursor)
                numbers += [entry["number"] for entry in page.entries]
            return numbers

    numbers = asyncio.run(read())
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 6
