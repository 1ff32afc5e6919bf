"""A hub in a thread of its own, and the command line in this process: many commands in the time of one process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.hub._hub import HubRig, running_hub

from comfyfleet.cli.main import main
from comfyfleet.hub.local_worker_api import LocalWorkerApi
from comfyfleet.model.access import Role
from comfyfleet.model.ids import WorkerId
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Connector, WorkerApi
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.simulated import SimulatedConnector


class Ended(NamedTuple):
    code: int
    output: str
    errors: str

    @property
    def json(self) -> Any:
        return json.loads(self.output)


Run = Callable[..., Ended]


class Address(NamedTuple):
    url: str
    keys: dict[Role, str]


@contextmanager
def hub_with_a_worker(
    folder: Path | None = None,
    *,
    databases: bool = False,
    is_open: bool = False,
    rules: Rules | None = None,
    connectors: Mapping[str, Connector] | None = None,
) -> Iterator[Address]:
    """One simulated worker, `gpu`, which takes a moment for each job, unless `connectors` has others by name. With
    a folder the hub keeps files, and with `databases` tenants, of which it has two there."""
    ready: list[Address] = []
    is_ready = threading.Event()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def live() -> None:
        async with AsyncExitStack() as stack:
            names = ("default", "other") if databases else ()
            urls = {name: f"sqlite:///{folder}/{name}.db" for name in names}
            rig = await stack.enter_async_context(
                running_hub(folder=folder, databases=urls, is_open=is_open, rules=rules)
            )
            api: WorkerApi = rig.engine if rig.assets is None else LocalWorkerApi(rig.engine, rig.assets)
            for name, connector in (connectors or {"gpu": SimulatedConnector()}).items():
                agent = await stack.enter_async_context(Agent(api, WorkerId(name), [connector]))
                await agent.wait_for_first_check()
            ready.append(_address(rig))
            is_ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(live()), daemon=True)
    thread.start()
    assert is_ready.wait(60), "the hub did not start"
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def _address(rig: HubRig) -> Address:
    return Address(rig.url, rig.keys)


def runner(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: Address, data: str
) -> Run:
    monkeypatch.setenv("COMFYFLEET_HUB", address.url)
    monkeypatch.setenv("COMFYFLEET_KEY", address.keys[Role.ADMIN])
    monkeypatch.setenv("COMFYFLEET_DATA", data)

    def run(*arguments: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in arguments])
        output, errors = capfd.readouterr()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 1, output, errors)

    return run
