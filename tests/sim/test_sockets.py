"""Who hears what on the websocket."""

from __future__ import annotations

from functools import partial

import aiohttp
from tests.sim._client import Listener, fake, plain, slow, text_to_image, until


def _ends_with_status(listener: Listener) -> bool:
    return listener.kinds()[-1] == "status"


RUN = ["execution_start", "execution_cached", "executing", "executed", "execution_success"]


async def test_the_events_of_a_run_go_only_to_the_client_that_queued_it() -> None:
    async with fake() as client:
        owner, other = await client.listen("owner"), await client.listen("other")
        prompt_id = await client.submit(plain(), "owner")
        await until(lambda: owner.messages[-1]["data"].get("node", "") is None)
        assert set(RUN) <= set(owner.kinds(prompt_id))
        await until(lambda: other.kinds().count("status") == 4)
        assert other.kinds(prompt_id) == []


async def test_without_a_client_id_everybody_hears_progress_and_nobody_the_end() -> None:
    async with fake() as client:
        one, two = await client.listen("one"), await client.listen("two")
        prompt_id = await client.submit(slow(steps=2, preview=True))
        await client.finished(prompt_id)
        for listener in (one, two):
            await until(partial(_ends_with_status, listener))
            assert set(listener.kinds(prompt_id)) == {"progress", "progress_state"}
            assert len(listener.frames) == 2


async def test_when_the_old_of_two_sockets_closes_the_new_one_goes_deaf() -> None:
    async with fake() as client:
        old = await client.listen("same")
        new = await client.listen("same")
        first = await client.submit(plain(1), "same")
        await until(lambda: new.kinds(first)[-2:] == ["execution_success", "executing"])
        assert old.kinds() == ["status"]
        await old.close()
        heard = len(new.messages)
        entry = await client.run(plain(2), "same")
        third = await client.listen("third")
        await client.run(plain(3), "third")
        await until(lambda: third.kinds().count("status") == 4)
        assert entry["status"]["completed"]
        assert not new.socket.closed
        # Not even the status broadcasts came, which a third client got.
        assert len(new.messages) == heard


async def test_a_client_that_comes_back_is_told_the_running_node() -> None:
    async with fake() as client:
        first = await client.listen("a")
        prompt_id = await client.submit(slow(steps=50), "a")
        await until(lambda: first.has("progress"))
        await first.close()
        back = await client.listen("a")
        await until(lambda: len(back.messages) >= 2)
        assert back.messages[1] == {"type": "executing", "data": {"node": "1"}}
        await client.post("/interrupt", {"prompt_id": prompt_id})
        await until(lambda: back.has("execution_interrupted"))


async def test_previews_change_with_the_progress_and_say_where_they_belong() -> None:
    async with fake() as client:
        listener = await client.listen("a", with_metadata=True)
        prompt_id = await client.submit(text_to_image("sd15.safetensors", steps=4), "a")
        await client.finished(prompt_id)
        await until(lambda: len(listener.frames) == 4)
        assert len({frame["image"] for frame in listener.frames}) == 4
        assert {frame["event_type"] for frame in listener.frames} == {4}
        assert {frame["metadata"]["prompt_id"] for frame in listener.frames} == {prompt_id}
        assert {frame["metadata"]["node_id"] for frame in listener.frames} == {"4"}
        assert client.server.stats.previews_sent == 4


async def test_a_ping_is_answered() -> None:
    async with fake() as client:
        url = f"{client.server.url}/ws?clientId=p"
        async with client.session.ws_connect(url, autoping=False) as socket:
            await socket.receive_json()
            await socket.ping(b"there?")
            answer = await socket.receive(timeout=60)
            assert (answer.type, answer.data) == (aiohttp.WSMsgType.PONG, b"there?")


async def test_an_interruption_is_told_to_everybody_when_nobody_owns_the_prompt() -> None:
    async with fake() as client:
        listener = await client.listen("a")
        prompt_id = await client.submit(slow(steps=50))
        await until(lambda: listener.has("progress"))
        await client.post("/interrupt", {"prompt_id": prompt_id})
        await until(lambda: "execution_interrupted" in listener.kinds(prompt_id))
