"""The fake is faithful: recorded conversations with real servers, played against it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from tests.sim._replay import (
    LEFT_OUT_BODIES,
    LEFT_OUT_TRACES,
    TRACES,
    Replay,
    read_trace,
    settings_for,
    trace_names,
)

from comfyfleet.testing.fake_comfyui import FakeComfyUI, Faults, HandClock, NodeFault


@asynccontextmanager
async def replay_of(
    name: str, faults: Faults | None = None, patience_s: float = 5.0
) -> AsyncIterator[Replay]:
    clock = HandClock()
    settings = settings_for(name, read_trace(name))
    async with (
        FakeComfyUI(settings, clock=clock, faults=faults) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Replay(name, server, clock, session, patience_s)


@pytest.mark.parametrize("name", trace_names())
async def test_the_fake_says_what_the_real_server_said(name: str) -> None:
    async with replay_of(name) as replay:
        differences = await replay.play()
    assert not differences, "\n".join(differences)
    assert replay.compared >= 3


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("01-success", Faults(deaf_sockets=True)),
        ("01-success", Faults(fail_nodes=[NodeFault(class_type="ImageInvert")])),
        ("02-cached-rerun", Faults(fail_requests=1, fail_request_paths=["/history"])),
        ("04-progress-previews-with-metadata", Faults(never_start=True)),
        ("06-validation-errors", Faults(fail_requests=1, fail_request_paths=["/prompt"])),
        ("09-interrupt", Faults(dead_worker=True)),
        ("17-info-endpoints", Faults(added_models={"checkpoints": {"surprise.safetensors": 1.0}})),
    ],
)
async def test_a_wrong_answer_makes_the_replay_fail(name: str, faults: Faults) -> None:
    async with replay_of(name, faults, patience_s=0.1) as replay:
        assert await replay.play()


async def test_another_version_does_not_pass_for_the_recorded_one() -> None:
    clock = HandClock()
    settings = settings_for("06-validation-errors", read_trace("06-validation-errors"))
    async with FakeComfyUI(settings, clock=clock) as server, aiohttp.ClientSession() as session:
        # The newer recording against an older server.
        differences = await Replay("23-newer-server-cancel-and-ids", server, clock, session, 0.1).play()
    assert any("invalid_prompt_id" in difference or "status" in difference for difference in differences)


def test_every_recording_is_replayed_or_left_out_with_a_reason() -> None:
    recorded = {path.stem for path in TRACES.glob("*.jsonl")}
    assert recorded == set(trace_names()) | set(LEFT_OUT_TRACES)
    assert all(LEFT_OUT_TRACES.values()) and all(LEFT_OUT_BODIES.values())
    labels = {(name, event.get("for")) for name in trace_names() for event in read_trace(name)}
    assert set(LEFT_OUT_BODIES) <= labels
