"""The commands that ask a hub: what they print, as text and as JSON, and with which code they end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec
import pytest
from tests.cli._hub import Address, Run, hub_with_a_worker, runner
from tests.hub._hub import graph
from tests.hub.test_inputs import edit

from comfyfleet.cli.fleet import rate
from comfyfleet.cli.hub_connection import LocalHub, write_hub
from comfyfleet.cli.jobs import print_jobs
from comfyfleet.client.client import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.model.worker import WorkerStatus
from comfyfleet.wire.answers import JobBody, ResultBody, WorkerBody


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with hub_with_a_worker(tmp_path_factory.mktemp("files")) as address:
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


def waiting(run: Run, workflow: Path, *options: str) -> str:
    """A job that nobody takes while the queue is paused."""
    assert run("queue", "pause").output == "The queue is paused.\n"
    ended = run("submit", workflow, *options)
    assert ended.code == 0, ended.errors
    return ended.output.strip()


def test_a_job_is_submitted_and_watched_to_its_end(run: Run, workflow: Path, tmp_path: Path) -> None:
    ended = run("submit", workflow, "--watch", "--out", tmp_path / "out", "--json", "--metadata", "who=me")
    assert ended.code == 0, ended.errors
    (result,) = ended.json
    assert result["status"] == "completed"
    shown = run("job", "show", result["id"], "--json").json
    assert (shown["metadata"], shown["worker_id"]) == ({"who": "me"}, "gpu")
    text = run("job", "show", result["id"]).output
    assert result["id"] in text and "completed" in text and "idempotency" not in text
    listed = run("jobs", "--metadata", "who=me", "--json").json
    assert [job["id"] for job in listed["jobs"]] == [result["id"]]
    assert run("job", "watch", result["id"]).code == 0
    nobody = run("job", "watch", "nobody's")
    unknown = 'there is no job "nobody\'s" (any more). `comfyfleet jobs` lists the jobs.'
    assert (nobody.code, nobody.errors) == (3, f"Error: {unknown}\n")


def test_files_are_attached_and_a_mistake_is_told_before_anything_is_sent(run: Run, tmp_path: Path) -> None:
    workflow, photo = tmp_path / "edit.json", tmp_path / "photo.png"
    workflow.write_text(json.dumps(edit()))
    photo.write_bytes(b"png")
    ended = run("submit", workflow, "--attach", f"10.image={photo}", "--watch", "--out", tmp_path, "--json")
    assert ended.code == 0, ended.errors
    (brought,) = run("job", "show", ended.json[0]["id"], "--json").json["inputs"]
    assert (brought["node"], brought["input"], brought["size"]) == ("10", "image", 3)
    for wrong, why in (
        (f"9.image={photo}", "no node '9'"),
        ("10.image=nowhere.png", "cannot read nowhere.png"),
        ("image=photo.png", "'image=photo.png' is not NODE.INPUT=FILE, such as 10.image=photo.png"),
    ):
        refused = run("submit", workflow, "--attach", wrong)
        assert refused.code == 2 and why in refused.errors


def test_a_second_stage_takes_what_a_first_one_left(run: Run, workflow: Path, tmp_path: Path) -> None:
    first = waiting(run, workflow, "--reference", "stage/one")
    later = tmp_path / "edit.json"
    later.write_text(json.dumps(edit()))
    for value, output in ((first, None), (f"{first}/9", "9"), ("stage/one/*.png", "*.png")):
        job_id = waiting(run, later, "--take", f"10.image={value}")
        shown = run("job", "show", job_id, "--json").json
        assert shown["after"] == [first] and shown["inputs"][0].get("output") == output
        run("job", "cancel", job_id)
    refused = run("submit", later, "--take", "10.image=nobody")
    assert refused.code == 3 and "there is no job 'nobody' to wait for" in refused.errors
    run("job", "cancel", first)
    run("queue", "resume")


def test_a_waiting_job_is_explained_changed_paused_cancelled_and_retried(run: Run, workflow: Path) -> None:
    job_id = waiting(run, workflow, "--priority", "5")
    try:
        assert run("job", "explain", job_id).output
        assert run("job", "explain", job_id, "--json").json["job_id"] == job_id
        assert run("job", "priority", job_id, "7").output == f"{job_id} has priority 7\n"
        assert run("job", "pause", job_id).output == f"{job_id} paused\n"
        assert run("job", "resume", job_id).output == f"{job_id} queued\n"
        assert job_id in run("jobs", "--status", "queued", "--since", "1").output
        assert run("job", "cancel", job_id).output == f"{job_id} cancelled\n"
        ended = run("job", "watch", job_id)
        assert (ended.code, f"Error: job {job_id} cancelled" in ended.errors) == (1, True)
        assert run("job", "retry", job_id, "--json").json["status"] == "queued"
        assert run("job", "cancel", job_id, "--json").json[0]["status"] == "cancelled"
    finally:
        assert run("queue", "resume").output == "The queue runs.\n"


def test_a_running_job_is_paused_and_retried(run: Run, hub: Address, workflow: Path) -> None:
    def as_worker(call: str, **body: object) -> None:
        request = Request(
            f"{hub.url}/api/worker/{call}",
            json.dumps({"worker_id": "slow", **body}).encode(),
            {"authorization": f"Bearer {hub.keys[Role.WORKER]}"},
        )
        urlopen(request, timeout=60).close()

    as_worker("register", capabilities={"services": ["comfyui"]})
    assert run("workers", "pause", "gpu").code == 0
    try:
        job_id = run("submit", workflow).output.strip()
        as_worker("poll", poll_id="1", wait_s=10)
        assert run("job", "pause", job_id).output == f"{job_id} is being stopped, then pauses\n"
        assert run("job", "retry", job_id).output == f"{job_id} is being stopped, then runs again\n"
        assert run("job", "cancel", job_id, "--reason", "by hand").output == f"{job_id} is being cancelled\n"
        assert "cancelled  by hand" in run("job", "show", job_id).output
        assert "being cancelled" in run("job", "pause", job_id).errors
        as_worker("unregister")
    finally:
        assert run("workers", "resume", "gpu").code == 0
        run("workers", "remove", "slow")


def test_several_jobs_go_at_once(run: Run, workflow: Path) -> None:
    ended = run("submit", workflow, workflow, "--count", "3", "--watch", "--json")
    assert ended.code == 0, ended.errors
    assert len({result["id"] for result in ended.json}) == 6
    listed = [run("jobs", *order, "--json").json["jobs"] for order in ((), ("--order", "newest"))]
    oldest = run("jobs", "--order", "oldest", "--json").json["jobs"]
    for job in (*listed[0], *listed[1], *oldest):
        # The expected end of a run that takes long moves on.
        del job["estimate"]
    newest = listed[0]
    assert newest == listed[1] == oldest[::-1]
    assert {job["id"] for job in newest[:6]} == {result["id"] for result in ended.json}
    again = run("submit", workflow, workflow, "--reference", "mine")
    assert (again.code, "--reference" in again.errors) == (2, True)


def test_a_file_that_cannot_be_had_keeps_no_other_from_being_saved(
    run: Run, workflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_it_is, gone = FleetClient.result, list[str]()

    async def result(client: FleetClient, job_id: str) -> ResultBody:
        ended = await as_it_is(client, job_id)
        left = JobResult(files=(OutputFile("9", "images", f"{job_id}.png"),))
        return msgspec.structs.replace(ended, result=left)

    async def save(_: FleetClient, file: OutputFile, path: Path) -> int:
        if not gone:
            gone.append(file.filename)
            raise Refusal(RefusalCode.NOT_FOUND, "the file is not here")
        return 0

    monkeypatch.setattr(FleetClient, "result", result)
    monkeypatch.setattr(FleetClient, "save", save)
    ended = run("submit", workflow, "--count", "3", "--watch", "--out", tmp_path / "out")
    assert ended.code == 3 and ended.errors.endswith("Error: the file is not here\n")
    assert f"{Path(*gone).stem}: completed, but some outputs" in ended.errors
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert len(saved) == 2 and not saved & set(gone)


def test_the_same_reference_is_the_same_job(run: Run, workflow: Path) -> None:
    first, second = (run("submit", workflow, "--reference", "mine").output for _ in range(2))
    assert first == second != ""


@pytest.mark.parametrize(
    ("content", "options", "code", "words"),
    [
        ('{"nodes": [], "links": []}', (), 3, "Export (API)"),
        ("{", (), 3, "not valid JSON"),
        (json.dumps(graph()), ("--set", "9.text=x"), 2, "no node '9'"),
        (json.dumps(graph()), ("--set", "1.text=x"), 2, "no input 'text'"),
        (json.dumps(graph()), ("--metadata", "x"), 2, "NAME=VALUE"),
        (json.dumps(graph()), ("--priority", "1001"), 2, "--priority"),
        (json.dumps(graph()), ("--key", "cfk_0_0"), 3, "the key is not valid: it is unknown"),
        (json.dumps(graph()), ("--key", "cfk_0_0"), 3, "misspelled. It comes from: flag --key"),
        (json.dumps(graph()), ("--hub", "http://127.0.0.1:9"), 4, "cannot reach the hub"),
        (json.dumps(graph()), ("--hub", "nonsense"), 2, "is not the address of a hub"),
    ],
)
def test_what_cannot_be_submitted_is_told_in_a_line(
    run: Run, workflow: Path, content: str, options: tuple[str, ...], code: int, words: str
) -> None:
    workflow.write_text(content)
    ended = run("submit", workflow, *options)
    assert (ended.code, ended.output) == (code, "")
    assert words in ended.errors
    assert "Traceback" not in ended.errors


def test_of_several_files_the_one_that_cannot_be_read_is_named(
    run: Run, workflow: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{")
    ended = run("submit", workflow, wrong)
    assert (ended.code, ended.output) == (3, "")
    assert f"{wrong}: The workflow is not valid JSON" in ended.errors
    wrong.write_text(json.dumps(edit()))
    ended = run("submit", workflow, wrong, "--set", "10.image=x")
    assert ended.code == 2 and f"{workflow}: the workflow has no node '10'" in ended.errors
    wrong.write_text('{"nodes": [{"id": 1, "type": "X"}], "links": []}')
    ended = run("submit", wrong, "--key", "cfk_0_0")
    assert ended.errors.startswith("Error: the key is not valid"), "that is no fault of the file"


@pytest.mark.parametrize(
    "line", [("submit",), ("run", "--server", "http://127.0.0.1:9"), ("hash",), ("convert",)]
)
@pytest.mark.parametrize(
    ("content", "words"), [("{}", "The workflow has no nodes"), ('{"a": 1}', "The workflow is not valid")]
)
def test_whoever_reads_a_file_that_is_no_workflow_names_it(
    run: Run, workflow: Path, line: tuple[str, ...], content: str, words: str
) -> None:
    workflow.write_text(content)
    ended = run(*line, workflow)
    assert (ended.code, ended.output) == (3, "")
    assert ended.errors.startswith(f"Error: {workflow}: {words}")


def test_a_job_that_has_ended_is_watched_to_a_line_that_says_so(run: Run, workflow: Path) -> None:
    ended = run("submit", workflow, "--watch", "--out", workflow.parent / "out")
    assert ended.code == 0 and "completed" not in ended.errors, "its outputs say so"
    (job,) = run("jobs", "--limit", "1", "--json").json["jobs"]
    ended = run("job", "watch", job["id"])
    assert (ended.code, ended.output) == (0, "")
    assert ended.errors.splitlines()[-1] == "completed"


def test_a_hub_of_this_machine_that_is_not_running_is_told_with_the_way_to_start_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("COMFYFLEET_HUB")
    monkeypatch.delenv("COMFYFLEET_KEY")
    write_hub(tmp_path, LocalHub("http://127.0.0.1:9", "cfk_0_0"))
    ended = run("jobs")
    assert ended.code == 4 and "connection refused" in ended.errors
    assert ended.errors.endswith("`comfyfleet up` starts it; --hub names another.\n")


def test_without_a_key_it_is_said_where_one_is_given(
    run: Run, hub: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMFYFLEET_KEY")
    ended = run("jobs")
    assert ended.code == 3
    made = "`comfyfleet key create` on the hub's machine makes one."
    assert ended.errors == f"Error: {hub.url} needs a key. Set COMFYFLEET_KEY, or use --key. {made}\n"


def test_workers_are_listed_and_told_what_to_do(run: Run) -> None:
    assert [worker["id"] for worker in run("workers", "--json").json] == ["gpu"]
    lists = [run("workers").output, run("workers", "list").output]
    # An age may have grown by a second between the two.
    plain, named = (re.sub(r"\d+ s\b", "AGE", each) for each in lists)
    assert plain == named and "gpu" in plain
    assert run("workers", "show", "gpu").output.startswith("gpu  ")
    assert run("workers", "pause", "gpu").output == "gpu paused\n"
    assert run("workers", "resume", "gpu", "--json").json["status"] in ("idle", "busy")
    assert run("workers", "refresh", "gpu").output in ("gpu idle\n", "gpu busy\n")
    assert run("worker", "refresh", "gpu", "--json").json["id"] == "gpu"
    assert run("workers", "pause", "--all").output == "gpu paused\n"
    assert run("workers", "resume", "--all", "--json").json[0]["id"] == "gpu"
    assert run("workers", "resume", "--all").output == "No worker needs that.\n"
    assert run("workers", "pause").code == run("workers", "pause", "gpu", "--all").code == 2
    assert run("workers", "drain", "nobody").code == 3
    assert run("workers", "--json", "list").code == 2


def test_keys_are_made_listed_rotated_and_revoked(run: Run, hub: Address) -> None:
    made = run("key", "create", "tenant", "--tenant", "acme", "--name", "theirs", "--json").json
    assert run("jobs", "--key", made["key"]).code == 0
    assert run("workers", "--key", made["key"]).code == 3
    rotated = run("key", "rotate", made["id"]).output.strip()
    assert run("jobs", "--key", made["key"]).code == 3
    assert run("jobs", "--key", rotated).code == 0
    assert run("key", "revoke", made["id"]).output == f"{made['id']} revoked\n"
    assert run("jobs", "--key", rotated).code == 3
    listing = run("key", "list").output
    assert "revoked" in listing and "theirs" in listing and made["key"] not in listing
    token = run("key", "invite", "--uses", "2", "--prefix", "gpu-").output.strip()
    assert token.startswith("cfe_")
    listed = run("key", "invites")
    assert "gpu-*" in listed.output and token not in listed.output
    (invited,) = run("key", "invites", "--json").json
    assert (invited["uses_left"], invited["is_good"]) == (2, True)
    assert run("key", "uninvite", invited["id"]).output == f"{invited['id']} revoked\n"
    assert run("key", "uninvite", invited["id"]).code == 3
    assert run("key", "invites").output == "There are no enrolment tokens.\n"
    assert run("key", "create", "tenant").code == 3
    assert hub.keys[Role.ADMIN] not in listing


def test_jobs_that_nobody_can_run_are_listed_by_themselves(run: Run, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text(json.dumps(graph()))
    run("queue", "pause")
    job_id = run("submit", tmp_path / "odd.json").output.strip()
    assert job_id not in run("jobs", "--unrunnable").output
    assert run("jobs", "--unrunnable", "--json").json == {"jobs": [], "cursor": None}
    run("job", "cancel", job_id)
    run("queue", "resume")


def test_files_and_jobs_that_have_ended_are_listed_and_deleted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "edit.json").write_text(json.dumps(edit()))
    (tmp_path / "photo.png").write_bytes(b"a photo")
    run("queue", "pause")
    job_id = run(
        "submit", tmp_path / "edit.json", "--attach", f"10.image={tmp_path}/photo.png"
    ).output.strip()
    (file,) = run("files", "list", "--kind", "input", "--json").json["files"][-1:]
    assert (file["name"], file["size"]) == ("photo.png", 7)
    assert "photo.png" in run("files", "list").output
    refused = run("files", "delete", file["id"])
    assert (refused.code, "cancel it" in refused.errors) == (3, True)
    refused = run("job", "delete", job_id)
    assert (refused.code, "cancel it first" in refused.errors) == (3, True)
    run("job", "cancel", job_id)
    assert run("files", "delete", file["id"]).output == f"{file['id']} deleted\n"
    assert run("job", "delete", job_id).output == f"{job_id} deleted\n"
    assert run("job", "show", job_id).code == 3
    run("queue", "resume")


def test_webhooks_are_added_listed_and_removed(run: Run) -> None:
    made = run("webhook", "add", "https://example.com/hook?token=x", "--event", "queued", "--name", "billing")
    assert made.code == 0
    webhook_id = made.output.strip()
    (listed,) = run("webhook", "list", "--json").json
    assert (listed["id"], listed["url"], listed["events"]) == (
        webhook_id,
        "https://example.com/hook?…",
        ["queued"],
    )
    assert "billing" in run("webhook", "list").output
    assert run("webhook", "secret").output.startswith("whsec_")
    assert run("webhook", "secret", "--every-tenant", "--json").json["tenant"] is None
    changed = run("webhook", "set", webhook_id, "--url", "https://example.com/new", "--event", "late")
    assert changed.output == f"{webhook_id} sends late to https://example.com/new\n"
    assert run("webhook", "set", webhook_id, "--name", "x", "--json").json["events"] == ["late"]
    assert run("webhook", "set", webhook_id).code == 2
    assert run("webhook", "test", "nobody").code == 3
    assert run("webhook", "remove", webhook_id).output == f"{webhook_id} removed\n"
    assert run("webhook", "remove", webhook_id).code == 3
    assert run("webhook", "list").output == "There are no webhooks.\n"
    assert run("webhook", "deliveries", "--status", "given_up").output == "There are no deliveries.\n"
    assert run("webhook", "resend", "x").code == 3
    assert run("webhook", "add", "http://10.0.0.1/").code == 3
    wrong = run("webhook", "add", "https://example.com/", "--event", "progress")
    assert wrong.code == 2 and "'progress' is not one of queued" in wrong.errors


def test_the_dead_letter_is_listed_and_purged(run: Run) -> None:
    assert run("dead", "list", "--json").json["jobs"] == []
    assert run("dead", "purge", "--yes").output == "0 deleted\n"
    assert run("dead", "retry", "nobody").code == 3


def test_an_error_that_is_cut_off_in_a_list_looks_so(capfd: pytest.CaptureFixture[str]) -> None:
    def told(message: str) -> str:
        error = Failure(FailureKind.NODE_ERROR, message)
        print_jobs([JobBody("1", "failed", "comfyui", "default", "h", 0, 0.0, error=error)], "")
        return capfd.readouterr().out.splitlines()[1].partition("node_error: ")[2]

    assert told("a\n  b") == "a b"
    assert told("x" * 60) == "x" * 60
    assert told("x" * 61) == "x" * 59 + "…"


def test_top_looks_once_where_there_is_no_terminal(run: Run, hub: Address) -> None:
    assert "gpu" in run("top").output
    assert run("top", "--json").json["workers"][0]["id"] == "gpu"
    refused = run("top", "--key", hub.keys[Role.TENANT])
    assert refused.code == 3 and "top shows the whole fleet" in refused.errors
    assert "`comfyfleet jobs`" in refused.errors
    assert run("queue", "show", "--json").json["workers"] == 1
    shown = run("queue", "show").output.splitlines()
    assert {"workers        1", "is paused      no"} <= set(shown), (
        "the longest name is that of the payload bytes"
    )
    assert not any("None" in line for line in shown), "what is a tenant's alone is left out"


def test_a_key_in_the_data_folder_that_is_another_hubs_is_told_and_an_open_hub_needs_none(
    run: Run, hub: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COMFYFLEET_HUB", "COMFYFLEET_KEY"):
        monkeypatch.delenv(name)
    file = write_hub(tmp_path, LocalHub(hub.url, "cfk_of_another"))
    refused = run("jobs")
    assert refused.code == 3 and f"the key in {file} is not valid at {hub.url}" in refused.errors
    assert "the key is not valid" in run("jobs", "--key", "cfk_mine").errors, (
        "one that was named is not left out"
    )
    with hub_with_a_worker(is_open=True) as other:
        write_hub(tmp_path, LocalHub(other.url, "cfk_of_another"))
        assert "gpu" in run("workers").output
        assert run("workers", "--key", "cfk_of_another").code == 3


def test_a_rate_is_told_once_there_is_one() -> None:
    def told(completed: int) -> str:
        worker = WorkerBody(
            "gpu", WorkerStatus.IDLE, "self_hosted", (), 1, 0.0, 0.0, (), completed, 0, 1800.0
        )
        return rate(worker)

    assert (told(1), told(4), told(5)) == ("–", "–", "1800")


def test_config_tells_where_a_setting_came_from_and_no_secret(
    run: Run, hub: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run("config", "show", "--json").json
    assert shown["hub"] == {"value": [hub.url], "from": "environment COMFYFLEET_HUB"}
    assert shown["key"] == {"value": "…", "from": "environment COMFYFLEET_KEY"}
    assert shown["port"] == {"value": 3001, "from": "default"}
    assert shown["rules.max_attempts"] == {"value": 3, "from": "default"}
    assert shown["store"]["value"].endswith("/fleet.db") and shown["store"]["from"] == "default"
    given = run("config", "show", "--port", 4000, "--slots", 2, "--json").json
    assert given["port"] == {"value": 4000, "from": "flag --port"}
    assert "3001" in run("config", "show").output
    said = run("config", "show", "--changed").output
    assert "3001" not in said and hub.url in said and hub.keys[Role.ADMIN] not in said
    assert run("config", "check").code == 0
    monkeypatch.setenv("COMFYFLEET_PROT", "1")
    wrong = run("config", "check")
    assert (wrong.code, "did you mean 'COMFYFLEET_PORT'?" in wrong.errors) == (2, True)
    monkeypatch.setenv("COMFYFLEET_PORT", "many")
    assert run("config", "check", "--json").json["holds"] is False


def test_config_check_names_every_mistake(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(
        'prot = 1\nlog_level = "loud"\nrules = 5\nwebhook_allow = ["10.0.0.0/33"]\nassets = "s3://videos"\n'
        "[limits]\nmax_debth = 1\nmax_depth = 0.5\n"
    )
    monkeypatch.setenv("COMFYFLEET_SLOTS", "many")
    monkeypatch.setenv("COMFYFLEET_PROT", "1")
    found = run("config", "check", "--config", file, "--json")
    problems = found.json["problems"]
    named = ("'prot'", "log_level", "'rules'", "webhook_allow", "max_debth", "max_depth'", "'slots'", "PROT ")
    for name in (*named, "s3.endpoint", "s3.access_key", "s3.secret_key"):
        assert any(name in problem for problem in problems), name
    assert (found.code, len(problems)) == (2, 11)
    assert run("config", "show", "--config", file).errors.count("\n") == 1, (
        "whoever only starts sees the first"
    )


def test_shells_learn_the_commands(run: Run) -> None:
    for shell in ("zsh", "fish"):
        assert "_COMFYFLEET_COMPLETE" in run("completion", shell).output


def test_a_workflow_of_the_editor_that_no_worker_can_tell_of_is_refused_with_the_way_out(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "editor.json"
    path.write_text(json.dumps({"nodes": [{"id": 1, "type": "SaveImage"}], "links": []}))
    for command in ("submit", "convert"):
        ended = run(command, path)
        assert (ended.code, ended.output) == (3, "")
        assert "Export (API)" in ended.errors


def test_a_graph_is_converted_to_itself(run: Run, workflow: Path) -> None:
    assert run("convert", workflow).json == graph()
