"""What a completed run teaches: how long a workflow takes with its models loaded, and how long they take to load."""

from __future__ import annotations

import msgspec

from comfyfleet.model.job import JobResult, NodeTiming
from comfyfleet.model.workflow import loaders_and_samplers
from comfyfleet.policy.run_lessons import ANY_MODELS, RunLesson, RunReport, is_load_key, lesson_of, load_key

BASE, STYLE = frozenset({"sd/base.safetensors"}), frozenset({"style.safetensors"})
GRAPH = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd\\base.safetensors"}},
    "2": {"class_type": "LoraLoader", "inputs": {"model": ["1", 0], "lora_name": "style.safetensors"}},
    "3": {"class_type": "KSampler", "inputs": {"model": ["2", 0], "latent_image": ["4", 0], "seed": 1}},
    "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 64}},
}
LOADERS, SAMPLERS = loaders_and_samplers(GRAPH)


def report(seconds: float, mean_s: float | None = None, *cached: str, **ran: float) -> RunReport:
    timings = tuple(NodeTiming(node.removeprefix("n"), 0.0, spent) for node, spent in ran.items())
    return RunReport(
        seconds, JobResult(timings=timings, cached_nodes=cached), LOADERS, SAMPLERS, BASE | STYLE, 4.0, mean_s
    )


def test_loaders_are_the_nodes_that_name_model_files_and_samplers_those_that_fill_a_latent() -> None:
    assert LOADERS == {"1": BASE, "2": STYLE}
    assert {"3"} == SAMPLERS


def test_a_run_whose_loaders_were_cached_says_how_long_the_workflow_takes() -> None:
    assert lesson_of(report(2.0, 5.0, "1", "2", n3=1.8)) == RunLesson(2.0)


def test_the_first_load_is_at_least_what_its_nodes_took() -> None:
    assert lesson_of(report(6.0, None, n1=3.0, n2=0.5, n3=2.0)) == RunLesson(2.5, BASE | STYLE, 3.5)


def test_once_the_warm_duration_is_known_the_rest_is_the_load() -> None:
    assert lesson_of(report(6.0, 1.0, n1=3.0, n2=0.5, n3=2.0)) == RunLesson(1.0, BASE | STYLE, 5.0)
    # Never less than the nodes took.
    assert lesson_of(report(6.0, 4.0, n1=3.0, n2=0.5, n3=2.0)) == RunLesson(2.5, BASE | STYLE, 3.5)


def test_a_style_that_is_loaded_beside_its_checkpoint_is_learned_alone() -> None:
    run = report(3.0, None, "1", n2=0.5, n3=2.0)
    for expected in (BASE | STYLE, STYLE, frozenset[str]()):
        assert lesson_of(msgspec.structs.replace(run, expected=expected)) == RunLesson(2.5, STYLE, 0.5)
    # What the job requires beside its graph belongs to it.
    also = msgspec.structs.replace(run, expected=STYLE | {"declared"})
    assert lesson_of(also) == RunLesson(2.5, STYLE | {"declared"}, 0.5)


def test_a_run_whose_sampler_was_cached_teaches_nothing() -> None:
    assert lesson_of(report(0.1, 5.0, "1", "2", "3")) == RunLesson(None)


def test_without_timings_the_lease_says_whether_models_were_loaded() -> None:
    silent = msgspec.structs.replace(report(6.0), result=JobResult())
    assert lesson_of(silent) == RunLesson(3.0), "at most half of it counts as load while neither is known"
    assert lesson_of(msgspec.structs.replace(silent, seconds=10.0)) == RunLesson(6.0)
    assert lesson_of(msgspec.structs.replace(silent, mean_s=1.5)) == RunLesson(1.5, BASE | STYLE, 4.5)
    assert lesson_of(msgspec.structs.replace(silent, mean_s=9.0)) == RunLesson(None)
    assert lesson_of(msgspec.structs.replace(silent, expected=frozenset(), mean_s=1.5)) == RunLesson(6.0)


def test_a_set_of_models_has_one_key_in_every_process() -> None:
    assert load_key(BASE | STYLE) == load_key(STYLE | BASE) != load_key(BASE)
    assert is_load_key(load_key(BASE)) and is_load_key(ANY_MODELS)
