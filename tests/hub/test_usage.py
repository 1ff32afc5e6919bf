"""What was used by whom, and books for accounting, over the API and the command line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import HubRig, hub_in_process

from comfyfleet.model.access import Role
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash
from comfyfleet.model.ledger import RunEntry
from comfyfleet.testing.contract.ledger_driver import ACME, BORG, LedgerDriver


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("default", "other")}
    async with hub_in_process(databases=databases) as rig:
        for tenant, name in ((ACME, "default"), (BORG, "other")):
            made = await rig.post("/api/tenants", {"id": tenant, "database": name})
            assert made.status == 201
            await rig.post(
                f"/api/tenants/{tenant}/grants", {"id": "g", "amount": 1_000, "note": 'a "note",\nof two'}
            )
        yield rig


async def take(rig: HubRig, tenant: TenantId, name: str, worker: str, *ends: float) -> None:
    teller = LedgerDriver(await rig.tenant_services.databases.get(name), f"{tenant}-{worker}")
    for at in ends:
        hold = await teller.submit(5, tenant)
        run = RunEntry(
            hold.hold_id,
            tenant,
            WorkflowHash("h"),
            "comfyui",
            "completed",
            at,
            WorkerId(worker),
            1,
            1_500,
            5,
            2_000_000,
            "hub",
        )
        ending = msgspec.structs.replace(teller.ending(hold, Phase.COMPLETED, 5), run=run)
        await teller.database.end_round(ending)


async def usage(rig: HubRig, query: str, **more: Any) -> list[dict[str, Any]]:
    answer = await rig.get(f"/api/usage?since=0&until=1000000&{query}", **more)
    assert answer.status == 200, answer.content
    found: list[dict[str, Any]] = answer.body["usage"]
    return found


async def test_usage_is_added_up_over_databases_and_by_what_is_asked_for(rig: HubRig) -> None:
    await take(rig, ACME, "default", "gpu-1", 10.0, 86_500.0)
    await take(rig, BORG, "other", "gpu-1", 20.0)
    await take(rig, BORG, "other", "gpu-2", 30.0)
    by_tenant = await usage(rig, "by=tenant")
    assert [
        (each["tenant"], each["rounds"], each["gpu_s"], each["credits"], each["cost"]) for each in by_tenant
    ] == [
        ("acme", 2, 3.0, 10, 4.0),
        ("borg", 2, 3.0, 10, 4.0),
    ]
    by_worker = await usage(rig, "by=worker,day")
    assert [(each["worker_id"], each["day"], each["rounds"], each["tenant"]) for each in by_worker] == [
        ("gpu-1", "1970-01-01", 2, None),
        ("gpu-2", "1970-01-01", 1, None),
        ("gpu-1", "1970-01-02", 1, None),
    ]
    (whole,) = await usage(rig, "by=workflow")
    assert (whole["rounds"], whole["cost"]) == (4, 8.0)
    assert (await usage(rig, "by=workflow&tenant=acme"))[0]["rounds"] == 2
    assert (await rig.get("/api/usage?by=hour")).code == "invalid_request"


async def test_a_tenant_sees_what_it_used_and_not_what_that_cost_the_operator(rig: HubRig) -> None:
    await take(rig, ACME, "default", "gpu-1", 10.0)
    await take(rig, BORG, "other", "gpu-1", 20.0)
    (own,) = await usage(rig, "by=tenant,worker", role=Role.TENANT)
    assert (own["tenant"], own["credits"], own["cost"]) == ("acme", 5, None)
    assert await usage(rig, "tenant=borg", role=Role.TENANT) == []
    export = await rig.get("/api/tenants/acme/export?of=runs&format=jsonl", role=Role.TENANT)
    assert json.loads(export.content)["cost"] is None
    assert (await rig.get("/api/tenants/borg/export", role=Role.TENANT)).code == "not_found"


async def test_two_exports_join_without_gap_or_overlap(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfyfleet.hub.tenants.credits._PAGE", 4)
    await take(rig, ACME, "default", "gpu-1", *range(5))
    first = await rig.get("/api/tenants/acme/export")
    assert first.headers["content-type"].startswith("text/csv")
    lines = list(csv.DictReader(io.StringIO(first.content.decode())))
    assert [int(line["number"]) for line in lines] == list(range(1, 12))
    assert (lines[0]["kind"], lines[0]["balance"], lines[0]["note"]) == ("grant", "1000", 'a "note", of two')
    balance = 0
    for line in lines:
        balance += int(line["balance"])
        assert int(line["balance_after"]) == balance, "over all pages"
    assert (balance, lines[-1]["held_after"]) == (975, "0")
    await take(rig, ACME, "default", "gpu-2", 9.0)
    second = await rig.get(f"/api/tenants/acme/export?after={lines[-1]['number']}&format=jsonl")
    rest = [json.loads(line) for line in second.content.splitlines()]
    assert [line["number"] for line in rest] == [12, 13]
    assert [(line["balance_after"], line["held_after"]) for line in rest] == [(975, 5), (970, 0)]
    runs = await rig.get("/api/tenants/acme/export?of=runs&format=jsonl")
    assert [json.loads(line)["number"] for line in runs.content.splitlines()] == list(range(1, 7))
    nothing = await rig.get("/api/tenants/acme/export?after=13&format=jsonl")
    assert (nothing.status, nothing.content) == (200, b"")


async def test_a_spreadsheet_carries_out_nothing_that_a_caller_wrote(rig: HubRig) -> None:
    await take(rig, ACME, "default", '=HYPERLINK("http://x")', 1.0)
    for format_, told in (("csv", "'=HYPERLINK"), ("jsonl", "=HYPERLINK")):
        export = await rig.get(f"/api/tenants/acme/export?of=runs&format={format_}")
        text = export.content.decode()
        (line,) = csv.DictReader(io.StringIO(text)) if format_ == "csv" else [json.loads(text)]
        assert line["worker_id"].startswith(told) and line["consumed"] in (5, "5")


# the commands


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with hub_with_a_worker(tmp_path_factory.mktemp("files"), databases=True) as address:
        yield address


@pytest.fixture
def run(
    hub: Address, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    return runner(capfd, monkeypatch, hub, str(tmp_path))


def test_a_book_is_exported_to_a_file_and_gone_on_with(run: Run, tmp_path: Path) -> None:
    run("tenant", "create", "acme")
    for number in range(3):
        run("credits", "grant", "acme", "5", "--id", number, "--note", "7,\n8,")
    out = tmp_path / "book.csv"
    ended = run("credits", "export", "acme", "-o", out)
    assert (ended.code, ended.output) == (0, "") and "--after 3" in ended.errors
    assert len(out.read_text().splitlines()) == 4
    again = run("credits", "export", "acme", "-o", out)
    assert again.code == 2 and "already" in again.errors
    run("credits", "grant", "acme", "6")
    rest = run("credits", "export", "acme", "--after", "3", "--format", "jsonl")
    assert json.loads(rest.output)["balance"] == 6
    assert "nothing after number 4" in run("credits", "export", "acme", "--after", "4").errors
    assert run("credits", "export", "nobody").code == 3


def test_usage_is_shown_as_a_table(run: Run) -> None:
    assert (
        run("usage", "--by", "day", "--by", "worker").output
        == "No created tenant used anything in that time.\n"
    )
    assert run("usage", "--json").json["usage"] == []
