"""Starting, stopping and making a fake server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.sim._client import SAME_FAST, Client, fake, plain, slow, until

from comfyfleet.testing.fake_comfyui import (
    FakeComfyUI,
    FakeSettings,
    Faults,
    InputSpec,
    NodeClass,
    node_class_from_object_info,
)
from comfyfleet.testing.fake_comfyui.command import serve
from comfyfleet.testing.fake_comfyui.pictures import PillowMissing


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_stop_may_be_called_twice_and_removes_the_temporary_disk() -> None:
    server = FakeComfyUI(SAME_FAST)
    await server.start()
    base = server.disk.base
    assert base.is_dir()
    await server.stop()
    await server.stop()
    assert not base.exists() and not server.is_up


async def test_a_given_folder_is_kept_at_stop(tmp_path: Path) -> None:
    async with fake(FakeSettings(base_folder=str(tmp_path), time_scale=0.01)) as client:
        await client.run(plain(prefix="kept"))
    assert (tmp_path / "output" / "kept_00001_.png").is_file()


async def test_a_restart_keeps_port_and_outputs_and_forgets_temporary_files() -> None:
    async with fake() as client:
        port = client.server.port
        await client.run(plain(prefix="kept"))
        preview = (await client.run(slow()))["outputs"]["2"]["images"][0]["filename"]
        await client.server.restart()
        assert client.server.port == port
        assert await client.status("/view?filename=kept_00001_.png") == 200
        assert await client.status(f"/view?filename={preview}&type=temp") == 404
        assert (await client.post("/prompt", {"prompt": plain()}))[1]["number"] == 0


async def test_several_fakes_run_side_by_side() -> None:
    async with fake() as one, fake() as other:
        await one.run(plain())
        assert one.server.port != other.server.port
        assert await other.get("/history") == {}


async def test_equal_seeds_make_equal_ids() -> None:
    ids = []
    for seed in (1, 1, 2):
        async with fake(FakeSettings(seed=seed, time_scale=0.01)) as client:
            ids.append(await client.submit(plain()))
    assert ids[0] == ids[1] != ids[2]


async def test_a_server_can_have_fewer_and_other_node_classes() -> None:
    upscaler = NodeClass(
        name="SuperUpscale",
        required={"image": InputSpec(type="IMAGE"), "mode": InputSpec(choices=("fast", "fine"))},
        outputs=("IMAGE",),
        cost_s=1.0,
    )
    settings = FakeSettings(
        time_scale=0.001, node_classes=("EmptyImage", "SaveImage"), extra_node_classes=(upscaler,)
    )
    graph: dict[str, dict[str, Any]] = {
        **plain(),
        "3": {"class_type": "SuperUpscale", "inputs": {"image": ["1", 0], "mode": "fine"}},
    }
    graph["2"]["inputs"]["images"] = ["3", 0]
    async with fake(settings) as client:
        assert set(await client.get("/object_info")) == {"EmptyImage", "SaveImage", "SuperUpscale"}
        assert (await client.run(graph))["status"]["completed"]
        graph["3"]["inputs"]["mode"] = "other"
        status, answer = await client.post("/prompt", {"prompt": graph})
        assert (status, answer["node_errors"]["3"]["errors"][0]["type"]) == (400, "value_not_in_list")


async def test_a_class_can_be_made_from_what_another_server_says_of_it() -> None:
    async with fake() as client:
        info = await client.get("/object_info")
    copies = tuple(node_class_from_object_info(name, entry) for name, entry in info.items())
    async with fake(FakeSettings(node_classes=(), extra_node_classes=copies)) as client:
        copied = await client.get("/object_info")
    for name, entry in info.items():
        assert copied[name]["input"] == entry["input"]
        assert copied[name]["output"] == entry["output"]


def test_an_unknown_node_class_in_the_settings_is_refused() -> None:
    async def start() -> None:
        await FakeComfyUI(FakeSettings(node_classes=("NoSuchNode",))).start()

    with pytest.raises(ValueError, match="NoSuchNode: describe it in extra_node_classes"):
        asyncio.run(start())


async def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(PillowMissing, match=r"pip install 'comfyfleet\[fake\]'"):
        await FakeComfyUI().start()


async def test_the_command_serves_until_it_is_cancelled() -> None:
    ready: list[FakeComfyUI] = []
    faults = Faults(fail_requests=1)
    task = asyncio.create_task(serve(SAME_FAST, "127.0.0.1", 0, faults, ready.append))
    await until(lambda: bool(ready))
    async with aiohttp.ClientSession() as session:
        client = Client(ready[0], session)
        assert [await client.status("/prompt") for _ in range(2)] == [500, 200]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(aiohttp.ClientError):
            await client.status("/prompt")


async def test_a_start_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with fake() as client:
        second = FakeComfyUI(SAME_FAST)
        with pytest.raises(OSError):
            await second.start(port=client.server.port)
        assert not second.is_up
        assert names_in(tmp_path) == [client.server.disk.base.name]
        await second.start()
        await second.stop()


async def test_history_comes_in_pages() -> None:
    async with fake() as client:
        ids = []
        for color in range(4):
            ids.append(await client.submit(plain(color)))
            await client.finished(ids[-1])
        assert list(await client.get("/history?max_items=2")) == ids[2:]
        assert list(await client.get("/history?max_items=2&offset=1")) == ids[1:3]
        await client.post("/history", {"delete": [ids[0]]})
        assert list(await client.get("/history")) == ids[1:]
        await client.post("/history", {"clear": True})
        assert await client.get("/history") == {}


async def test_prompts_run_one_at_a_time_and_by_priority() -> None:
    async with fake() as client:
        first = await client.submit(slow(seed=1))
        late = await client.submit(plain(2))
        front = await client.submit(plain(3), front=True)
        numbered = await client.submit(plain(4), number=-50)
        await client.finished(late)
        log = client.server.stats.prompt_log
        assert [run.prompt_id for run in log] == [first, numbered, front, late]
        ends = [run.ended_at for run in log]
        assert all(end is not None and end <= run.started_at for end, run in zip(ends, log[1:], strict=False))


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ({"width": 99999}, "value_bigger_than_max"),
        ({"width": None}, "invalid_input_type"),
        ({"width": ["2", 0]}, "exception_during_validation"),
    ],
)
async def test_more_refusals(inputs: dict[str, Any], kind: str) -> None:
    graph = plain()
    graph["1"]["inputs"].update(inputs)
    async with fake() as client:
        status, answer = await client.post("/prompt", {"prompt": graph})
        found = [error["type"] for entry in answer["node_errors"].values() for error in entry["errors"]]
        assert status == 400
        assert kind in found or "exception_during_inner_validation" in found


async def test_long_lists_are_not_sent_back() -> None:
    models = {"checkpoints": {f"model-{number}": 1.0 for number in range(30)}}
    async with fake(FakeSettings(models=models)) as client:
        graph = {
            "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "absent"}},
            "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
        }
        _, answer = await client.post("/prompt", {"prompt": graph})
        error = answer["node_errors"]["1"]["errors"][0]
        assert error["details"] == "ckpt_name: 'absent' not in (list of length 30)"
        assert error["extra_info"]["input_config"] is None


async def test_no_two_prompts_share_a_creation_time() -> None:
    async with fake(faults=Faults(never_start=True)) as client:
        for color in range(20):
            await client.submit(plain(color))
        pending = (await client.get("/queue"))["queue_pending"]
        assert len({item[3]["create_time"] for item in pending}) == 20


async def test_a_usual_workflow_of_a_newer_model_runs() -> None:
    models = {
        "diffusion_models": {"flux": 12.0},
        "text_encoders": {"clip": 0.2, "t5": 4.9},
        "vae": {"ae": 0.3},
        "loras": {"style": 0.1},
        "upscale_models": {"4x": 0.1},
    }
    graph: dict[str, dict[str, Any]] = {
        "unet": {"class_type": "UNETLoader", "inputs": {"unet_name": "flux", "weight_dtype": "default"}},
        "clip": {
            "class_type": "DualCLIPLoader",
            "inputs": {"clip_name1": "clip", "clip_name2": "t5", "type": "flux"},
        },
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "ae"}},
        "lora": {
            "class_type": "LoraLoaderModelOnly",
            "inputs": {"model": ["unet", 0], "lora_name": "style", "strength_model": 1.0},
        },
        "text": {"class_type": "CLIPTextEncode", "inputs": {"text": "a fox", "clip": ["clip", 0]}},
        "guided": {"class_type": "FluxGuidance", "inputs": {"conditioning": ["text", 0], "guidance": 3.5}},
        "none": {"class_type": "ConditioningZeroOut", "inputs": {"conditioning": ["text", 0]}},
        "size": {
            "class_type": "EmptySD3LatentImage",
            "inputs": {"width": 512, "height": 512, "batch_size": 1},
        },
        "sample": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["lora", 0],
                "positive": ["guided", 0],
                "negative": ["none", 0],
                "latent_image": ["size", 0],
                "seed": 5,
                "steps": 4,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sample", 0], "vae": ["vae", 0]}},
        "upscaler": {"class_type": "UpscaleModelLoader", "inputs": {"model_name": "4x"}},
        "large": {
            "class_type": "ImageUpscaleWithModel",
            "inputs": {"upscale_model": ["upscaler", 0], "image": ["decode", 0]},
        },
        "save": {"class_type": "SaveImage", "inputs": {"images": ["large", 0], "filename_prefix": "fox"}},
    }
    async with fake(FakeSettings(time_scale=0.001, models=models)) as client:
        entry = await client.run(graph)
        assert list(entry["outputs"]) == ["save"]
        assert client.server.stats.model_loads == 6
