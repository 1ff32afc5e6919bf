"""A fleet of three hundred workers on servers of one release or of twenty, as an engine sees it.

Every release has a sampler of its own beside those that all have, so a graph that uses it is accepted by one group of
servers alone.
"""

from __future__ import annotations

from typing import Any

from bench.pooling import twelve_nodes
from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.node_classes import NodeCatalog, read_catalog
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.model.workflow import read_needs
from comfyfleet.ports import Store

WORKERS = 300
GROUPS = 20
_OTHER_CLASSES = 200


def workflow_of(release: int | None, seed: int = 1) -> dict[str, Any]:
    """A graph that every release accepts, or this one alone."""
    graph = twelve_nodes(seed)
    if release is not None:
        sampler = graph["5"]
        graph["5"] = {**sampler, "inputs": {**sampler["inputs"], "sampler_name": f"sampler-{release}"}}
    return graph


def catalog_of(release: int) -> NodeCatalog:
    """As `/object_info` would tell of the nodes of the workflow, and of many that it does not use."""
    described = {
        node["class_type"]: _described(node["inputs"], is_output=node["class_type"] == "SaveImage")
        for node in twelve_nodes(1).values()
    }
    described["KSampler"]["input"]["required"]["sampler_name"] = [["euler", "heun", f"sampler-{release}"]]
    for number in range(_OTHER_CLASSES):
        described[f"Other{number}"] = _described({"image": ["1", 0], "strength": 1.0})
    return read_catalog(described)


async def fleet_of(store: Store, groups: int) -> Engine:
    """With jobs waiting that tell its groups apart. Not entered: no timer of its own disturbs what is timed."""
    engine = Engine(store)
    needs = read_needs(twelve_nodes(1))
    catalogs = [catalog_of(release) for release in range(groups)]
    for number in range(WORKERS):
        catalog = catalogs[number % groups]
        service = Service(
            "comfyui", models=needs.models, node_classes=needs.node_classes, signature=catalog.signature()
        )
        worker = await engine.register(RegisterWorker(WorkerId(f"worker-{number}"), Capabilities((service,))))
        await engine.describe(worker.worker_id, catalog)
    for release in range(groups):
        await engine.submit(Submission(workflow_of(release)))
    await engine.submit(Submission(workflow_of(None)))
    profiles = {worker.profile for worker in await engine.workers()}
    assert len(profiles) == groups, f"{groups} groups of servers have {len(profiles)} profiles"
    return engine


def _described(inputs: dict[str, Any], *, is_output: bool = False) -> dict[str, Any]:
    return {
        "input": {"required": {name: [_type_of(value)] for name, value in inputs.items()}},
        "output": ["*"] * 3,
        "output_node": is_output,
        "python_module": "nodes",
    }


def _type_of(value: Any) -> str:
    if isinstance(value, list):
        return "*"
    return {int: "INT", float: "FLOAT"}.get(type(value), "STRING")
