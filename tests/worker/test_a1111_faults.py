"""What goes wrong on an A1111 server and on the way to it, and which failure becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worker._a1111 import (
    LONG,
    QUICK,
    attempt,
    base64_of,
    check_made_from,
    job_of,
    picture,
    ran,
    recorded,
    server_and_connector,
    tuned,
)

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.job import Timeouts
from comfyfleet.worker.connectors.a1111 import A1111
from comfyfleet.worker.connectors.a1111.failures import refused_request, refused_run

RECORDED = {
    "attempt-20": (FailureKind.NODE_ERROR, ()),
    "attempt-21": (FailureKind.OUT_OF_MEMORY, ()),
    "many": (FailureKind.INVALID_WORKFLOW, ()),
    "{nope": (FailureKind.INVALID_WORKFLOW, ()),
    "Nope": (FailureKind.MISSING_NODE, ("sampler/Nope",)),
    "script_name": (FailureKind.MISSING_NODE, ("script/txt2img/nope",)),
    "alwayson_scripts": (FailureKind.MISSING_NODE, ("script/txt2img/nope",)),
    "init_images": (FailureKind.MISSING_INPUT, ()),
    "no_such_option": (FailureKind.MISSING_NODE, ("option/no_such_option",)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_errors_are_classified(name: str) -> None:
    found = []
    for trace in ("03", "04"):
        for route in ("txt2img", "img2img"):
            for sent, answer in recorded(trace, f"POST /sdapi/v1/{route}"):
                if answer["status"] != 200 and name in str(sent.get("body")):
                    body = sent["body"] if isinstance(sent["body"], dict) else {}
                    found.append(refused_run(answer["status"], answer["body"], route, body, 8.0))
    assert found, "nothing was recorded"
    for failure in found:
        assert (failure.kind, failure.missing) == RECORDED[name]
        assert failure.vram_gb == (8.0 if failure.kind is FailureKind.OUT_OF_MEMORY else None)


def test_an_img2img_without_a_picture_as_recorded() -> None:
    (answer,) = (each for _, each in recorded("03", "POST /sdapi/v1/img2img") if each["status"] == 404)
    assert refused_run(404, answer["body"], "img2img", {}).kind is FailureKind.MISSING_INPUT


def test_a_wrong_password_as_recorded_is_the_workers_fault() -> None:
    for _, answer in recorded("06", "GET /sdapi/v1/progress"):
        if answer["status"] == 401:
            failure = refused_request(401, answer["body"], "a run")
            assert failure.kind is FailureKind.DEAD_WORKER and "--api-auth" in failure.message


@pytest.mark.parametrize("flavour", ["a1111", "forge", "forge-classic", "sdnext"])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"prompt": "oom"}, FailureKind.OUT_OF_MEMORY),
        ({"prompt": "raise"}, FailureKind.NODE_ERROR),
        ({"sampler_name": "Nope"}, FailureKind.MISSING_NODE),
        ({"alwayson_scripts": {"nope": {}}}, FailureKind.MISSING_NODE),
        ({"steps": "many"}, FailureKind.INVALID_WORKFLOW),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_every_flavour_tells_the_same_errors(
    flavour: str, body: dict[str, Any], kind: FailureKind
) -> None:
    async with server_and_connector(flavour=flavour) as (_, connector):
        failure = await attempt(connector, job_of(**body)).failure()
        assert failure.kind is kind, failure
        if kind in (FailureKind.OUT_OF_MEMORY, FailureKind.NODE_ERROR):
            assert "out of memory" in failure.message or failure.message == "something inside broke"
        # A failed task stays active; the next run is not held up by it.
        assert (await attempt(connector, job_of()).result()).files


async def test_out_of_memory_tells_how_much_the_card_had() -> None:
    async with server_and_connector(gpu_gb=8.0) as (_, connector):
        failure = await attempt(connector, job_of(prompt="oom")).failure()
        assert (failure.kind, failure.vram_gb) == (FailureKind.OUT_OF_MEMORY, 8.0)


async def test_a_bad_picture_is_the_callers_fault() -> None:
    async with server_and_connector() as (_, connector):
        job = job_of("img2img", init_images=[base64_of(b"not a picture")])
        assert (await attempt(connector, job).failure()).kind is FailureKind.MISSING_INPUT


async def test_an_upscaler_that_is_missing_is_named() -> None:
    async with server_and_connector() as (_, connector):
        job = job_of("extra-single-image", image=base64_of(picture()), upscaler_1="gone")
        failure = await attempt(connector, job).failure()
        assert (failure.kind, failure.missing) == (FailureKind.MISSING_MODEL, ("upscaler/gone",))


async def test_a_wrong_password_is_the_workers_fault_and_nothing_runs() -> None:
    async with server_and_connector(tuned(user="u", password="wrong"), user="u", password="right") as (
        fake,
        connector,
    ):
        failure = await attempt(connector, job_of()).failure()
        assert failure.kind is FailureKind.DEAD_WORKER and fake.runs == []
        assert "wrong" not in failure.message


async def test_a_server_without_its_api_is_no_fault_of_the_job() -> None:
    async with server_and_connector(has_api=False) as (_, connector):
        failure = await attempt(connector, job_of()).failure()
        assert failure.kind is FailureKind.DEAD_WORKER and "--api" in failure.message


async def test_a_server_that_is_not_there_costs_no_attempt() -> None:
    async with server_and_connector() as (fake, connector):
        await fake.crash()
        run = attempt(connector, job_of())
        failure = await run.failure()
        assert type(run.task.exception()).__name__ == "ServiceBusy"
        assert failure.kind is FailureKind.CRASHED and "refused" in failure.message


async def test_a_process_that_dies_in_a_run_is_told() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.crash_at_step = 20
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        failure = await run.failure()
        assert (failure.kind, failure.server_died) == (FailureKind.CRASHED, "process")


async def test_a_server_that_was_restarted_in_a_run_has_lost_it() -> None:
    async with server_and_connector(tuned(refused_s=30.0)) as (fake, connector):
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        await fake.restart()
        failure = await run.failure()
        assert failure.kind is FailureKind.CRASHED and "restarted" in failure.message
        assert (await attempt(connector, job_of()).result()).files


async def test_a_run_whose_connection_is_lost_is_watched_to_its_end_and_never_doubled(tmp_path: Path) -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.lose_answers = 1
        run = attempt(connector, job_of(steps=40))
        failure = await run.failure()
        assert failure.kind is FailureKind.TRANSIENT and "pictures are lost" in failure.message
        assert [each.outcome for each in fake.runs] == ["completed"], "it had ended before that was told"
        assert run.of(ProgressKind.PROGRESS)
        assert (await connector.reconcile(run.job)).state == "failed"
        again = job_of()
        await check_made_from(again, connector, await attempt(connector, again).result(), tmp_path)


@pytest.mark.parametrize("fake_settings", [{"has_web_ui": False}, {"flavour": "sdnext"}])
async def test_the_same_without_task_ids(fake_settings: dict[str, Any]) -> None:
    async with server_and_connector(**fake_settings) as (fake, connector):
        fake.faults.lose_answers = 1
        failure = await attempt(connector, job_of(steps=40)).failure()
        assert failure.kind is FailureKind.TRANSIENT
        assert [each.outcome for each in fake.runs] == ["completed"]


async def test_a_lost_run_that_fails_is_told_as_failed() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.lose_answers = 1
        failure = await attempt(connector, job_of(prompt="raise")).failure()
        assert failure.kind is FailureKind.TRANSIENT and "its error is lost" in failure.message


async def test_a_lost_run_can_be_cancelled() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.lose_answers = 1
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        await connector.cancel_job(run.job)
        assert (await run.failure()).kind is FailureKind.INTERRUPTED
        assert fake.runs[0].outcome == "interrupted"


async def test_a_run_that_stalls_is_given_up_and_interrupted() -> None:
    async with server_and_connector(tuned(stop_s=0.2)) as (fake, connector):
        fake.faults.stall_at_step = 3
        job = msgspec.structs.replace(job_of(**LONG), timeouts=Timeouts(stall_s=0.3))
        failure = await attempt(connector, job).failure()
        assert failure.kind is FailureKind.STALL_TIMEOUT and "0.3 s" in failure.message
        assert fake.requests["/sdapi/v1/interrupt"] >= 1


async def test_loading_a_checkpoint_is_no_stall() -> None:
    async with server_and_connector(load_seconds=0.6) as (_, connector):
        job = job_of(override_settings={"sd_model_checkpoint": "other"})
        timeouts = Timeouts(stall_s=0.2)
        assert (await attempt(connector, msgspec.structs.replace(job, timeouts=timeouts)).result()).files
    async with server_and_connector(tuned(load_s=0.1, stop_s=0.1), load_seconds=60.0) as (_, connector):
        failure = await attempt(connector, msgspec.structs.replace(job, timeouts=timeouts)).failure()
        assert failure.kind is FailureKind.STALL_TIMEOUT


async def test_an_upscaling_has_its_stall_timeout_for_all_of_it() -> None:
    async with server_and_connector(extras_seconds=60.0) as (_, connector):
        job = job_of("extra-single-image", image=base64_of(picture()))
        failure = await attempt(
            connector, msgspec.structs.replace(job, timeouts=Timeouts(stall_s=0.2))
        ).failure()
        assert failure.kind is FailureKind.STALL_TIMEOUT


async def test_a_run_that_moves_does_not_stall() -> None:
    async with server_and_connector() as (_, connector):
        job = msgspec.structs.replace(job_of(steps=100), timeouts=Timeouts(stall_s=0.5))
        assert (await attempt(connector, job).result()).files


async def test_a_server_that_does_not_take_a_run_in_time() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.deaf_paths = ["/sdapi/v1/txt2img"]
        job = msgspec.structs.replace(job_of(), timeouts=Timeouts(accept_s=0.3))
        failure = await attempt(connector, job).failure()
        assert failure.kind is FailureKind.ACCEPT_TIMEOUT and fake.runs == []


async def test_a_run_that_waits_behind_a_stranger_for_too_long() -> None:
    async with server_and_connector() as (fake, connector):
        job = msgspec.structs.replace(job_of(), timeouts=Timeouts(start_s=0.3))
        async with fake.process.lock:
            run = attempt(connector, job)
            await run.heard(ProgressKind.ACCEPTED)
            assert (await run.failure()).kind is FailureKind.START_TIMEOUT


async def test_a_server_that_falls_silent_in_a_run_has_crashed() -> None:
    async with server_and_connector(tuned(request_s=0.1, unresponsive_s=0.4, stop_s=0.1)) as (
        fake,
        connector,
    ):
        fake.faults.stall_at_step = 3
        run = attempt(connector, job_of(**LONG))
        await run.heard(ProgressKind.STARTED)
        fake.faults.deaf_paths = ["/"]
        failure = await run.failure()
        assert failure.kind is FailureKind.CRASHED and "no useful answer" in failure.message


async def test_slow_answers_do_no_harm(tmp_path: Path) -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.slow_answer_s = 0.05
        job = job_of(steps=20)
        await check_made_from(job, connector, await attempt(connector, job).result(), tmp_path)


async def test_a_request_limit_is_no_failure_of_the_job() -> None:
    async with server_and_connector(flavour="sdnext", requests_per_minute=30) as (fake, connector):
        await connector.inventory()
        while (await connector._api.get("/sdapi/v1/status", 5.0)).status != 429:
            pass
        run = attempt(connector, job_of())
        with pytest.raises(Exception, match="429"):
            await run.result()
        assert fake.runs == []


async def test_pictures_that_are_too_many_for_the_limit_are_the_jobs_fault() -> None:
    async with server_and_connector(tuned(max_message_bytes=2_000)) as (_, connector):
        failure = await attempt(connector, job_of(n_iter=8)).failure()
        assert failure.kind is FailureKind.NODE_ERROR and "more than 2000 bytes" in failure.message
        assert await connector.check_health(), "the server is not to blame"


async def test_an_endless_answer_to_a_look_does_not_end_the_run(tmp_path: Path) -> None:
    async with server_and_connector(tuned(max_answer_bytes=100_000)) as (fake, connector):
        job = job_of(steps=60)
        run = attempt(connector, job)
        await run.heard(ProgressKind.STARTED)
        fake.faults.endless_paths = ["/sdapi/v1/progress"]
        await check_made_from(job, connector, await run.result(), tmp_path)
        assert not await connector.check_health()
        assert "more than 100000 bytes" in str(connector.defect)


async def test_garbage_instead_of_pictures_is_the_servers_fault() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.garbage_paths = ["/sdapi/v1/txt2img"]
        failure = await attempt(connector, job_of()).failure()
        assert failure.kind is FailureKind.DEAD_WORKER


async def test_a_redirect_is_not_followed() -> None:
    async with server_and_connector() as (fake, connector), server_and_connector() as (elsewhere, _):
        fake.faults.redirect_paths, fake.faults.redirect_to = ["/sdapi"], elsewhere.url
        assert not await connector.check_health()
        failure = await attempt(connector, job_of()).failure()
        assert failure.kind is FailureKind.DEAD_WORKER
        assert elsewhere.requests == {}


async def test_an_attempt_that_the_server_has_completed_for_nobody_is_told_as_lost() -> None:
    async with server_and_connector() as (fake, first):
        job = job_of()
        await attempt(first, job).result()
        await ran(fake, lambda run: run.outcome == "completed")
        async with A1111(fake.url, QUICK) as second:
            assert (await second.reconcile(job)).state == "failed"
            failure = await attempt(second, job).failure()
        assert failure.kind is FailureKind.TRANSIENT and len(fake.runs) == 1


async def test_an_unknown_attempt_is_unknown() -> None:
    async with server_and_connector() as (_, connector):
        assert (await connector.reconcile(job_of())).state == "unknown"


async def test_a_failed_attempt_that_stays_active_is_failed() -> None:
    async with server_and_connector() as (fake, first):
        job = job_of(prompt="raise")
        await attempt(first, job).failure()
        assert fake.process.tasks.current is not None
        async with A1111(fake.url, QUICK) as second:
            assert (await second.reconcile(job)).state == "failed"
