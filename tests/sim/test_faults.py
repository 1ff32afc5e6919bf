"""Every switch of the fake does what it says, in process and over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.sim._client import SAME_FAST, error_of, fake, plain, slow, text_to_image, until

from comfyfleet.testing.fake_comfyui import FakeSettings, Faults, NodeFault


async def test_a_node_fails_as_often_as_told_and_with_the_told_exception() -> None:
    async with fake() as client:
        client.server.faults.fail_nodes = [
            NodeFault(class_type="SaveImage", times=2, exception_type="OSError", message="disk full")
        ]
        outcomes = [await client.run(plain()) for _ in range(3)]
        assert [entry["status"]["status_str"] for entry in outcomes] == ["error", "error", "success"]
        assert error_of(outcomes[0])["exception_type"] == "OSError"
        assert error_of(outcomes[0])["exception_message"] == "disk full\n"
        assert error_of(outcomes[0])["node_id"] == "2"


async def test_a_node_fails_by_its_id_for_ever() -> None:
    async with fake(faults=Faults(fail_nodes=[NodeFault(node_id="1", times=-1)])) as client:
        for _ in range(3):
            entry = await client.run(plain())
            assert error_of(entry)["node_id"] == "1"


async def test_the_card_runs_out_of_memory_as_often_as_told() -> None:
    async with fake(faults=Faults(out_of_memory=1)) as client:
        first = error_of(await client.run(text_to_image("sd15.safetensors")))
        assert first["exception_type"] == "torch.OutOfMemoryError"
        assert "This error means you ran out of memory on your GPU" in first["exception_message"]
        assert (await client.run(text_to_image("sd15.safetensors")))["status"]["completed"]


async def test_an_accepted_prompt_never_starts_until_the_switch_is_cleared() -> None:
    async with fake(faults=Faults(never_start=True)) as client:
        prompt_id = await client.submit(plain())
        await client.get("/prompt")
        queue = await client.get("/queue")
        assert [item[1] for item in queue["queue_pending"]] == [prompt_id]
        assert client.server.stats.prompts_run == {}
        client.server.faults.never_start = False
        assert (await client.finished(prompt_id))["status"]["completed"]


async def test_a_stalled_node_stops_in_the_middle_and_goes_on_when_released() -> None:
    async with fake(faults=Faults(stall="LabSlow")) as client:
        listener = await client.listen("a")
        prompt_id = await client.submit(slow(steps=4), "a")
        await until(lambda: listener.kinds(prompt_id).count("progress") == 2)
        # An interrupt does not help: the node is not looking.
        await client.post("/interrupt", {"prompt_id": prompt_id})
        assert (await client.get("/queue"))["queue_running"][0][1] == prompt_id
        client.server.faults.stall = None
        assert (await client.finished(prompt_id))["status"]["messages"][-1][0] == "execution_interrupted"


async def test_a_stall_by_node_id_holds_a_node_without_progress() -> None:
    async with fake(faults=Faults(stall="2")) as client:
        listener = await client.listen("a")
        prompt_id = await client.submit(plain(), "a")
        await until(lambda: listener.kinds(prompt_id).count("executing") == 2)
        assert await client.get(f"/history/{prompt_id}") == {}
        client.server.faults.stall = None
        await client.finished(prompt_id)


async def test_a_dead_worker_answers_and_runs_nothing_until_a_restart() -> None:
    async with fake() as client:
        await client.run(plain(1))
        client.server.faults.dead_worker = True
        lost = await client.submit(plain(2))
        assert (await client.get("/prompt"))["exec_info"]["queue_remaining"] == 1
        assert (await client.get("/fake/stats"))["now"]["worker_is_dead"]
        await client.server.restart()
        assert not client.server.faults.dead_worker
        assert (await client.run(plain(3)))["status"]["completed"]
        assert lost not in client.server.stats.prompts_run


async def test_a_worker_that_dies_in_a_run_leaves_its_prompt_running_for_ever() -> None:
    async with fake() as client:
        listener = await client.listen("a")
        prompt_id = await client.submit(slow(), "a")
        await until(lambda: listener.has("progress"))
        client.server.faults.dead_worker = True
        await until(lambda: listener.kinds().count("progress") == 4)
        async with asyncio.timeout(60):
            while True:
                if (await client.get("/fake/stats"))["now"]["worker_is_dead"]:
                    break
                await asyncio.sleep(0.005)
        assert (await client.get("/queue"))["queue_running"][0][1] == prompt_id


async def test_it_crashes_in_the_middle_of_a_run_and_forgets_everything_but_files() -> None:
    async with fake() as client:
        await client.run(plain(1, prefix="before"))
        listener = await client.listen("a")
        client.server.faults.crash_after_nodes = 1
        prompt_id = await client.submit(slow(), "a")
        await listener.reader
        assert listener.socket.close_code == 1006
        await until(lambda: not client.server.is_up)
        with pytest.raises(aiohttp.ClientError):
            await client.get("/prompt")
        assert await asyncio.to_thread(lambda: sorted(client.server.disk.base.rglob("before*.png")))
        await client.server.restart()
        assert await client.get("/history") == {}
        assert await client.get(f"/history/{prompt_id}") == {}
        assert await client.status("/view?filename=before_00001_.png") == 200
        assert client.server.stats.prompts_run[prompt_id] == 1
        assert client.server.stats.prompt_log[-1].ended_at is None


async def test_it_comes_back_on_the_same_port_after_its_time_away() -> None:
    async with fake(faults=Faults(down_seconds=0.05)) as client:
        port = client.server.port
        client.server.faults.crash = True
        assert client.server.faults.crash is False
        await until(lambda: not client.server.is_up)
        await until(lambda: client.server.is_up)
        assert client.server.port == port
        assert (await client.run(plain()))["status"]["completed"]


async def test_a_restart_by_switch_cuts_connections_and_serves_again() -> None:
    async with fake() as client:
        listener = await client.listen("a")
        client.server.faults.restart = True
        await listener.reader
        await until(lambda: client.server.is_up)
        assert client.server.stats.crashes == 1
        assert await client.get("/history") == {}


async def test_websockets_are_dropped_now_while_http_goes_on() -> None:
    async with fake() as client:
        listener = await client.listen("a")
        client.server.faults.drop_sockets = True
        await listener.reader
        assert listener.socket.close_code == 1006
        assert (await client.run(plain(), "a"))["status"]["completed"]
        assert (await client.listen("a")).has("status")


async def test_websockets_are_dropped_in_the_middle_of_a_run() -> None:
    async with fake(faults=Faults(drop_sockets_after_nodes=1)) as client:
        listener = await client.listen("a")
        prompt_id = await client.submit(slow(), "a")
        await listener.reader
        assert not listener.has("execution_success")
        assert (await client.finished(prompt_id))["status"]["completed"]


async def test_deaf_sockets_stay_open_and_silent() -> None:
    async with fake(faults=Faults(deaf_sockets=True)) as client:
        listener = await client.listen("a")
        await client.run(plain(), "a")
        assert listener.messages == [] and not listener.socket.closed
        client.server.faults.deaf_sockets = False
        prompt_id = await client.submit(plain(2), "a")
        await until(
            lambda: listener.kinds(prompt_id)[-1:] == ["executing"] and listener.has("execution_success")
        )


async def test_answers_are_slow_only_where_told() -> None:
    async with fake(faults=Faults(slow_answer_s=600.0, slow_paths=["/queue"])) as client:
        await client.get("/prompt")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.get("/api/queue")
        client.server.faults.slow_answer_s = 0.01
        await client.get("/api/queue")


async def test_answers_without_end_are_sent_for_as_long_as_they_are_read() -> None:
    async with fake() as client:
        client.server.faults.endless_paths = ["/object_info"]
        async with client.session.get(f"{client.server.url}/object_info") as answer:
            assert answer.content_length is None
            assert len(await answer.content.readexactly(1_000_000)) == 1_000_000
            answer.close()
        assert await client.status("/queue") == 200


async def test_swollen_answers_are_small_and_decode_to_many_values() -> None:
    async with fake() as client:
        client.server.faults.swollen_paths = ["/queue"]
        assert len(await client.get("/queue")) == 1_000_001


async def test_requests_and_websockets_are_sent_elsewhere() -> None:
    async with fake() as client:
        client.server.faults.redirect_paths = ["/ws", "/queue"]
        client.server.faults.redirect_to = "http://127.0.0.1:9"
        for path in ("/ws?clientId=a", "/queue"):
            async with client.session.get(client.server.url + path, allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (302, f"http://127.0.0.1:9{path}")
        assert await client.status("/prompt") == 200


async def test_a_websocket_is_greeted_with_a_frame_of_any_size() -> None:
    async with fake() as client:
        client.server.faults.huge_frame_bytes = 3_000_000
        async with client.session.ws_connect(f"{client.server.url}/ws", max_msg_size=0) as socket:
            assert len(await socket.receive_bytes()) == 3_000_000


def test_every_switch_is_tested_here() -> None:
    source = Path(__file__).read_text()
    assert [name for name in Faults.__struct_fields__ if name not in source] == []


async def test_requests_fail_as_often_as_told() -> None:
    async with fake(faults=Faults(fail_requests=2)) as client:
        assert [await client.status("/prompt") for _ in range(3)] == [500, 500, 200]


async def test_requests_fail_by_path_until_the_switch_is_cleared() -> None:
    async with fake(faults=Faults(fail_requests=-1, fail_request_paths=["/history"])) as client:
        assert [await client.status(path) for path in ("/history", "/api/history/x", "/queue")] == [
            500,
            500,
            200,
        ]
        client.server.faults.fail_requests = 0
        assert await client.status("/history") == 200


@pytest.mark.parametrize("manner", ["drop", "hang"])
async def test_a_prompt_runs_although_its_answer_was_lost(manner: str) -> None:
    async with fake() as client:
        client.server.faults.change({"lose_submit_answers": 1, "lost_answer_manner": manner})
        body = {"prompt": plain(), "prompt_id": "lost"}
        timeout = aiohttp.ClientTimeout(total=0.2)
        with pytest.raises((aiohttp.ClientError, TimeoutError)):
            await client.session.post(f"{client.server.url}/prompt", json=body, timeout=timeout)
        assert (await client.finished("lost"))["status"]["completed"]
        assert (await client.run(plain(2)))["status"]["completed"]
        assert client.server.stats.prompts_run["lost"] == 1


async def test_a_model_can_go_and_come_while_the_server_runs() -> None:
    async with fake() as client:
        client.server.faults.missing_models = ["sd15.safetensors"]
        assert "sd15.safetensors" not in await client.get("/models/checkpoints")
        status, answer = await client.post("/prompt", {"prompt": text_to_image("sd15.safetensors")})
        assert status == 400
        assert answer["node_errors"]["1"]["errors"][0]["type"] == "value_not_in_list"
        client.server.faults.missing_models = []
        client.server.faults.added_models = {"checkpoints": {"new.safetensors": 1.5}}
        info = await client.get("/object_info/CheckpointLoaderSimple")
        assert "new.safetensors" in info["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"][0]
        assert (await client.run(text_to_image("new.safetensors")))["status"]["completed"]


async def test_a_corrupt_model_fails_when_it_is_loaded() -> None:
    async with fake(faults=Faults(corrupt_models=["sd15.safetensors"])) as client:
        error = error_of(await client.run(text_to_image("sd15.safetensors")))
        assert error["exception_type"] == "safetensors._safetensors_rust.SafetensorError"


async def test_switches_are_read_and_set_over_http() -> None:
    async with fake() as client:
        status, answer = await client.post(
            "/fake/faults", {"fail_nodes": [{"class_type": "SaveImage"}], "slow_answer_s": 0.0}
        )
        assert status == 200
        assert answer["fail_nodes"][0]["times"] == 1
        assert error_of(await client.run(plain()))["node_type"] == "SaveImage"
        assert (await client.get("/fake/faults"))["fail_nodes"][0]["times"] == 0


async def test_an_unknown_switch_or_a_wrong_value_changes_nothing() -> None:
    async with fake() as client:
        bodies: list[Any] = [{"never_start": True, "no_such_switch": 1}, {"never_start": "perhaps"}, []]
        for body in bodies:
            status, answer = await client.post("/fake/faults", body)
            assert status == 400
            assert "no switch was changed" in answer["error"]
        assert client.server.faults == Faults()
        with pytest.raises(msgspec.ValidationError):
            client.server.faults.change({"out_of_memory": "often"})


async def test_a_crash_over_http_is_answered_before_it_happens() -> None:
    async with fake(faults=Faults(down_seconds=0.02)) as client:
        assert (await client.post("/fake/faults", {"crash": True}))[0] == 200
        await until(lambda: client.server.stats.crashes == 1 and client.server.is_up)
        assert await client.get("/history") == {}


async def test_faults_do_not_reach_the_fakes_own_routes() -> None:
    async with fake(faults=Faults(fail_requests=-1, slow_answer_s=60.0)) as client:
        await client.post("/fake/faults", {"fail_requests": 0, "slow_answer_s": 0})
        assert await client.status("/prompt") == 200


async def test_stopping_does_not_wait_for_a_server_that_is_away() -> None:
    async with fake(FakeSettings(time_scale=SAME_FAST.time_scale), Faults(down_seconds=600.0)) as client:
        client.server.faults.crash = True
        await until(lambda: not client.server.is_up)
        async with asyncio.timeout(60):
            await client.server.stop()
