"""What is wrong with a call is refused in words, before anything is done."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.pool._fleet import fleet, text_to_image

from comfyfleet import Affinity, Refusal, RefusalCode, Server, WorkflowPool, hash_workflow
from comfyfleet.worker.connectors.simulated import SimulatedConnector

NAN, ENDLESS = float("nan"), float("inf")


async def test_wrong_arguments_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no store for"):
        WorkflowPool(store="mongodb://somewhere")
    async with fleet() as it:
        for wrong, words in (
            ({"priority": 5000}, "outside"),
            ({"max_attempts": 0}, "at least 1"),
            ({"timeout": -1}, "negative"),
            ({"urgency": "now!"}, "not one of"),
            ({"metadata": {"key": object()}}, "plain JSON"),
            ({"metadata": {"key": "x" * 70_000}}, "metadata has"),
        ):
            with pytest.raises(Refusal, match=words):
                await it.pool.enqueue(text_to_image(), **wrong)
        with pytest.raises(Refusal, match=r"no workflow file not-there\.json in the folder /"):
            await it.pool.enqueue("not-there.json")
        with pytest.raises(Refusal, match=r"no workflow file /.*/not-there\.json$"):
            await it.pool.enqueue(tmp_path / "not-there.json")
        with pytest.raises(Refusal, match="cannot be read"):
            await it.pool.enqueue(tmp_path)
        with pytest.raises(Refusal, match="no job"):
            await it.pool.get_job("unknown")
        with pytest.raises(Refusal, match="needs a host"):
            await it.pool.add_server("http://")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"affinity_mode": "perfer"}, "'require' or 'prefer'"),
        ({"preferred_client_ids": "a"}, "a list of server ids"),
        ({"excluded_client_ids": "a"}, "a list of server ids"),
        ({"preferred_client_ids": ["b"]}, r"required servers \(b\) is in the pool; it has: a"),
        ({"include_outputs": "9"}, "a list of node ids"),
        ({"include_outputs": [9]}, "a list of node ids"),
        ({"include_outputs": ["99"]}, "does not have: 99; it has 3, 4"),
        ({"job_id": 7}, "a text that is not empty"),
        ({"job_id": ""}, "a text that is not empty"),
        ({"priority": "high"}, "a whole number"),
        ({"priority": True}, "a whole number"),
        ({"priority": 1.5}, "a whole number"),
        ({"metadata": [1]}, "a mapping"),
        ({"max_attempts": "3"}, "at least 1"),
        ({"timeout": "10"}, "number of seconds or a timedelta"),
        ({"timeout": NAN}, "finite"),
        ({"retry_delay": ENDLESS}, "finite"),
        ({"retry_delay": timedelta(seconds=-1)}, "not negative"),
        ({"node_execution_timeout": -1}, "not negative"),
        ({"deadline": NAN}, "finite"),
        ({"not_before": "tomorrow"}, "since the epoch"),
        ({"on_deadline": "panic"}, "'fail' or 'flag'"),
        ({"urgency": ["high"]}, "a text"),
        ({"attachments": ["cat.png"]}, r"attach\(\)"),
        ({"requirements": {}}, "a Requirements"),
        ({"require_workable": "yes"}, "True or False"),
    ],
)
async def test_a_job_with_a_mistake_in_it_is_refused(wrong: dict[str, Any], words: str) -> None:
    async with WorkflowPool([Server(id="a", connector=SimulatedConnector())]) as pool:
        with pytest.raises(Refusal, match=words) as caught:
            await pool.enqueue(text_to_image(), **wrong)
        assert caught.value.code is RefusalCode.INVALID_REQUEST
        assert (await pool.stats()).queued == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"servers": "http://gpu-a:8188"}, "servers must be a list of addresses"),
        ({"servers": None}, "servers must be a list"),
        ({"store": None}, "store must be a URL"),
        ({"cooldown": None}, "cooldown must be"),
        ({"cooldown": "60"}, "cooldown must be"),
        ({"affinity_wait": NAN}, "affinity_wait must be"),
        ({"patience": -1}, "patience must be"),
        ({"patience": NAN}, "patience must be"),
        ({"max_failures_before_block": 0}, "at least 1"),
        ({"max_attempts": None}, "at least 1"),
        ({"slots": 0}, "at least 1"),
        ({"failover": object()}, "FailoverStrategy"),
        ({"rules": {}}, "rules must be a Rules"),
        ({"agent": 1}, "agent must be an AgentSettings"),
        ({"comfyui": 1}, "comfyui must be a ComfyUISettings"),
        ({"workflow_affinities": ["x"]}, "an affinity is an Affinity"),
        ({"workflow_affinities": [Affinity("x", "gpu-a")]}, "a list of server ids"),
        ({"workflow_affinities": [Affinity("x", mode="both")]}, "'require' or 'prefer'"),  # type: ignore[arg-type]
    ],
)
def test_a_pool_with_a_mistake_in_it_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        WorkflowPool(**wrong)
    assert caught.value.code is RefusalCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "server",
    [8188, None, Server("http://gpu:8188", slots=0), Server("http://gpu:8188", slots=1.5), Server("")],  # type: ignore[arg-type]
)
async def test_what_is_no_server_is_refused(server: Any) -> None:
    async with WorkflowPool() as pool:
        with pytest.raises(Refusal) as caught:
            await pool.add_server(server)
        assert caught.value.code is RefusalCode.INVALID_REQUEST


async def test_an_affinity_that_nobody_of_the_pool_meets_is_refused_with_the_servers_there_are() -> None:
    async with WorkflowPool([Server(id="a", connector=SimulatedConnector())]) as pool:
        pool.set_affinity(Affinity(hash_workflow(text_to_image()), ["gone"]))
        with pytest.raises(Refusal, match="it has: a"):
            await pool.enqueue(text_to_image())
        # One that may come is no mistake beside one that is there, nor where others may do it.
        await pool.run(text_to_image(), preferred_client_ids=["gone", "a"])
        await pool.run(text_to_image(), preferred_client_ids=["gone"], affinity_mode="prefer")


async def test_waiting_and_priorities_are_checked_too() -> None:
    async with WorkflowPool() as pool:
        job_id = await pool.enqueue(text_to_image())
        with pytest.raises(Refusal, match="timeout must be"):
            await pool.wait(job_id, timeout="1")  # type: ignore[arg-type]
        with pytest.raises(Refusal, match="a whole number"):
            await pool.set_priority(job_id, "1")  # type: ignore[arg-type]
