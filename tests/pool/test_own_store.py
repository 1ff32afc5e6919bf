"""A store that is no part of the package: a pool and a hub work on it as on any other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance._process import CLI, read_until, started
from tests.hub._hub import graph
from tests.pool._fleet import text_to_image

from comfyfleet import FleetClient, JobResult, Refusal, Server, WorkflowPool
from comfyfleet.engine.system import SystemClock
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.worker.connectors.simulated import SimulatedConnector

MODULE = """
from comfyfleet.stores.memory import MemoryStore

class MyStore:
    def __init__(self, clock):
        self._inner = MemoryStore(clock)

    def __getattr__(self, name):
        return getattr(self._inner, name)
"""


class Wrapped:
    """Somebody's own class, which has no relation to ours: it passes everything on and counts it."""

    def __init__(self, clock: Clock) -> None:
        self._inner = MemoryStore(clock)
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self._inner, name)


async def test_a_pool_works_on_a_store_that_somebody_made() -> None:
    store: Any = Wrapped(SystemClock())
    accepted: Store = store
    servers = [Server(id="gpu", connector=SimulatedConnector())]
    async with WorkflowPool(servers, store=accepted) as pool:
        async with asyncio.timeout(60):
            result = await pool.run(text_to_image())
        assert isinstance(result, JobResult)
    assert store.calls["enqueue"] and store.calls["write"], "its own methods were asked"


@pytest.mark.parametrize("wrong", [object(), 5, None, ["memory:"]])
def test_what_is_no_store_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(Refusal, match="store"):
        WorkflowPool([], store=wrong)


def test_what_lacks_a_part_of_a_store_is_refused_with_its_name() -> None:
    class Half:
        def lease(self) -> None: ...

    half: Any = Half()
    with pytest.raises(Refusal, match=r"a Half is not a store: it lacks .*heartbeat"):
        WorkflowPool([], store=half)


class Odd(Wrapped):
    """One whose parts are replaced by others."""

    def __init__(self, **others: Any) -> None:
        super().__init__(SystemClock())
        self.__dict__.update(others)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"enqueue": None}, "enqueue is not a method"),
        ({"lease": lambda job_id: None}, r"lease does not take \(job_id, offer\)"),
        ({"due": lambda limit: None}, r"due does not take \(limit, after\)"),
        ({"put_profile": lambda profile, fits, version_: None}, r"put_profile does not take"),
        ({"records": object()}, r"it lacks records.by_reference, records.get, records.listing"),
        ({"documents": None}, r"it lacks documents.collections, documents.get"),
        ({"peer_channel": object()}, r"it lacks peer_channel.announce"),
        ({"epoch": "1"}, "epoch is a str and not a int"),
        ({"is_shared": lambda: True}, "is_shared is a function and not a bool"),
    ],
)
def test_a_part_that_is_none_is_refused_at_once_with_its_name(others: dict[str, Any], words: str) -> None:
    odd: Any = Odd(**others)
    with pytest.raises(Refusal, match=words):
        WorkflowPool([], store=odd)


def test_a_class_is_no_store_and_a_property_may_raise_anything() -> None:
    class Raises(Wrapped):
        @property
        def records(self) -> None:
            raise RuntimeError("not connected yet")

    unmade: Any = MemoryStore
    raises: Any = Raises(SystemClock())
    with pytest.raises(Refusal, match=r"MemoryStore is a class, not a store: .* MemoryStore\(clock\)"):
        WorkflowPool([], store=unmade)
    with pytest.raises(Refusal, match=r"records raises RuntimeError \(not connected yet\)"):
        WorkflowPool([], store=raises)


async def test_what_a_store_raises_when_it_is_opened_is_told_and_not_what_it_raises_when_it_is_closed() -> (
    None
):
    class Unreachable(Wrapped):
        async def open(self) -> None:
            raise OSError("the disk is away")

        async def close(self) -> None:
            raise AttributeError("no connection")

    store: Any = Unreachable(SystemClock())
    with pytest.raises(OSError, match="the disk is away"):
        await WorkflowPool([], store=store).start()


async def test_a_hub_and_its_commands_take_one_by_the_name_of_its_module(tmp_path: Path) -> None:
    (tmp_path / "my_store.py").write_text(MODULE)
    hub = (
        *CLI,
        "hub",
        "--open",
        "--port",
        "0",
        "--data",
        tmp_path / "data",
        "--store",
        "python:my_store:MyStore",
    )
    with started(*hub, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}) as process:
        lines = await asyncio.to_thread(read_until, process, lambda line: "answers at" in line)
        async with FleetClient(lines[-1].split()[-1]) as client:
            job = await client.submit(graph())
            assert (await client.get(job.id)).status == "queued"


@pytest.mark.parametrize(
    "url", ["python:", "python:nowhere:MyStore", "python:json:MyStore", "python:json:loads"]
)
def test_a_name_that_leads_to_no_store_is_refused_in_words(url: str) -> None:
    with pytest.raises(Refusal, match=r"write python:MODULE:NAME, where NAME\(clock\) makes one"):
        WorkflowPool([], store=url)


def test_a_module_that_cannot_be_imported_is_told_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_store.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Refusal, match=r"python:MODULE:NAME.*\(RuntimeError: no licence\)"):
        WorkflowPool([], store="python:broken_store:Store")
