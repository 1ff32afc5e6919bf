"""What is recalled of a graph is exactly what the check of the whole would find; what many jobs need is made once."""

from __future__ import annotations

import asyncio
import pickle
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench.pooling import twelve_nodes

from comfyfleet.engine import graph_reader
from comfyfleet.engine.engine import Engine
from comfyfleet.engine.graph_reader import GraphReader, GraphReading
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.job import Submission
from comfyfleet.model.workflow import read_needs
from comfyfleet.model.workflow_graph import InvalidWorkflow, decoded_node, read_node
from comfyfleet.model.workflow_hash import hash_workflow
from comfyfleet.stores.sqlite.store import SqliteStore


def _fresh(graph: dict[str, Any]) -> GraphReading:
    return GraphReader(5_000).read(graph)


def _changed(graph: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One of the things that may differ between two graphs: a literal, a seed, a file, a wire, a node, a name."""
    graph = {node_id: {**node, "inputs": dict(node["inputs"])} for node_id, node in graph.items()}
    match chance.randrange(7):
        case 0:
            graph["5"]["inputs"]["seed"] = chance.randrange(1_000)
        case 1:
            graph["5"]["inputs"]["seed"] = chance.choice([-1, -1.0, 1, True])
        case 2:
            graph["1"]["inputs"]["ckpt_name"] = chance.choice(["a.safetensors", "b.safetensors", "taesd"])
        case 3:
            graph["11"]["inputs"]["image"] = [
                chance.choice(["8", "99", "12", "11"]),
                chance.choice([0, 1, 2.5]),
            ]
        case 4:
            graph[chance.choice(["13", "14"])] = {"class_type": "LoadImage", "inputs": {"image": "in.png"}}
        case 5:
            graph[chance.choice(["1", "12"])]["class_type"] = chance.choice(["Other", ""])
        case 6:
            graph = dict(chance.sample(list(graph.items()), len(graph)))
    return graph


def test_a_graph_of_known_nodes_is_read_as_if_it_were_the_first() -> None:
    chance, reader = random.Random(7), GraphReader(5_000)
    refused = 0
    for number in range(600):
        graph = twelve_nodes(number % 3)
        for _ in range(chance.randrange(4)):
            graph = _changed(graph, chance)
        try:
            wanted = _fresh(graph)
        except InvalidWorkflow as refusal:
            refused += 1
            with pytest.raises(InvalidWorkflow) as told:
                reader.read(graph, is_own=True)
            assert (str(told.value), told.value.node_errors) == (str(refusal), refusal.node_errors)
            continue
        assert reader.read(graph, is_own=True) == wanted
        assert (wanted.workflow_hash, wanted.needs) == (hash_workflow(graph), read_needs(graph))
    assert 100 < refused < 500


_IDS = ["1", "2", "3", "nodes", "prompt"]
_NAMES = ["seed", "noise_seed", "image", "ckpt_name", "lora_name_1", "text", "x", ""]
_LITERALS: list[Any] = [
    *(-1, -1.0, 0, -0.0, 0.0, 1, 1.0, True, False, None, 2**64 - 1, 2**70, 1e22),
    *("a.safetensors", "b\\x.pt", "taesd", "", "in.png", "in.png [input]", "a.pt\n"),
    *([], {}, ["1"], [[1], "b.pt"], {"__value__": ["1", 0]}, {"a": "c.ckpt"}),
]


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else 1


def _any_value(chance: random.Random) -> Any:
    wire = [chance.choice([*_IDS, *_IDS, "gone"]), chance.choice([0, 0, 0, 0, 0, 0, 1, True, 2.5])]
    return chance.choice([wire, *chance.sample(_LITERALS, 6), _nested(chance.choice([1, 60, 61, 62]))])


def _alike(chance: random.Random) -> list[Any]:
    """Nodes that differ in one value, or in the order of their inputs alone."""
    names = chance.sample(_NAMES, chance.randrange(4))
    node: dict[str, Any] = {
        "class_type": chance.choice(["LoadImage", "VHS_LoadVideo", "KSampler", "Other"] * 20 + ["", 3]),
        "inputs": {name: _any_value(chance) for name in names},
    }
    more: list[Any] = [{}] * 20 + [{"_meta": {"title": "t"}}, {"_meta": _nested(70)}, {"inputs": None}]
    found = [node | chance.choice(more), chance.choice([node] * 20 + [None, []])]
    for name in names:
        wires = [[node_id, 0] for node_id in chance.sample(_IDS, 2)]
        values = [*wires, "in.png", "b.png", -1, _any_value(chance), _any_value(chance)]
        found += [node | {"inputs": {**node["inputs"], name: value}} for value in values]
    return [*found, node | {"inputs": dict(reversed(node["inputs"].items()))}]


def test_whatever_is_made_of_nodes_seen_before_is_read_as_the_check_reads_it() -> None:
    """Types, wires into nothing, cycles, depth, values that are equal and not the same: nothing slips through."""
    chance, reader, read = random.Random(11), GraphReader(4), 0
    for number in range(5_000):
        if number % 25 == 0:
            nodes = [node for _ in range(2) for node in _alike(chance)]
            names = _IDS[:: chance.choice([1, -1])][: chance.randrange(6)]
            graph = {name: chance.choice(nodes) for name in names}
        # One node after the other is changed, or all their names: what is remembered is of graphs nearly the same.
        graph |= {name: chance.choice(nodes) for name in names[number % 6 :][:1]}
        if number % 6 == 5:
            graph = dict(zip(reversed(graph), graph.values(), strict=True))
        text = msgspec.json.encode(graph)
        found: list[Any] = []
        decoded = msgspec.json.decode(text)
        for each, sent, is_own in (
            (GraphReader(4), decoded, False),
            (reader, decoded, True),
            (reader, msgspec.json.decode(text, type=dict[str, msgspec.Raw]), True),
        ):
            try:
                read_now = each.read(sent, is_own=is_own)
                # Numbers that are equal may be written in two ways.
                found.append((read_now, repr(read_now.graph)))
            except InvalidWorkflow as refusal:
                found.append((str(refusal), refusal.node_errors))
        assert found[0] == found[1] == found[2]
        read += isinstance(found[0][0], GraphReading)
    assert 500 < read < 4_500


def test_nodes_that_differ_in_a_seed_alone_share_what_they_are_made_of() -> None:
    reader = GraphReader(5_000)
    first, second = (reader.read(twelve_nodes(seed), is_own=True) for seed in (1, 2))
    assert second.workflow_hash is first.workflow_hash
    assert second.graph["1"] is first.graph["1"]
    assert second.graph["5"] != first.graph["5"]


def test_a_node_that_is_known_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, decoded = GraphReader(5_000), list[bytes]()

    def counted(content: Any) -> Any:
        decoded.append(bytes(content))
        return decoded_node(content)

    monkeypatch.setattr(graph_reader, "decoded_node", counted)
    for seed in (1, 2):
        sent = msgspec.json.decode(msgspec.json.encode(twelve_nodes(seed)), type=dict[str, msgspec.Raw])
        assert reader.read(sent, is_own=True) == _fresh(twelve_nodes(seed))
    assert len(decoded) == 12 + 1
    assert b'"seed":2' in decoded[-1]


def test_another_seed_does_not_make_another_structure_unless_it_asks_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, checked = GraphReader(5_000), list[str]()

    def counted(node_id: str, content: Any, graph: Any) -> Any:
        checked.append(node_id)
        return read_node(node_id, content, graph)

    monkeypatch.setattr(graph_reader, "read_node", counted)
    for seed in (1, 2, 3.5, -1, -1.0, -1, 4):
        graph = twelve_nodes(0)
        graph["5"]["inputs"]["seed"] = seed
        assert reader.read(graph, is_own=True) == _fresh(graph)
    assert len(set(checked[:12])) == 12 and checked[12:] == ["5", "5"], "those that ask, -1 and -1.0"


def test_a_node_that_is_no_json_is_refused_as_such() -> None:
    for text in (b'{"class_type":"\xff","inputs":{}}', b'{"class_type":"\\ud800","inputs":{}}', b"nul"):
        with pytest.raises(InvalidWorkflow, match="not valid JSON"):
            GraphReader(5_000).read({"1": msgspec.Raw(text)}, is_own=True)


def test_what_is_remembered_is_bounded_and_forgetting_changes_nothing() -> None:
    reader = GraphReader(5_000)
    for seed in range(10_000):
        graph = twelve_nodes(seed, kind=seed % 3_000)
        read_now = reader.read(graph, is_own=True)
        if seed % 1_000 == 0:
            assert read_now == _fresh(graph)
    assert len(reader._nodes) <= 4_096
    assert len(reader._graphs) <= 1_024
    assert len(reader._shapes) <= 4_096


def test_a_file_that_is_sent_within_the_graph_is_not_kept() -> None:
    """Some loading nodes take a whole image as text where others take a name."""
    reader = GraphReader(5_000)
    for number in range(20):
        graph = twelve_nodes(number)
        graph["4"] = {"class_type": "LoadImageBase64", "inputs": {"image": f"{number}" * 100_000}}
        assert reader.read(graph, is_own=True) == _fresh(graph)
        named = twelve_nodes(number) | {f"{number}" * 100_000: graph["1"]}
        assert reader.read(named, is_own=True) == _fresh(named)
    assert len(pickle.dumps((reader._nodes, reader._shapes, reader._graphs))) < 100_000


def test_a_graph_of_known_nodes_is_still_counted() -> None:
    reader = GraphReader(12)
    graph = twelve_nodes(1)
    reader.read(graph, is_own=True)
    with pytest.raises(InvalidWorkflow, match="13 nodes"):
        reader.read({**graph, "13": graph["4"]}, is_own=True)


def test_a_number_too_big_to_remember_is_judged_by_the_check() -> None:
    graph = twelve_nodes(2**70)
    assert GraphReader(12).read(graph, is_own=True) == _fresh(graph)


async def test_many_jobs_of_a_new_class_bring_it_into_the_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "fleet.db", SystemClock())
    put_class, calls = store.put_class, 0

    async def counted(*arguments: Any, **options: Any) -> bool:
        nonlocal calls
        calls += 1
        return await put_class(*arguments, **options)

    monkeypatch.setattr(store, "put_class", counted)
    async with Engine(store) as engine:
        await asyncio.gather(*(engine.submit(Submission(twelve_nodes(seed))) for seed in range(50)))
    assert calls == 1
