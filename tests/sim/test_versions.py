"""A fake behaves like the release it is told to be."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sim._client import Client, fake, plain, slow, until
from tests.sim._compare import Comparison
from tests.sim._replay import read_trace

from comfyfleet.testing.fake_comfyui import FakeSettings, Faults, NodeFault
from comfyfleet.testing.fake_comfyui.settings import PROFILES, behaviour_of

OWN_ID = "0b0f3cb3-3b6e-4b3a-9a53-2e6b9b3c0001"


def release(version: str, **more: Any) -> FakeSettings:
    return FakeSettings(version=version, time_scale=0.01, **more)


@pytest.mark.parametrize(("version", "is_taken"), [("0.3.44", False), ("0.3.45", True), ("0.33.0", True)])
async def test_an_own_prompt_id_is_taken_since_0_3_45(version: str, is_taken: bool) -> None:
    async with fake(release(version)) as client:
        assert (await client.submit(plain(), prompt_id=OWN_ID) == OWN_ID) is is_taken


@pytest.mark.parametrize(("version", "status"), [("0.23.9", 200), ("0.24.0", 400)])
async def test_an_own_prompt_id_has_to_be_a_uuid_since_0_24_0(version: str, status: int) -> None:
    async with fake(release(version)) as client:
        assert (await client.post("/prompt", {"prompt": plain(), "prompt_id": "mine"}))[0] == status


@pytest.mark.parametrize(("version", "negotiates"), [("0.3.44", False), ("0.3.45", True)])
async def test_features_and_progress_state_exist_since_0_3_45(version: str, negotiates: bool) -> None:
    async with fake(release(version)) as client:
        assert await client.status("/features") == (200 if negotiates else 404)
        listener = await client.listen("a")
        await listener.socket.send_json(
            {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
        )
        await client.run(slow(steps=2, preview=True), "a")
        await until(lambda: listener.has("execution_success") and len(listener.frames) == 2)
        assert listener.has("progress") and listener.has("feature_flags") is negotiates
        assert listener.has("progress_state") is negotiates
        assert {frame["event_type"] for frame in listener.frames} == {4 if negotiates else 1}


@pytest.mark.parametrize(("version", "ran"), [("0.3.47", {"2", "3"}), ("0.3.48", {"3"})])
async def test_partial_targets_count_since_0_3_48(version: str, ran: set[str]) -> None:
    graph = {**plain(), "3": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
    async with fake(release(version)) as client:
        entry = await client.run(graph, partial_execution_targets=["3"])
        assert set(entry["outputs"]) == ran


@pytest.mark.parametrize(("version", "is_stopped"), [("0.3.56", True), ("0.3.57", False)])
async def test_an_interrupt_for_another_prompt_stops_the_running_one_before_0_3_57(
    version: str, is_stopped: bool
) -> None:
    async with fake(release(version)) as client:
        listener = await client.listen("a")
        prompt_id = await client.submit(slow(steps=20), "a")
        await until(lambda: listener.has("progress"))
        await client.post("/interrupt", {"prompt_id": "another"})
        assert (await client.finished(prompt_id))["status"]["completed"] is not is_stopped


@pytest.mark.parametrize(("version", "are_hidden"), [("0.3.67", False), ("0.3.68", True)])
async def test_api_keys_are_hidden_since_0_3_68(version: str, are_hidden: bool) -> None:
    async with fake(release(version)) as client:
        entry = await client.run(plain(), extra_data={"api_key_comfy_org": "secret"})
        assert ("secret" not in str(entry)) is are_hidden


@pytest.mark.parametrize(("version", "is_stamped"), [("0.3.68", False), ("0.3.69", True)])
async def test_prompts_carry_their_creation_time_since_0_3_69(version: str, is_stamped: bool) -> None:
    async with fake(release(version)) as client:
        assert ("create_time" in (await client.run(plain()))["prompt"][3]) is is_stamped


@pytest.mark.parametrize(("version", "status"), [("0.5.1", 404), ("0.6.0", 200)])
async def test_jobs_exist_since_0_6_0(version: str, status: int) -> None:
    async with fake(release(version)) as client:
        assert await client.status("/api/jobs") == status


async def _interrupted_job(client: Client) -> str:
    listener = await client.listen("a")
    prompt_id = await client.submit(slow(steps=50), "a")
    await until(lambda: listener.has("progress"))
    await client.post("/interrupt", {})
    await client.finished(prompt_id)
    return str((await client.get(f"/api/jobs/{prompt_id}"))["status"])


@pytest.mark.parametrize(("version", "status"), [("0.8.1", "failed"), ("0.8.2", "cancelled")])
async def test_an_interrupted_job_is_cancelled_since_0_8_2(version: str, status: str) -> None:
    async with fake(release(version)) as client:
        assert await _interrupted_job(client) == status


@pytest.mark.parametrize(("version", "kind"), [("0.11.0", "invalid_prompt"), ("0.11.1", "missing_node_type")])
async def test_an_unknown_node_has_its_own_error_since_0_11_1(version: str, kind: str) -> None:
    async with fake(release(version)) as client:
        status, answer = await client.post("/prompt", {"prompt": {"1": {"class_type": "Nope", "inputs": {}}}})
        assert (status, answer["error"]["type"]) == (400, kind)


@pytest.mark.parametrize(("version", "nodes"), [("0.19.2", set()), ("0.19.3", {"1", "2"})])
async def test_a_cycle_is_explained_since_0_19_3(version: str, nodes: set[str]) -> None:
    graph = {
        "1": {"class_type": "ImageInvert", "inputs": {"image": ["2", 0]}},
        "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
        "3": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}},
    }
    async with fake(release(version)) as client:
        status, answer = await client.post("/prompt", {"prompt": graph})
        assert (status, set(answer["node_errors"])) == (400, nodes)


@pytest.mark.parametrize(("version", "status"), [("0.24.0", 405), ("0.25.0", 200)])
async def test_jobs_can_be_cancelled_since_0_25_0(version: str, status: int) -> None:
    async with fake(release(version)) as client:
        assert (await client.post(f"/api/jobs/{OWN_ID}/cancel", {}))[0] == status


@pytest.mark.parametrize("version", ["0.7.0", "0.33.0"])
async def test_cached_outputs_reach_the_history_without_a_client_only_in_newer_releases(version: str) -> None:
    async with fake(release(version)) as client:
        await client.run(plain())
        again = await client.run(plain())
        assert bool(again["outputs"]) is (version == "0.33.0")


def test_a_version_that_is_no_version_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"give numbers with dots, such as 0\.7\.0"):
        behaviour_of("nightly")


def _sampler(name: str) -> dict[str, Any]:
    """The prompt of the recording: node 1 chooses the sampler, node 2 shows it."""
    return {
        "1": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": name}},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
    }


def _scaled(**more: Any) -> dict[str, Any]:
    inputs = {"image": ["1", 0], "upscale_method": "area", "megapixels": 0.01, **more}
    return {
        **plain(),
        "2": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "scaled"}},
        "3": {"class_type": "ImageScaleToTotalPixels", "inputs": inputs},
    }


def _recorded(text: str) -> Any:
    events = read_trace("26-refusals-that-depend-on-the-version")
    place = next(place for place, event in enumerate(events) if text in event.get("text", ""))
    return events[place + 1]


def _assert_equal(recorded: Any, said: Any) -> None:
    comparison = Comparison()
    comparison.compare("body", recorded, said)
    assert not comparison.differences, "\n".join(comparison.differences)


@pytest.mark.parametrize(
    ("graph", "refused_by", "note"),
    [
        (_sampler("exp_heun_2_x0"), "0.3.64", "0.3.64: a sampler that only newer versions have"),
        (_scaled(), "0.7.0", "0.7.0: a node as exported from 0.3.64"),
    ],
)
async def test_a_release_refuses_what_the_other_takes_as_recorded(
    graph: dict[str, Any], refused_by: str, note: str
) -> None:
    recorded = _recorded(note)
    for version in ("0.3.64", "0.7.0"):
        async with fake(release(version)) as client:
            status, said = await client.post("/prompt", {"prompt": graph})
            assert status == (recorded["status"] if version == refused_by else 200)
            if version == refused_by:
                _assert_equal(recorded["body"], said)
            else:
                assert (await client.finished(said["prompt_id"]))["status"]["completed"]


async def test_a_prompt_that_kills_the_thread_stays_in_the_running_queue_as_recorded() -> None:
    recorded = _recorded("0.7.0 after 18a")
    number, prompt_id, graph, _, _ = recorded["body"]["queue_running"][0]
    async with fake(release("0.7.0", first_number=number)) as client:
        await client.submit(graph, prompt_id=prompt_id)
        await client.worker_died()
        _assert_equal(recorded["body"], await client.get("/queue"))


@pytest.mark.parametrize("version", PROFILES)
@pytest.mark.parametrize(
    "exception_type", ["KeyboardInterrupt", "asyncio.exceptions.CancelledError", "SystemExit"]
)
async def test_a_node_that_raises_no_exception_but_a_signal_kills_the_thread(
    version: str, exception_type: str
) -> None:
    faults = Faults(fail_nodes=[NodeFault(class_type="EmptyImage", exception_type=exception_type)])
    async with fake(release(version), faults) as client:
        prompt_id = await client.submit(plain())
        await client.worker_died()
        other = await client.submit(plain(color=2))
        queue = await client.get("/queue")
        assert [entry[1] for entry in queue["queue_running"]] == [prompt_id]
        assert [entry[1] for entry in queue["queue_pending"]] == [other]
        assert await client.get("/history") == {}


@pytest.mark.parametrize(("version", "samplers"), [("0.3.64", 42), ("0.7.0", 44), ("0.33.0", 44)])
async def test_a_release_lists_its_own_samplers_and_inputs(version: str, samplers: int) -> None:
    async with fake(release(version)) as client:
        printed = (await client.get("/object_info/KSampler"))["KSampler"]["input"]["required"]
        assert len(printed["sampler_name"][0]) == samplers
        declared, *options = (await client.get("/object_info/KSamplerSelect"))["KSamplerSelect"]["input"][
            "required"
        ]["sampler_name"]
        assert len(declared if version == "0.3.64" else options[0]["options"]) == samplers
        scaling = (await client.get("/object_info/ImageScaleToTotalPixels"))["ImageScaleToTotalPixels"]
        assert ("resolution_steps" in scaling["input"]["required"]) is (version != "0.3.64")


@pytest.mark.parametrize(("version", "status"), [("0.3.64", 400), ("0.7.0", 200), ("0.33.0", 400)])
async def test_choices_of_the_new_style_are_not_checked_by_0_7_0(version: str, status: int) -> None:
    async with fake(release(version)) as client:
        assert (await client.post("/prompt", {"prompt": _sampler("made up")}))[0] == status
