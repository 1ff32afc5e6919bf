"""A run at the fake Comfy Cloud: what is sent, what is reported, what comes back, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.worker._comfy_cloud import KEY, CloudAttempt, account, leased, picture, saved_color, slow, tuned
from tests.worker._comfyui import eventually

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, ServiceBusy
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import Attachment
from comfyfleet.worker.connectors.comfy_cloud.outputs import read_outputs


async def test_a_run_costs_one_charge_and_its_picture_is_made_from_its_graph(tmp_path: Path) -> None:
    async with account(price=2.5) as (fake, connector):
        attempt = CloudAttempt(connector, leased(picture(0x2040FF)))
        result = await attempt.result()
        (file,) = result.files
        assert (file.node_id, file.kind) == ("2", "images") and file.filename.startswith("out_")
        assert await saved_color(connector, file, tmp_path) == 0x2040FF
        assert await connector.fetch(file) == (tmp_path / "output").read_bytes()
        assert fake.stats.charged == 2.5 and len(fake.stats.jobs_made) == 1
        assert fake.stats.keys_at_storage == 0 and fake.stats.interrupts == 0
        kinds = [report.kind for report in attempt.reports]
        assert kinds[:2] == [ProgressKind.ACCEPTED, ProgressKind.STARTED] and ProgressKind.OUTPUT in kinds
        assert attempt.reports[0].data == {
            "prompt_id": prompt_id_of(attempt.job.attempt_id),
            "service_job": fake.stats.jobs_made[0],
        }


async def test_the_graph_at_comfy_cloud_carries_the_mark_of_the_attempt_and_nothing_else_changes() -> None:
    async with account() as (fake, connector):
        job = leased(picture(7, prefix="cats/out"))
        await CloudAttempt(connector, job).result()
        mark = prompt_id_of(job.attempt_id)
        (made,) = fake.jobs.values()
        assert made.graph["2"]["inputs"]["filename_prefix"] == f"comfyfleet/{mark}/cats/out"
        assert [node.pop("_meta") for node in made.graph.values()] == [{"comfyfleet": mark}] * 2
        made.graph["2"]["inputs"]["filename_prefix"] = "cats/out"
        assert made.graph == job.workflow


async def test_progress_and_previews_come_over_the_event_stream() -> None:
    async with account(tuned(poll_s=20.0, poll_max_s=20.0)) as (_, connector):
        attempt = CloudAttempt(connector, leased(slow(4, 0.02, preview=True)))
        await attempt.result()
        shares = [report.data["percentage"] for report in attempt.of(ProgressKind.PROGRESS)]
        assert shares == sorted(shares) and len(set(shares)) > 2
        (preview, *_) = attempt.of(ProgressKind.PREVIEW)
        assert preview.image is not None and preview.image.startswith(b"\xff\xd8")


@pytest.mark.parametrize("streams", ["missing", "full", "cut"])
async def test_without_an_event_stream_the_job_is_looked_up(streams: str) -> None:
    async with account() as (fake, connector):
        fake.faults.streams = streams  # type: ignore[assignment]
        attempt = CloudAttempt(connector, leased(slow(3, 0.05)))
        assert len((await attempt.result()).files) == 1
        assert attempt.of(ProgressKind.STARTED) and fake.stats.charged == 1.0
        if streams == "missing":
            await CloudAttempt(connector, leased(picture(3))).result()
            assert sum(count for name, count in fake.stats.requests.items() if "/events" in name) == 1


async def test_an_input_goes_through_the_assets_and_the_output_is_made_from_it(tmp_path: Path) -> None:
    source = tmp_path / "source.png"
    async with account() as (fake, connector):
        drawn = await CloudAttempt(connector, leased(picture(0x00AA11))).result()
        await connector.save(drawn.files[0], source)
        graph = {
            "1": {"class_type": "LoadImage", "inputs": {"image": "to be replaced"}},
            "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "copy"}},
        }
        job = msgspec.structs.replace(leased(graph), fetched=(FetchedFile("f-1.png", source, "1", "image"),))
        result = await CloudAttempt(connector, job).result()
        assert await saved_color(connector, result.files[0], tmp_path) == 0x00AA11
        sent = list(fake.jobs.values())[-1].graph["1"]["inputs"]["image"]
        assert sent["__type"] == "core/ASSET" and sent["info"]["file_path"] == "f-1.png"
        assert fake.stats.uploads == 1


async def test_an_input_that_is_too_large_is_not_sent() -> None:
    async with account(max_upload_bytes=1000) as (fake, connector):
        job = leased(picture(), attachments=(Attachment("big.png", b"x" * 1001, "1", "color"),))
        failure = await CloudAttempt(connector, job).failure()
        assert failure.kind is FailureKind.MISSING_INPUT and "1001 bytes" in failure.message
        assert fake.stats.uploads == 0 and fake.stats.submissions == 0


async def test_no_more_jobs_run_than_the_plan_allows() -> None:
    async with account(plan="standard") as (fake, connector):
        first = CloudAttempt(connector, leased(slow(4, 0.1)))
        await first.heard(ProgressKind.STARTED)
        failed = await CloudAttempt(connector, leased(picture())).failed()
        assert isinstance(failed, ServiceBusy) and "--slots 1" in failed.failure.message
        await first.result()
        assert fake.stats.submissions == 1


async def test_a_worker_may_use_less_than_its_plan() -> None:
    async with account(tuned(slots=1), plan="pro") as (_, connector):
        assert connector._account.slots == 1


async def test_the_inventory_names_provider_environment_nodes_and_models() -> None:
    async with account() as (_, connector):
        inventory = await connector.inventory()
        (service,) = inventory.capabilities.services
        assert (service.name, service.providers) == ("comfyui", ("comfy_cloud",))
        assert inventory.capabilities.environment == "cloud" and inventory.capabilities.is_fake
        assert service.models is not None and "sd15.safetensors" in service.models
        assert service.node_classes is not None and "SaveImage" in service.node_classes
        assert inventory.nodes is not None and inventory.nodes.definitions


async def test_a_cancelled_run_is_stopped_by_its_own_id_and_others_go_on() -> None:
    async with account() as (fake, connector):
        others = fake.submit_as_other(slow(20, 0.05, seed=5))
        attempt = CloudAttempt(connector, leased(slow(400, 0.05)))
        await attempt.heard(ProgressKind.STARTED)
        await connector.cancel_job(attempt.job)
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED
        ours = fake.stats.jobs_made[-1]
        assert fake.jobs[ours].status == "canceled" and fake.stats.cancels == [ours]
        await eventually(lambda: others.status == "succeeded")
        assert fake.stats.interrupts == 0


async def test_a_job_that_waits_is_cancelled_and_costs_nothing() -> None:
    async with account() as (fake, connector):
        fake.faults.never_starts = True
        attempt = CloudAttempt(connector, leased(picture()))
        await attempt.heard(ProgressKind.ACCEPTED)
        await connector.cancel_job(attempt.job)
        assert (await attempt.failure()).kind is FailureKind.INTERRUPTED
        fake.let_start()
        assert fake.stats.charged == 0.0


async def test_the_key_is_in_no_report_result_or_error() -> None:
    async with account() as (fake, connector):
        attempt = CloudAttempt(connector, leased(picture()))
        result = await attempt.result()
        texts = [json.dumps(msgspec.to_builtins(each)) for each in (*attempt.reports, result)]
        fake.faults.is_key_refused = fake.faults.echoes_key = True
        failed = await CloudAttempt(connector, leased(picture())).failed()
        texts += [
            str(failed),
            repr(failed.failure),
            str(connector.defect),
            repr(connector.settings),
            connector.url,
        ]
        assert "does not accept the key" in failed.failure.message
        assert not [text for text in texts if KEY in text]


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("../../x.png", "x.png"),
        ("..", "asset-1"),
        ("a/..", "asset-1"),
        ("/etc/", "asset-1"),
        ("c:\\y.png", "y.png"),
    ],
)
async def test_the_name_of_an_output_leads_nowhere(sent: str, name: str) -> None:
    async with account() as (_, connector):
        job = {"id": "j", "outputs": [{"node_id": "2", "id": "asset-1", "name": sent, "type": "image"}]}
        (file,) = read_outputs(job, connector._api, ()).files
        assert (file.filename, file.subfolder) == (name, "")
