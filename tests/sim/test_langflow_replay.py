"""The fake LangFlow is faithful: recorded conversations with a real server, played against it."""

from __future__ import annotations

import aiohttp
import pytest
from tests.sim._langflow_replay import LangFlowReplay, settings_for, trace_names

from comfyfleet.testing.fake_langflow import FakeLangFlow, HandClock, LangFlowFaults


async def replay(name: str, faults: LangFlowFaults | None = None) -> LangFlowReplay:
    clock = HandClock()
    async with (
        FakeLangFlow(settings_for(name), clock=clock, faults=faults) as server,
        aiohttp.ClientSession() as session,
    ):
        player = LangFlowReplay(name, server, clock, session)
        await player.play()
    return player


@pytest.mark.parametrize("name", trace_names())
async def test_the_fake_says_what_the_real_server_said(name: str) -> None:
    played = await replay(name)
    assert not played.differences, "\n".join(played.differences[:40])
    assert played.compared >= 3


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("01-create-flow-and-run", LangFlowFaults(missing_flows=frozenset({"lab-sleep"}))),
        ("02-run-stream-v1", LangFlowFaults(fail_runs=1)),
        ("04-workflows-v2-refusals", LangFlowFaults(refuses_key=True)),
        ("06-workflows-v2-background", LangFlowFaults(forgets_submits=1)),
        ("08-workflows-v2-background-failure", LangFlowFaults(out_of_memory=1)),
        ("16-files", LangFlowFaults(garbage="/files/")),
    ],
)
async def test_a_wrong_answer_makes_the_replay_fail(name: str, faults: LangFlowFaults) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.sim._langflow_replay._PATIENCE_S", 0.5)
        try:
            assert (await replay(name, faults)).differences
        except TimeoutError:
            # An event that never comes.
            return
