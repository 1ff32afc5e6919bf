"""Files and words that describe a scenario, and what people are told about mistakes in them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from comfyfleet.policy.rules import Rules
from comfyfleet.simulation.runner import run_variant, variants_of
from comfyfleet.simulation.scenario import (
    JobStream,
    ScenarioFile,
    ScenarioMistake,
    WorkerGroup,
    build_scenario,
    read_scenario,
    read_worker,
)

FILE = """
seed = 7

[[workers]]
count = 2
vram_gb = 24
cache = "lru"

[[workers]]
name = "old"
vram_gb = 8
speed = 0.5
dies_every_s = 300

[[models]]
name = "sdxl.safetensors"
size_gb = 6.9
load_s = 2.8

[[models]]
name = "detail-lora.safetensors"
size_gb = 0.2
load_s = 0.4

[[workflows]]
name = "pictures"
models = ["sdxl.safetensors"]
run_s = 1.0
weight = 3

[[workflows]]
name = "details"
models = ["sdxl.safetensors", "detail-lora.safetensors"]
run_s = 1.2

[jobs]
count = 200
load = 0.6

[[tenants]]
name = "acme"
share = 9

[[tenants]]
name = "small"
share = 1
"""


def test_a_file_describes_servers_models_jobs_and_tenants(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    scenario = build_scenario(read_scenario(path))
    assert [server.name for server in scenario.servers] == ["gpu-1", "gpu-2", "old"]
    assert {job.tenant for job in scenario.jobs} == set(scenario.weights) == {"acme", "small"}
    assert len(scenario.jobs) == 200
    assert scenario.servers[2].absences
    for variant in variants_of(["first-come", "comfyfleet"]):
        assert run_variant(scenario, variant).unfinished == 0


def test_json_means_the_same_as_toml(tmp_path: Path) -> None:
    toml, json = tmp_path / "fleet.toml", tmp_path / "fleet.json"
    toml.write_text(FILE)
    json.write_bytes(msgspec.json.encode(read_scenario(toml)))
    assert read_scenario(json) == read_scenario(toml)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[workers]]\nspeeed = 2", "speeed"),
        ("[jobs]\nload = 'much'", "load"),
        ("seed = ", "fleet.toml"),
        ("[[workers]]\ncache = 'all'", "cache"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(ScenarioMistake, match=words):
        read_scenario(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": ()}, "there are no workers|0 workers"),
        ({"workers": (WorkerGroup(1, vram_gb=4.0),)}, r"needs 6.9 GB.*--add-worker 6.9GB"),
        ({"workers": (WorkerGroup(1, speed=0),)}, "speed is 0"),
        ({"jobs": JobStream(load=0.5, rate=2.0)}, "load and rate both say how fast"),
        ({"jobs": JobStream(rate=-1.0)}, "rate is -1"),
        ({"jobs": JobStream(count=0)}, "0 jobs"),
    ],
)
def test_a_scenario_that_cannot_be_played_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ScenarioMistake, match=words):
        build_scenario(msgspec.structs.replace(ScenarioFile(), **changes))


def test_a_worker_in_words() -> None:
    assert read_worker("24GB") == WorkerGroup(1, 24.0)
    assert read_worker("2x24GB speed=2 disk=0.5 cache=lru") == WorkerGroup(2, 24.0, 2.0, 0.5, "lru")
    for wrong in ("24", "x24GB", "24GB wheels=4", "24GB speed=fast", "24GB cache=all"):
        with pytest.raises(ScenarioMistake, match="24"):
            read_worker(wrong)


def test_patience_makes_one_variant_for_each_value() -> None:
    variants = variants_of(["first-come", "comfyfleet"], [0.0, 2.0])
    assert [each.label for each in variants] == [
        "first-come",
        "comfyfleet, patience 0",
        "comfyfleet, patience 2",
    ]
    assert [each.rules.patience for each in variants] == [Rules().patience, 0.0, 2.0]
