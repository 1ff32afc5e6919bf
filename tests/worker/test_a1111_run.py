"""The A1111 connector runs jobs: the pictures are those of the payload, whole, and of the right checkpoint."""

from __future__ import annotations

import asyncio
import io
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from tests.worker._a1111 import (
    attempt,
    base64_of,
    check_made_from,
    job_of,
    picture,
    ran,
    saved,
    server_and_connector,
    subject,
    tuned,
)

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, FileTooLarge, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.testing.fake_a1111 import FakeCheckpoint, FakeSubject, drawn_pixels, pixels_of
from comfyfleet.worker.connectors.a1111.outputs import KeptPictures

OTHER: dict[str, Any] = {"override_settings": {"sd_model_checkpoint": "other.safetensors"}}


async def test_a_picture_is_made_from_the_payload(tmp_path: Path) -> None:
    async with server_and_connector() as (fake, connector):
        job = job_of(prompt="a red fox", negative_prompt="fog", seed=41, width=256, height=128)
        result = await attempt(connector, job).result()
        (content,) = await saved(connector, result, tmp_path)
        assert pixels_of(content) == drawn_pixels(subject(job))
        with Image.open(io.BytesIO(content)) as opened:
            text = opened.info["parameters"]
        assert text.startswith("a red fox\nNegative prompt: fog\n") and "Seed: 41," in text
        assert (result.files[0].node_id, result.files[0].kind) == ("txt2img", "images")
        assert result.files[0].filename == "txt2img_00001.png"
        (info,) = result.outputs["txt2img"]["info"]
        assert (info["seeds"], info["model"], info["model_hash"]) == ([41], "base", "aaaa")
        assert (info["sampler_name"], info["version"]) == ("Euler", "v1.10.1")
        sent = fake.runs[0].body
        assert sent["force_task_id"] == prompt_id_of(job.attempt_id)
        assert sent["send_images"] is True and sent["save_images"] is False
        assert sent["override_settings"] == {"sd_model_checkpoint": "base.safetensors [aaaa]"}


async def test_a_run_tells_when_it_starts_and_how_far_it_is() -> None:
    async with server_and_connector() as (_, connector):
        run = attempt(connector, job_of(steps=40))
        await run.result()
        kinds = [report.kind for report in run.reports]
        assert kinds[:2] == [ProgressKind.ACCEPTED, ProgressKind.STARTED]
        assert kinds[-1] is ProgressKind.OUTPUT
        shares = [report.data["percentage"] for report in run.of(ProgressKind.PROGRESS)]
        assert len(shares) > 2 and shares == sorted(shares) and 0 < shares[-1] <= 100
        last = run.of(ProgressKind.PROGRESS)[-1].data
        assert last["max"] == 40 and last["message"] == f"txt2img: step {last['value']} of 40"
        previews = run.of(ProgressKind.PREVIEW)
        assert previews and all(report.image and report.image.startswith(b"\x89PNG") for report in previews)
        assert previews[0].data == {"format": "image/png", "node": "txt2img"}


async def test_previews_are_bounded_and_can_be_switched_off() -> None:
    for settings in (tuned(previews=False), tuned(max_preview_bytes=20)):
        async with server_and_connector(settings) as (_, connector):
            run = attempt(connector, job_of(steps=20))
            await run.result()
            assert run.of(ProgressKind.PROGRESS) and not run.of(ProgressKind.PREVIEW)


async def test_each_picture_of_a_batch_has_its_own_seed_and_a_grid_is_left_out(tmp_path: Path) -> None:
    async with server_and_connector(returns_grid=True) as (_, connector):
        job = job_of(batch_size=2, n_iter=2, alwayson_scripts={"ControlNet": {"args": []}})
        result = await attempt(connector, job).result()
        contents = await saved(connector, result, tmp_path)
        assert [pixels_of(each) for each in contents] == [
            drawn_pixels(subject(job, number)) for number in range(4)
        ]
        assert result.outputs["txt2img"]["info"][0]["seeds"] == [7, 8, 9, 10]


@pytest.mark.parametrize("image_format", ["png", "jpg", "webp"])
async def test_the_bytes_tell_what_kind_of_picture_it_is(image_format: str, tmp_path: Path) -> None:
    async with server_and_connector(image_format=image_format) as (_, connector):
        result = await attempt(connector, job_of()).result()
        assert result.files[0].filename == f"txt2img_00001.{image_format}"
        (content,) = await saved(connector, result, tmp_path)
        with Image.open(io.BytesIO(content)) as opened:
            assert opened.format == {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}[image_format]


async def test_the_checkpoint_that_a_job_names_is_loaded_for_it_and_not_for_others(tmp_path: Path) -> None:
    async with server_and_connector() as (fake, connector):
        other, usual = job_of(**OTHER), job_of()
        await check_made_from(
            other, connector, await attempt(connector, other).result(), tmp_path, model="other"
        )
        assert "other" in (await connector.inventory()).live.loaded_models
        await check_made_from(usual, connector, await attempt(connector, usual).result(), tmp_path)
        assert "base" in (await connector.inventory()).live.loaded_models
        assert fake.process.option == "base.safetensors [aaaa]"


async def test_a_checkpoint_in_a_folder_is_found_by_each_of_its_names(tmp_path: Path) -> None:
    checkpoints = (FakeCheckpoint("base.safetensors", "aaaa"), FakeCheckpoint("xl/big.safetensors", "cccc"))
    names = ("xl/big.safetensors [cccc]", "xl\\big.safetensors", "xl_big", "big", "big.safetensors", "cccc")
    async with server_and_connector(checkpoints=checkpoints) as (fake, connector):
        for name in names:
            job = job_of(override_settings={"sd_model_checkpoint": name})
            await check_made_from(
                job, connector, await attempt(connector, job).result(), tmp_path, model="big"
            )
            offered = (await connector.inventory()).capabilities.services[0].models
            assert offered is not None and name.replace("\\", "/") in offered
        assert {run.model for run in fake.runs} == {"big"}


async def test_a_checkpoint_that_the_server_does_not_have_is_never_asked_for() -> None:
    async with server_and_connector() as (fake, connector):
        job = job_of(override_settings={"sd_model_checkpoint": "gone.safetensors"})
        failure = await attempt(connector, job).failure()
        assert (failure.kind, failure.missing) == (FailureKind.MISSING_MODEL, ("gone.safetensors",))
        assert fake.runs == []


async def test_a_picture_of_another_checkpoint_than_the_ordered_one_is_refused() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.loads_wrong_model = True
        failure = await attempt(connector, job_of(**OTHER)).failure()
        assert failure.kind is FailureKind.MISSING_MODEL
        assert failure.missing == ("other.safetensors",), "as the payload names it"
        assert "used the checkpoint base" in failure.message


async def test_files_of_the_hub_become_the_pictures_of_the_request(tmp_path: Path) -> None:
    first, mask = picture(1), picture(2)
    (tmp_path / "1").write_bytes(first)
    (tmp_path / "2").write_bytes(mask)
    async with server_and_connector() as (_, connector):
        job = msgspec.structs.replace(
            job_of("img2img"),
            fetched=(
                FetchedFile("f1.png", tmp_path / "1", "body", "init_images"),
                FetchedFile("f2.png", tmp_path / "2", "body", "mask", "mask"),
            ),
        )
        result = await attempt(connector, job).result()
        await check_made_from(job, connector, result, tmp_path, sources=(first, mask))
        assert "init_images" not in job.workflow["body"], "the lease is not changed"


async def test_pictures_of_the_payload_itself_are_used(tmp_path: Path) -> None:
    source = picture(3)
    async with server_and_connector() as (_, connector):
        job = job_of("img2img", init_images=[base64_of(source)])
        await check_made_from(
            job, connector, await attempt(connector, job).result(), tmp_path, sources=(source,)
        )


async def test_a_missing_picture_is_the_callers_fault_and_nothing_is_sent() -> None:
    async with server_and_connector() as (fake, connector):
        failure = await attempt(connector, job_of("img2img")).failure()
        assert (failure.kind, failure.missing) == (FailureKind.MISSING_INPUT, ("init_images",))
        assert "body.init_images" in failure.message and fake.runs == []


async def test_pictures_are_upscaled_one_by_one_or_together(tmp_path: Path) -> None:
    sources = [picture(4), picture(5)]
    expected = [
        drawn_pixels(FakeSubject(route=route, sources=(sha256(source).hexdigest(),), model=""))
        for route, source in (
            ("extra-single-image", sources[0]),
            ("extra-batch-images", sources[0]),
            ("extra-batch-images", sources[1]),
        )
    ]
    async with server_and_connector() as (_, connector):
        single = job_of("extra-single-image", image=base64_of(sources[0]), upscaler_1="4x-plain")
        listed = [{"data": base64_of(each), "name": "x.png"} for each in sources]
        many = job_of("extra-batch-images", imageList=listed, upscaler_1="4x-plain")
        run = attempt(connector, single)
        found = await saved(connector, await run.result(), tmp_path)
        found += await saved(connector, await attempt(connector, many).result(), tmp_path)
        assert [pixels_of(each) for each in found] == expected
        assert run.of(ProgressKind.STARTED)


async def test_a_server_runs_one_request_of_ours_at_a_time(tmp_path: Path) -> None:
    async with server_and_connector() as (fake, connector):
        jobs = [job_of(seed=seed, steps=10) for seed in range(4)]
        runs = [attempt(connector, job) for job in jobs]
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(fake.process.work))
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        for job, run in zip(jobs, runs, strict=True):
            await check_made_from(job, connector, await run.result(), tmp_path)
        watcher.cancel()
        assert most == 1


async def test_a_run_waits_until_a_stranger_is_done() -> None:
    async with server_and_connector() as (fake, connector):
        stranger = asyncio.create_task(connector._api.run("txt2img", {"steps": 60}))
        await ran(fake, lambda run: run.steps_done > 0)
        result = await attempt(connector, job_of()).result()
        assert result.files
        assert [run.outcome for run in fake.runs] == ["completed", "completed"]
        assert (await stranger).is_ok


async def test_a_server_that_a_silent_stranger_occupies_gets_no_job() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.stall_at_step = 2
        stranger = asyncio.create_task(connector._api.run("txt2img", {"steps": 60}))
        await ran(fake, lambda run: run.steps_done == 2)
        run = attempt(connector, job_of())
        failure = await run.failure()
        assert type(run.task.exception()).__name__ == "ServiceBusy"
        assert "occupied" in failure.message and len(fake.runs) == 1
        stranger.cancel()


async def test_an_id_that_waits_for_ever_does_not_keep_jobs_away() -> None:
    async with server_and_connector() as (fake, connector):
        answer = await connector._api.run("img2img", {"init_images": ["bm90IGEgcGljdHVyZQ=="]})
        assert answer.status == 500 and fake.process.tasks.pending
        for _ in range(2):
            assert (await attempt(connector, job_of()).result()).files


async def test_an_attempt_that_is_left_goes_on_and_can_be_joined_again(tmp_path: Path) -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.stall_at_step = 2
        job = job_of()
        first = attempt(connector, job)
        await first.heard(ProgressKind.STARTED)
        first.task.cancel()
        await asyncio.wait({first.task})
        assert (await connector.reconcile(job)).state == "running"
        second = attempt(connector, job)
        await asyncio.sleep(0)
        fake.faults.stall_at_step = None
        fake.recheck_faults()
        await check_made_from(job, connector, await second.result(), tmp_path)
        assert len(fake.runs) == 1


async def test_a_result_that_nobody_waited_for_is_found_later(tmp_path: Path) -> None:
    async with server_and_connector() as (fake, connector):
        job = job_of(steps=10)
        first = attempt(connector, job)
        await first.heard(ProgressKind.STARTED)
        first.task.cancel()
        await ran(fake, lambda run: run.outcome == "completed")
        async with asyncio.timeout(60):
            while (found := await connector.reconcile(job)).state == "running":
                await asyncio.sleep(0.01)
        assert found.state == "completed" and found.result is not None
        await check_made_from(job, connector, found.result, tmp_path)
        await check_made_from(job, connector, await attempt(connector, job).result(), tmp_path)
        assert len(fake.runs) == 1


async def test_pictures_are_gone_once_the_hub_has_them_and_when_the_connector_closes(tmp_path: Path) -> None:
    async with server_and_connector(tuned(spool=tmp_path)) as (_, connector):
        jobs = [job_of(), job_of()]
        for job in jobs:
            await attempt(connector, job).result()
        assert len(kept_in(tmp_path)) == 2
        await connector.clean_up(jobs[0], are_outputs_kept=True)
        await connector.clean_up(jobs[1], are_outputs_kept=False)
        assert len(kept_in(tmp_path)) == 1
    assert not kept_in(tmp_path)


async def test_the_oldest_pictures_go_when_too_many_are_kept(tmp_path: Path) -> None:
    async with server_and_connector(tuned(spool=tmp_path, max_kept_bytes=1000)) as (_, connector):
        results = [await attempt(connector, job_of(seed=seed)).result() for seed in range(5)]
        kept = kept_in(tmp_path)
        assert 0 < len(kept) < 5
        assert await saved(connector, results[-1], tmp_path)
        with pytest.raises(ServiceFailed, match="no longer has"):
            await saved(connector, results[0], tmp_path)


async def test_a_picture_above_the_limit_is_not_fetched_and_stays(tmp_path: Path) -> None:
    async with server_and_connector(tuned(max_file_bytes=20, max_fetch_bytes=20)) as (_, connector):
        result = await attempt(connector, job_of()).result()
        with pytest.raises(FileTooLarge, match="the limit is 20"):
            await connector.save(result.files[0], tmp_path / "x")
        with pytest.raises(FileTooLarge):
            await connector.fetch(result.files[0])
        assert not kept_in(tmp_path)


async def test_a_picture_that_the_disk_cannot_take_fails_the_attempt_because_no_server_keeps_it(
    tmp_path: Path,
) -> None:
    async with server_and_connector(tuned(min_free_bytes=1 << 60)) as (_, connector):
        result = await attempt(connector, job_of()).result()
        with pytest.raises(ServiceFailed, match="disk has no space") as caught:
            await connector.save(result.files[0], tmp_path / "x")
        assert not isinstance(caught.value, FileTooLarge)
        assert caught.value.failure.kind is FailureKind.TRANSIENT
        assert not kept_in(tmp_path)


def test_bad_pictures_leave_nothing_on_the_disk(tmp_path: Path) -> None:
    pictures = KeptPictures(tuned(spool=tmp_path))
    pictures.open()
    good, bad = base64_of(picture()), base64_of(b"no picture")
    for number, texts in enumerate(((good, bad), (good, "%"))):
        with pytest.raises(ServiceFailed):
            pictures.keep(f"task-{number}", "txt2img", texts)
    assert not kept_in(tmp_path)
    pictures.close()


@pytest.mark.parametrize("field", ["filename", "subfolder"])
async def test_a_name_that_leads_elsewhere_leads_nowhere(field: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    async with server_and_connector(tuned(spool=tmp_path)) as (_, connector):
        (file,) = (await attempt(connector, job_of()).result()).files
        wrong = msgspec.structs.replace(file, **{field: f"../../{tmp_path.name}/secret"})
        with pytest.raises(ServiceFailed, match="no longer has"):
            await connector.fetch(wrong)


async def test_outputs_that_nobody_wants_are_not_kept(tmp_path: Path) -> None:
    async with server_and_connector(tuned(spool=tmp_path)) as (_, connector):
        job = msgspec.structs.replace(job_of(), include_outputs=("something",))
        result = await attempt(connector, job).result()
        assert (result.files, result.outputs) == ((), {})
        assert not kept_in(tmp_path)


async def test_no_secret_of_the_server_is_in_a_result() -> None:
    settings = tuned(user="user", password="hunter2-secret")
    async with server_and_connector(settings, user="user", password="hunter2-secret") as (_, connector):
        run = attempt(connector, job_of(steps=10))
        result = await run.result()
        told = json.dumps(msgspec.to_builtins([result, run.reports, await connector.inventory()]))
        assert "hunter2" not in told


def kept_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
