"""`comfyfleet tenant`, `comfyfleet credits` and receipts: what they print, and with which code they end."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph

from comfyfleet.client.client import FleetClient
from comfyfleet.model.tenant import TenantCaps
from comfyfleet.wire.tenants import TenantBody, TenantView


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with hub_with_a_worker(tmp_path_factory.mktemp("files"), databases=True) as address:
        yield address


@pytest.fixture
def run(
    hub: Address, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    return runner(capfd, monkeypatch, hub, str(tmp_path))


def test_a_tenant_is_set_up_listed_shown_and_changed(run: Run) -> None:
    ended = run(
        "tenant", "create", "acme", "--price", "gpu_second:2:600", "--max-running", "3", "--region", "eu"
    )
    assert ended.output == "acme was created in the database default\n", ended.errors
    assert "key create tenant --tenant acme" in ended.errors
    assert "gpu_second:2:600" in run("tenant", "list").output
    shown = run("tenant", "show", "acme", "--json").json
    assert (shown["caps"]["max_running"], shown["location"]["region"]) == (3, "eu")
    assert shown["credits"]["available"] == 0
    assert run("tenant", "set", "acme", "--price", '{"by": "flat", "credits": 5}').code == 0
    assert "flat:5" in run("tenant", "show", "acme").output
    assert run("tenant", "set", "acme", "--price", "none").output == "acme: price changed\n"
    assert run("tenant", "show", "acme", "--json").json["price"] is None
    assert run("tenant", "suspend", "acme").output == "acme is suspended\n"
    assert run("tenant", "resume", "acme", "--json").json["state"] == "active"


def test_a_bound_that_is_changed_leaves_the_others_and_the_region_as_they_are(run: Run) -> None:
    run("tenant", "create", "bound", "--max-running", "3", "--region", "eu", "--deny-model", "flux*")
    ended = run("tenant", "set", "bound", "--max-nodes", "50", "--compliance", "gdpr")
    assert ended.output == "bound: max_nodes, compliance changed\n", ended.errors
    shown = run("tenant", "show", "bound", "--json").json
    assert (shown["caps"]["max_running"], shown["caps"]["max_nodes"]) == (3, 50)
    assert shown["location"] == {"region": "eu", "compliance": ["gdpr"]}
    assert shown["denied_models"] == ["flux*"]


def test_terms_are_taken_away_one_by_one(run: Run) -> None:
    run(
        "tenant",
        "create",
        "freed",
        "--max-running",
        "3",
        "--max-nodes",
        "9",
        "--region",
        "eu",
        "--model",
        "x",
    )
    clear = ("--clear", "max-running", "--clear", "model", "--clear", "region")
    assert run("tenant", "set", "freed", *clear).code == 0
    shown = run("tenant", "show", "freed", "--json").json
    assert (shown["caps"]["max_running"], shown["caps"]["max_nodes"]) == (None, 9)
    assert (shown["models"], shown["location"]["region"]) == (None, None)
    assert run("tenant", "set", "freed", "--clear", "colour").code == 2


def test_every_term_can_be_taken_away_and_is_then_what_a_new_tenant_has(run: Run) -> None:
    said = [
        ("--name", "Acme Ltd"),
        ("--price", "flat:5"),
        ("--weight", "2"),
        ("--tier", "3"),
        ("--isolation", "strict"),
        ("--region", "eu"),
        ("--compliance", "gdpr"),
        ("--allow-direct",),
        ("--unrunnable-after", "3600"),
        ("--node-class", "Load*"),
        ("--deny-node-class", "Save*"),
        ("--model", "sd*"),
        ("--deny-model", "flux*"),
        *((f"--{cap.replace('_', '-')}", "7") for cap in TenantCaps.__struct_fields__),
    ]
    fresh = run("tenant", "create", "fresh", "--json").json
    run("tenant", "create", "cleared", *(word for option in said for word in option))
    before = run("tenant", "show", "cleared", "--json").json
    terms = TenantBody.__struct_fields__[3:]
    assert all(before[term] != fresh[term] for term in terms), "every term is said"
    clear = [word for option, *_ in said for word in ("--clear", option.removeprefix("--"))]
    ended = run("tenant", "set", "cleared", *clear)
    assert ended.code == 0, ended.errors
    after = run("tenant", "show", "cleared", "--json").json
    assert {term: after[term] for term in terms} == {term: fresh[term] for term in terms}


def test_a_price_is_shown_in_json_as_it_may_be_given_again(run: Run) -> None:
    run("tenant", "create", "again", "--price", "output:2:8")
    price = run("tenant", "show", "again", "--json").json["price"]
    assert price["by"] == "output"
    assert run("tenant", "set", "again", "--price", json.dumps(price)).code == 0


@pytest.mark.parametrize("price", ["flat", "flat:x", "flat:-1", "rent:5", '{"by": "flat"}', "{", "output:1"])
def test_a_price_that_is_none_is_told_with_what_to_write(run: Run, price: str) -> None:
    ended = run("tenant", "create", "nobody", "--price", price)
    assert ended.code == 2 and "flat:5" in ended.errors and "int()" not in ended.errors
    assert "nobody" not in run("tenant", "list").output


def test_the_old_name_of_the_flag_is_accepted_but_not_shown(run: Run) -> None:
    assert run("tenant", "create", "elder", "--pool", "other").output.endswith("in the database other\n")
    for command in ("tenant create", "hub", "up"):
        help_ = run(*command.split(), "--help").output
        assert "--database" in help_ and "--pool" not in help_


def test_what_cannot_be_done_is_told_in_a_line(run: Run) -> None:
    assert run("tenant", "create", "late", "--database", "nowhere").code == 3
    ended = run("tenant", "show", "late")
    assert ended.code == 3 and "there is no tenant 'late'" in ended.errors
    assert run("tenant", "set", "late").code == 2


def test_an_id_that_is_none_and_a_deletion_without_its_id_are_told_in_words(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run("tenant", "create", "A b")
    assert ended.code == 2 and "letters, digits" in ended.errors and "regex" not in ended.errors
    run("tenant", "create", "stays")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for wrong in ((), ("--confirm", "other")):
        ended = run("tenant", "delete", "stays", *wrong)
        assert ended.code == 3 and "nothing was deleted" in ended.errors and "--confirm stays" in ended.errors
    assert run("tenant", "show", "stays").code == 0


def test_an_export_of_nothing_leaves_no_file(run: Run, tmp_path: Path) -> None:
    run("tenant", "create", "quiet")
    for _ in range(2):
        ended = run("credits", "export", "quiet", "--out", tmp_path / "ledger.csv")
        assert ended.code == 0 and "There is nothing after number 0" in ended.errors
        assert not (tmp_path / "ledger.csv").exists()


def test_a_key_for_a_tenant_that_was_not_created_comes_with_a_warning(run: Run) -> None:
    run("tenant", "create", "acme")
    right, wrong = (run("key", "create", "tenant", "--tenant", name) for name in ("acme", "acem"))
    assert right.output.startswith("cfk_") and wrong.output.startswith("cfk_")
    assert right.errors == "" and "tenant 'acem' was not created" in wrong.errors and "acme" in wrong.errors


def test_credits_are_given_confirmed_put_right_and_read(run: Run) -> None:
    run("tenant", "create", "payer")
    for _ in range(2):
        given = run("credits", "grant", "payer", "100", "--id", "p1").output
        # The second call adds nothing, and its balance shows that.
        has = "payer has 100, of which 100 are available"
        assert re.fullmatch(rf"p1: 100 granted at [\d: -]+Z\. {has}\n", given), given
    given = run("credits", "grant", "payer", "50", "--id", "p2", "--pending").output
    assert given.startswith("p2: 50 pending at ") and given.endswith(f"Z. {has}\n")
    run("credits", "grant", "payer", "9", "--id", "p3", "--pending")
    assert run("credits", "confirm", "payer", "p2").output == "p2: 50 granted\n"
    assert run("credits", "void", "payer", "p3").output == "p3: 9 void\n"
    ended = run("credits", "adjust", "payer", "-30", "--note", "a mistake")
    assert ended.output == "payer has 120, of which 120 are available\n", ended.errors
    assert run("credits", "balance", "payer", "--json").json["balance"] == 120
    entries = run("credits", "statement", "payer", "--json").json
    assert [each["balance"] for each in entries] == [100, 50, -30]
    behind = run("credits", "statement", "payer", "--after", entries[0]["number"]).output
    assert "+50" in behind and "-30" in behind and "+100" not in behind
    assert [each["balance_after"] for each in entries] == [100, 150, 120]
    rows = [line.split() for line in behind.splitlines()[1:]]
    assert [(row[4], row[6]) for row in rows] == [("+50", "150"), ("-30", "120")], (
        "a balance after each entry"
    )
    assert "void" in run("credits", "grants", "payer").output
    ended = run("credits", "adjust", "payer", "-200", "--note", "x")
    assert ended.code == 3 and "Take 120 at most" in ended.errors


def test_grants_are_listed_in_the_order_of_time(run: Run) -> None:
    run("tenant", "create", "timely")
    for grant_id in ("zebra", "apple", "mango"):
        run("credits", "grant", "timely", "5", "--id", grant_id)
    listed = run("credits", "grants", "timely", "--json").json
    assert [each["id"] for each in listed] == ["zebra", "apple", "mango"]


def test_an_empty_id_gives_nothing_because_it_would_give_again(run: Run) -> None:
    run("tenant", "create", "unset")
    for words in (("grant", "unset", "5"), ("adjust", "unset", "5", "--note", "x")):
        ended = run("credits", *words, "--id", "")
        assert ended.code == 2 and "omit --id" in ended.errors
    assert run("credits", "balance", "unset", "--json").json["balance"] == 0


def test_a_job_that_costs_nothing_has_a_receipt_that_says_so(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    job_id = run("submit", path).output.strip()
    assert run("job", "receipt", job_id).output == "Jobs of tenant default cost no credits.\n"
    assert run("job", "receipt", job_id, "--json").json["rounds"] == []


def test_reconcile_says_so_where_both_sides_agree(run: Run) -> None:
    for how in (("--dry-run",), ()):
        ended = run("reconcile", *how)
        assert (ended.code, ended.output) == (
            0,
            "The store and tenants' databases agree, and every ledger adds up.\n",
        )
    assert run("reconcile", "--json").json == {"findings": [], "is_mended": True}


def test_a_tenant_moves_and_is_deleted_once_its_name_was_said_again(run: Run) -> None:
    run("tenant", "create", "nomad")
    assert run("tenant", "move", "nomad", "other").output == "nomad is in the database other\n"
    assert run("tenant", "move", "nomad", "other").code == 3
    assert run("tenant", "delete", "nomad", "--confirm", "acme").code == 3
    ended = run("tenant", "delete", "nomad", "--confirm", "nomad")
    assert ended.output == "nomad is deleted\n", ended.errors
    assert run("tenant", "show", "nomad").code == 3


def test_a_deletion_that_waits_says_for_what_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("tenant", "create", "slow")
    asked = FleetClient.tenant
    looks = iter(["the database default", "the pool default", None])

    async def seen(client: FleetClient, tenant_id: str) -> TenantView:
        waits_for = next(looks, None)
        if waits_for is None:
            return await asked(client, tenant_id)
        return msgspec.structs.replace(leaving, waits_for=waits_for)

    leaving = msgspec.json.decode(json.dumps(run("tenant", "show", "slow", "--json").json), type=TenantView)
    monkeypatch.setattr(FleetClient, "tenant", seen)
    ended = run("tenant", "delete", "slow", "--confirm", "slow")
    assert (ended.code, ended.output) == (0, "slow is deleted\n")
    assert ended.errors.count("Waiting for the database default\n") == 1
