"""Failures of runs, refused workflows, answers without end, and redirects that lead elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.worker._comfy_cloud import (
    KEY,
    CloudAttempt,
    account,
    again,
    leased,
    picture,
    saved_color,
    slow,
    tuned,
)
from tests.worker._comfyui import eventually, trace

from comfyfleet.model.failure import FailureKind, FileTooLarge, ServiceFailed
from comfyfleet.model.job import Attachment, Timeouts
from comfyfleet.net.url_guard import AllowedHosts
from comfyfleet.testing.fake_comfy_cloud.settings import ScriptedAnswer
from comfyfleet.worker.connectors.comfy_cloud import ComfyCloud, failures
from comfyfleet.worker.connectors.comfy_cloud.api import CloudAnswer
from comfyfleet.worker.connectors.comfy_cloud.job_list import marks_in
from comfyfleet.worker.connectors.comfy_cloud.settings import parse_address, read_settings
from comfyfleet.worker.connectors.registry import connect

MEGABYTE = 1 << 20


# runs that fail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": "node_execution_error", "message": "it broke"}, FailureKind.NODE_ERROR),
        ({"code": "node_execution_error", "message": "CUDA out of memory."}, FailureKind.OUT_OF_MEMORY),
        ({"code": "OOMError", "message": "too big"}, FailureKind.OUT_OF_MEMORY),
        ({"code": "ModelDownloadError", "message": "cannot get 'x.safetensors'"}, FailureKind.MISSING_MODEL),
        ({"code": "ImageDownloadError", "message": "cannot get 'x.png'"}, FailureKind.MISSING_INPUT),
        ({"code": "ValidationError", "message": "wrong"}, FailureKind.INVALID_WORKFLOW),
        ({"code": "execution_timeout", "message": "too long"}, FailureKind.TOTAL_TIMEOUT),
        ({}, FailureKind.NODE_ERROR),
        ("nonsense", FailureKind.NODE_ERROR),
    ],
)
async def test_a_failed_run_is_classified_by_its_error(error: Any, kind: FailureKind) -> None:
    async with account() as (fake, connector):
        fake.faults.run_errors = [error]
        failure = await CloudAttempt(connector, leased(picture())).failure()
        assert failure.kind is kind and failure.message
        if kind is FailureKind.MISSING_MODEL:
            assert failure.missing == ("x.safetensors",)


async def test_a_node_that_raises_is_named() -> None:
    graph = {
        "1": {"class_type": "LabFail", "inputs": {"kind": "ValueError", "seed": 1}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    async with account() as (fake, connector):
        failure = await CloudAttempt(connector, leased(graph)).failure()
        assert (failure.kind, failure.node_id, failure.node_type) == (FailureKind.NODE_ERROR, "1", "LabFail")
        assert fake.stats.charged == 1.0, "a run that fails costs too"


def recorded(code: str) -> list[CloudAnswer]:
    """The recorded refusals of the vendor's own proxy with this code."""
    lines = [line for line in trace("24") if line["dir"] == "recv" and line["channel"] == "http"]
    found = [CloudAnswer(line["status"], line["body"]) for line in lines if "body" in line]
    return [answer for answer in found if not answer.is_ok and answer.code == code]


def test_the_recorded_refusals_are_classified() -> None:
    kinds = [getattr(failures.refused_workflow(each), "kind", None) for each in recorded("invalid_workflow")]
    assert kinds == [
        FailureKind.INVALID_WORKFLOW,
        FailureKind.MISSING_NODE,
        FailureKind.INVALID_WORKFLOW,
    ]
    (nodes, missing, _) = [failures.refused_workflow(each) for each in recorded("invalid_workflow")]
    assert nodes is not None and nodes.node_id == "1" and "smaller than min" in nodes.message
    assert missing is not None and missing.missing == ("Nope",)
    (form,) = recorded("workflow_format_ui")
    assert failures.refused_workflow(form) is not None
    (reuse,) = recorded("idempotency_key_reuse")
    assert reuse.status == 422


def test_the_documented_form_of_node_errors_is_understood_too() -> None:
    details = {"node_errors": {"12": [{"field": "model", "reason": "missing_input"}]}}
    body = {"error": {"code": "invalid_workflow", "message": "Not valid", "details": details}}
    failure = failures.refused_workflow(CloudAnswer(422, body))
    assert failure is not None and failure.kind is FailureKind.INVALID_WORKFLOW and failure.node_id == "12"
    assert "missing_input" in failure.message and "model" in failure.message


@pytest.mark.parametrize(
    ("graph", "kind"),
    [
        ({"1": {"class_type": "Nope", "inputs": {}}}, FailureKind.MISSING_NODE),
        (
            {
                "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "no.safetensors"}},
                "2": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["1", 2]}},
                "3": {
                    "class_type": "EmptyLatentImage",
                    "inputs": {"width": 64, "height": 64, "batch_size": 1},
                },
                "4": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}},
            },
            FailureKind.MISSING_MODEL,
        ),
        (
            {"1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1}}},
            FailureKind.INVALID_WORKFLOW,
        ),
    ],
)
async def test_a_refused_workflow_is_classified_and_costs_nothing(
    graph: dict[str, Any], kind: FailureKind
) -> None:
    async with account() as (fake, connector):
        failure = await CloudAttempt(connector, leased(graph)).failure()
        assert failure.kind is kind, failure.message
        assert fake.stats.charged == 0.0 and fake.stats.submissions == 1


async def test_what_is_not_comfy_cloud_gets_no_job_twice() -> None:
    async with account() as (fake, connector):
        fake.faults.answers = [ScriptedAnswer(status=404, body={})]
        failure = await CloudAttempt(connector, leased(picture())).failure()
        assert failure.kind is FailureKind.DEAD_WORKER and "Is the address right" in failure.message
        assert fake.stats.submissions == 1


async def test_a_mask_is_left_to_a_server_of_ones_own() -> None:
    async with account() as (fake, connector):
        mask = Attachment("mask.png", b"x", "1", "color", "mask")
        failure = await CloudAttempt(connector, leased(picture(), attachments=(mask,))).failure()
        assert failure.kind is FailureKind.MISSING_NODE and fake.stats.uploads == 0


# timeouts


async def test_a_job_that_does_not_start_is_cancelled_in_time() -> None:
    async with account() as (fake, connector):
        fake.faults.never_starts = True
        failure = await CloudAttempt(connector, leased(picture(), timeouts=Timeouts(start_s=0.1))).failure()
        assert failure.kind is FailureKind.START_TIMEOUT
        assert [job.status for job in fake.jobs.values()] == ["canceled"] and fake.stats.charged == 0.0


async def test_a_run_without_a_sign_of_life_is_cancelled() -> None:
    async with account() as (fake, connector):
        fake.faults.stalls = True
        failure = await CloudAttempt(connector, leased(picture(), timeouts=Timeouts(stall_s=0.2))).failure()
        assert failure.kind is FailureKind.STALL_TIMEOUT
        assert [job.status for job in fake.jobs.values()] == ["canceled"]


async def test_a_run_that_cannot_be_stopped_is_not_repeated() -> None:
    async with account(tuned(stop_s=0.3)) as (fake, connector):
        fake.faults.stalls = fake.faults.ignores_cancel = True
        failure = await CloudAttempt(connector, leased(picture(), timeouts=Timeouts(stall_s=0.1))).failure()
        assert failure.kind is FailureKind.OUTCOME_UNKNOWN and "could not be stopped" in failure.message


async def test_a_run_that_hits_the_limit_of_the_plan_is_a_total_timeout() -> None:
    async with account(tuned(run_cap_s=0.3), run_cap_s=0.3) as (_, connector):
        failure = await CloudAttempt(connector, leased(slow(400, 0.05))).failure()
        assert failure.kind is FailureKind.TOTAL_TIMEOUT and "the plan limits a run" in failure.message


async def test_a_run_that_somebody_cancels_at_comfy_cloud_was_interrupted() -> None:
    async with account() as (fake, connector):
        attempt = CloudAttempt(connector, leased(slow(400, 0.05)))
        await eventually(lambda: bool(fake.stats.charges))
        fake.cancel_as_other(fake.stats.jobs_made[0])
        failure = await attempt.failure()
        assert failure.kind is FailureKind.INTERRUPTED and "Somebody cancelled" in failure.message


async def test_no_run_outlasts_its_idempotency_key() -> None:
    async with account(tuned(longest_s=0.3)) as (fake, connector):
        failure = await CloudAttempt(connector, leased(slow(400, 0.05))).failure()
        assert failure.kind is FailureKind.TOTAL_TIMEOUT and "longest_s" in failure.message
        assert [job.status for job in fake.jobs.values()] == ["canceled"]


# connections


async def test_a_short_absence_during_a_run_costs_nothing(tmp_path: Path) -> None:
    async with account(tuned(unreachable_s=60.0)) as (fake, connector):
        fake.faults.streams = "missing"
        attempt = CloudAttempt(connector, leased(slow(6, 0.05)))
        await eventually(lambda: bool(fake.stats.charges))
        fake.faults.drop_paths = ["/api/v2/jobs/"]
        await eventually(lambda: [job.status for job in fake.jobs.values()] == ["succeeded"])
        assert not attempt.task.done()
        fake.faults.drop_paths = []
        assert len((await attempt.result()).files) == 1 and fake.stats.charged == 1.0


async def test_a_long_absence_during_a_run_leaves_the_outcome_unknown() -> None:
    async with account(tuned(unreachable_s=0.3)) as (fake, connector):
        attempt = CloudAttempt(connector, leased(slow(400, 0.05)))
        await eventually(lambda: bool(fake.stats.charges))
        fake.faults.streams = "missing"
        fake.faults.drop_paths = ["/api/"]
        failure = await attempt.failure()
        assert failure.kind is FailureKind.OUTCOME_UNKNOWN and fake.stats.jobs_made[0] in failure.message


async def test_a_job_that_comfy_cloud_forgets_is_not_repeated() -> None:
    async with account() as (fake, connector):
        attempt = CloudAttempt(connector, leased(slow(400, 0.05)))
        await eventually(lambda: bool(fake.stats.charges))
        fake.faults.forgets_jobs = True
        failure = await attempt.failure()
        assert "does not know it any more" in failure.message
        assert failure.kind is FailureKind.OUTCOME_UNKNOWN and fake.stats.submissions == 1


async def test_a_rate_limit_on_looks_is_waited_out() -> None:
    async with account() as (fake, connector):
        fake.faults.rate_limited = 5
        assert len((await CloudAttempt(connector, leased(picture())).result()).files) == 1
        assert fake.faults.rate_limited == 0 and fake.stats.charged == 1.0


async def test_a_key_that_is_withdrawn_during_a_run_loses_nothing_when_it_is_given_back() -> None:
    async with account(tuned(unreachable_s=60.0)) as (fake, connector):
        attempt = CloudAttempt(connector, leased(slow(6, 0.05)))
        await eventually(lambda: bool(fake.stats.charges))
        fake.faults.is_key_refused = True
        await eventually(lambda: [job.status for job in fake.jobs.values()] == ["succeeded"])
        fake.faults.is_key_refused = False
        assert len((await attempt.result()).files) == 1 and fake.stats.charged == 1.0


# bounds


@pytest.mark.parametrize("path", ["/api/object_info", "/api/experiment/models", "/api/features"])
@pytest.mark.parametrize("fault", ["endless_paths", "garbage_paths", "drop_paths"])
async def test_an_inventory_that_cannot_be_read_is_a_failure_within_bounds(path: str, fault: str) -> None:
    async with account(tuned(max_answer_bytes=MEGABYTE)) as (fake, connector):
        setattr(fake.faults, fault, [path])
        if (path, fault) == ("/api/experiment/models", "garbage_paths"):
            (service,) = (await connector.inventory()).capabilities.services
            assert service.models, "those that the nodes list"
            return
        with pytest.raises(ServiceFailed):
            await connector.inventory()
        if fault == "endless_paths":
            assert not await connector.check_health()
            assert connector.defect is not None and "more than 1048576 bytes" in connector.defect


@pytest.mark.parametrize("fault", ["endless_paths", "garbage_paths"])
async def test_an_answer_to_a_submission_that_tells_nothing_is_not_followed_by_a_second_job(
    fault: str,
) -> None:
    async with account(tuned(max_answer_bytes=MEGABYTE)) as (fake, connector):
        setattr(fake.faults, fault, ["/api/v2/jobs"])
        failure = await CloudAttempt(connector, leased(picture())).failure()
        assert failure.kind is FailureKind.OUTCOME_UNKNOWN and fake.stats.jobs_made == []


async def test_an_output_above_the_limit_is_not_kept(tmp_path: Path) -> None:
    async with account(tuned(max_file_bytes=10)) as (_, connector):
        (file,) = (await CloudAttempt(connector, leased(picture())).result()).files
        with pytest.raises(FileTooLarge):
            await connector.save(file, tmp_path / "out")
        assert not (tmp_path / "out").exists()


# where downloads lead


@asynccontextmanager
async def stranger() -> AsyncIterator[tuple[str, list[web.Request]]]:
    """A server that nobody allowed."""
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        return web.Response(body=b"secret of the network")

    app = web.Application()
    app.router.add_get("/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://localhost:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "target",
    [
        "{stranger}/x",
        "http://169.254.169.254/latest/meta-data",
        "https://10.0.0.1/x",
        "https://[::1]/x",
        "http://example.com/x",
        "file:///etc/passwd",
        "",
    ],
)
async def test_a_download_is_not_redirected_into_our_network_or_off_tls(target: str, tmp_path: Path) -> None:
    async with account() as (fake, connector), stranger() as (url, asked):
        (file,) = (await CloudAttempt(connector, leased(picture())).result()).files
        fake.faults.redirect_outputs_to = target.format(stranger=url) or "nowhere://"
        with pytest.raises(ServiceFailed) as failed:
            await connector.save(file, tmp_path / "out")
        assert failed.value.failure.kind is FailureKind.OUTCOME_UNKNOWN
        assert "which is not followed" in str(failed.value) and KEY not in str(failed.value)
        assert asked == [] and fake.stats.downloads == 0


async def test_a_file_with_a_foreign_address_is_not_asked_for_with_our_key(tmp_path: Path) -> None:
    async with account() as (_, connector), stranger() as (url, asked):
        (file,) = (await CloudAttempt(connector, leased(picture())).result()).files
        foreign = msgspec.structs.replace(file, url=f"{url}/api/v2/assets/1/content")
        with pytest.raises(ServiceFailed):
            await connector.save(foreign, tmp_path / "out")
        assert asked == []


async def test_a_result_names_assets_and_each_download_asks_for_a_fresh_link(tmp_path: Path) -> None:
    async with account() as (fake, connector):
        (file,) = (await CloudAttempt(connector, leased(picture(0xABCDEF))).result()).files
        # A signed link would be a secret in the result, and soon too old.
        assert file.url is not None and file.url.endswith("/content") and "?" not in file.url
        for count in (1, 2):
            assert await saved_color(connector, file, tmp_path) == 0xABCDEF
            assert fake.stats.downloads == count
        assert fake.stats.keys_at_storage == 0


async def test_outputs_that_are_gone_are_told_and_cost_no_second_run(tmp_path: Path) -> None:
    async with account() as (fake, connector):
        job = leased(picture())
        (file,) = (await CloudAttempt(connector, job).result()).files
        fake.faults.are_outputs_gone = True
        with pytest.raises(ServiceFailed, match="no longer has the output"):
            await connector.save(file, tmp_path / "out")
        await CloudAttempt(connector, again(job, number=2)).result()
        assert fake.stats.charged == 1.0


# settings


@pytest.mark.parametrize(
    ("address", "settings", "words"),
    [
        ("https://cloud.comfy.org", {}, "needs the setting 'key'"),
        ("https://cloud.comfy.org", {"key": "two words"}, "characters that a key does not have"),
        ("https://cloud.comfy.org", {"key": KEY, "slots": 0}, "'slots' is not valid"),
        ("https://cloud.comfy.org", {"key": KEY, "colour": 1}, "no setting 'colour'"),
        ("https://cloud.comfy.org", {"key": KEY, "allow": ["a b"]}, "neither an address"),
        ("http://cloud.comfy.org", {"key": KEY}, "must start with https"),
        ("https://me:secret@cloud.comfy.org", {"key": KEY}, "neither a user nor a query"),
        ("ftp://cloud.comfy.org", {"key": KEY}, "needs https and a host"),
    ],
)
def test_wrong_settings_are_named_and_no_secret_is(
    address: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        connect("comfy_cloud", address, settings)
    assert KEY not in str(raised.value) and "secret" not in str(raised.value)


def test_the_address_has_a_default_and_keeps_its_path() -> None:
    assert parse_address("", AllowedHosts()).base == "https://cloud.comfy.org"
    assert parse_address("cloud.comfy.org/", AllowedHosts()).base == "https://cloud.comfy.org"
    assert isinstance(connect("comfy_cloud", "", {"key": f" {KEY}\n"}), ComfyCloud)
    assert read_settings({"key": f" {KEY}\n"}).key == KEY


def test_marks_are_found_only_where_they_were_put() -> None:
    mark = "0f0e0d0c-0b0a-5908-8706-050403020100"
    node = {"class_type": "SaveImage", "inputs": {"filename_prefix": f"comfyfleet/{mark}/x"}}
    other = {"class_type": "Text", "inputs": {"text": f"comfyfleet/{mark}/x", "filename_prefix": f"a/{mark}"}}
    assert marks_in({"workflow": {"1": node}, "format": "api"}, "comfyfleet") == {mark}
    assert marks_in({"prompt": {"1": {"_meta": {"comfyfleet": mark}}}}, "comfyfleet") == {mark}
    assert marks_in({"1": other}, "comfyfleet") == frozenset()
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    assert marks_in(nested, "comfyfleet") == frozenset()
