"""The loads that the demo says first come, first served would have made."""

from __future__ import annotations

from tests.sim._client import fake

from comfyfleet.cli.demo_fleet import CARDS, KINDS, loaders_of, settings_of, stories, workflow_of
from comfyfleet.cli.demo_loads import PlayedJob, PlayedServer, count_first_come_first_served
from comfyfleet.testing.fake_comfyui import FakeSettings

BOTH = {"a": 1.0, "b": 1.0}


def job(number: int, *models: str, priority: int = 0, work_s: float = 1.0, at: float = 0.0) -> PlayedJob:
    return PlayedJob(f"job-{number}", priority, frozenset(models), work_s, at)


def server(number: int = 1, *models: str, speed: float = 1.0) -> PlayedServer:
    return PlayedServer(f"server-{number}", speed, dict.fromkeys(models or BOTH, 1.0))


def count(jobs: list[PlayedJob], *servers: PlayedServer) -> int:
    return count_first_come_first_served(jobs, servers or (server(),))


def test_a_server_keeps_the_models_of_its_last_job_only() -> None:
    assert count([job(n, name) for n, name in enumerate("aaa")]) == 1
    assert count([job(n, name) for n, name in enumerate("abab")]) == 4
    assert count([job(1, "a", "b"), job(2, "a"), job(3, "a", "b")]) == 3, "only what is missing is read"


def test_an_idle_server_takes_the_oldest_job_whatever_it_holds() -> None:
    jobs = [job(1, "a", work_s=10), job(2, "b"), job(3, "b", work_s=0.5), job(4, "a")]
    assert count(jobs, server(1), server(2)) == 3, "the second server runs b, b and then a"


def test_a_fast_server_is_idle_sooner() -> None:
    jobs = [job(1, "a", work_s=9), job(2, "b", work_s=9), job(3, "a", work_s=9)]
    assert count(jobs, server(1, speed=3), server(2)) == 2
    assert count(jobs, server(1), server(2, speed=3)) == 3


def test_a_higher_priority_goes_first() -> None:
    line = [job(1, "a"), job(2, "b"), job(3, "a", priority=1)]
    assert count(line) == 2, "a, a, b"
    assert count([job(1, "a"), job(2, "b"), job(3, "a")]) == 3


def test_a_job_waits_for_a_server_that_has_its_models() -> None:
    jobs = [job(1, "a", work_s=10), job(2, "a"), job(3, "b"), job(4, "a")]
    assert count(jobs, server(1, "a"), server(2, "b")) == 2


def test_a_job_comes_when_it_was_submitted_or_when_the_one_before_it_has_ended() -> None:
    late = [job(1, "a"), job(2, "b"), job(3, "a", at=2.0)]
    # The load and the work of the first take two seconds: the third is just in time to be behind the second.
    assert count(late) == 3
    followed = [job(1, "a"), job(2, "b", at=2.5), PlayedJob("after", 0, frozenset("a"), 1.0, 0.0, "job-1")]
    assert count(followed) == 2, "a, its follower, b"


async def test_the_rule_is_that_of_a_fake_server() -> None:
    """One after the other, as one server runs them: the played loads are those that the server counts."""
    everything = {name: size for card in CARDS for name, size in card.checkpoints.items()}
    card = next(card for card in CARDS if card.upscalers)
    shown = settings_of(card, 0.001, 0)
    models = {"checkpoints": everything, "upscale_models": card.upscalers}
    settings = FakeSettings(
        time_scale=0.001,
        models=models,
        extra_node_classes=shown.extra_node_classes,
    )
    line = [kind for story in stories() for kind in (story.kind, story.then) if kind is not None]
    assert set(line) == set(KINDS)
    async with fake(settings) as client:
        for number, kind in enumerate(line):
            graph = workflow_of(kind, str(number))
            for node in graph.values():
                if "seed" in node["inputs"]:
                    node["inputs"]["seed"] = number
            assert (await client.run(graph))["status"]["completed"]
        read = client.server.stats.model_loads
    jobs = [job(number, *loaders_of(kind).values()) for number, kind in enumerate(line)]
    only = PlayedServer("only", 1.0, dict.fromkeys([*everything, *card.upscalers], 1.0))
    assert count(jobs, only) == read
