"""Whatever happens to a job between two reads of its room: a watcher gets every fact once, the end with its result."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.engine._interleaving import STORIES, DeafBus, Scene, interleavings

from comfyfleet.engine.local_bus import LocalBus
from comfyfleet.hub.streams.job_channels import JobChannels
from comfyfleet.hub.streams.sse import Watcher

END = {
    ("completed", 1): {"result": {"outputs": {"2": {"round": [1]}}}},
    ("completed", 2): {"result": {"outputs": {"2": {"round": [2]}}}},
    ("failed", 1): {"error": "broken in round 1"},
    ("failed", 2): {"error": "broken in round 2"},
}


async def _stream(rooms: JobChannels, scene: Scene) -> list[dict[str, Any]]:
    """The facts that one connection is sent, to the end of its stream."""
    watcher: Watcher | None = None

    def wake() -> None:
        if watcher is not None:
            watcher.wake()

    room = await rooms.subscribe(scene.job_id, wake)
    watcher = Watcher(room, room.first(0))
    sent = b""
    while (chunk := await watcher.next()) is not None:
        sent += chunk
    frames = [frame for frame in sent.decode().split("\n\n") if frame.startswith("id: ")]
    return [msgspec.json.decode(frame.partition("data: ")[2]) for frame in frames]


def _problems(facts: list[dict[str, Any]]) -> str:
    if [fact["number"] for fact in facts] != list(range(1, len(facts) + 1)):
        return f"a gap or a repeat: {[fact['number'] for fact in facts]}"
    last = facts[-1]
    told = {"result": last["result"]} if "result" in last else {}
    if "error" in last:
        told["error"] = last["error"]["message"]
    if told != END.get((last["kind"], last["round"])):
        return f"{last['kind']} of round {last['round']} came with {told}"
    if any("result" in fact or "error" in fact for fact in facts[:-1]):
        return "a result without an end"
    return ""


async def _problem(scene: Scene, story: str, reads: tuple[int, ...]) -> str:
    async with scene:
        rooms = JobChannels(scene.watching)
        try:
            scene.plan(scene.stories[story], reads)
            early = asyncio.create_task(_stream(rooms, scene))
            await scene.come_to_rest()
            late = asyncio.create_task(_stream(rooms, scene))
            await scene.clock.advance(10)
            for name, watching in (("the first", early), ("one who came later", late)):
                if not watching.done():
                    watching.cancel()
                    return f"{name} waits for ever"
                if problem := _problems(await watching):
                    return f"{name}: {problem}"
            return "" if not len(rooms) else "the room stays open"
        finally:
            rooms.close()


@pytest.mark.parametrize("is_shared", [True, False], ids=["another hub", "this hub"])
@pytest.mark.parametrize("story", STORIES)
async def test_a_stream_ends_with_an_end_and_its_result_in_every_interleaving(
    story: str, is_shared: bool
) -> None:
    wrong = {}
    for reads in interleavings(STORIES[story], 7 if story == "completed" else 5):
        if problem := await _problem(Scene(is_shared=is_shared), story, reads):
            wrong[reads] = problem
    assert wrong == {}


@pytest.mark.parametrize("is_shared", [True, False], ids=["another hub", "this hub"])
async def test_a_bus_that_loses_every_message_keeps_no_stream_open(is_shared: bool) -> None:
    wrong = {}
    for reads in interleavings(2, 7):
        if problem := await _problem(Scene(is_shared=is_shared, bus=DeafBus(LocalBus())), "completed", reads):
            wrong[reads] = problem
    assert wrong == {}
