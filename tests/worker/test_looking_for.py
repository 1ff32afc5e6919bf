"""What jobs wait for and a server lacks: asked for by name where the connector can, looked for as a whole where not."""

from __future__ import annotations

from comfyfleet.worker.connectors.simulated import SimulatedConnector
from comfyfleet.worker.servers import MonitoredServer
from comfyfleet.worker.settings import AgentSettings

SETTINGS = AgentSettings(seek_interval_s=5.0, missing_interval_s=10.0, inventory_interval_s=300.0)


class Finding(SimulatedConnector):
    """Has what it is given, and counts how often it was asked for what."""

    def __init__(self) -> None:
        super().__init__()
        self.has: frozenset[str] = frozenset()
        self.asked: list[frozenset[str]] = []

    async def find(self, names: frozenset[str]) -> frozenset[str]:
        self.asked.append(names)
        return names & self.has


async def test_what_is_found_by_name_makes_one_look_due_and_is_not_asked_for_again() -> None:
    connector = Finding()
    server = MonitoredServer(connector, SETTINGS)
    assert server.find_due_at == float("inf"), "nobody waits for anything"
    assert server.set_wanted(["a.pt", "sub\\b.pt"])
    assert not server.set_wanted(["a.pt", "sub/b.pt"]), "they are the same"
    assert server.find_due_at == float("-inf")
    await server.read_inventory()
    usual = server.inventory_due_at
    await server.find_wanted()
    assert server.inventory_due_at == usual
    connector.has = frozenset({"sub/b.pt"})
    await server.find_wanted()
    assert server.inventory_due_at == float("-inf"), "at once"
    assert await server.read_inventory()
    await server.find_wanted()
    assert server.inventory_due_at >= usual
    assert connector.asked == [{"a.pt", "sub/b.pt"}, {"a.pt", "sub/b.pt"}, {"a.pt"}]
    server.set_wanted([])
    assert server.find_due_at == float("inf")


async def test_a_server_that_cannot_be_asked_by_name_is_looked_at_less_and_less_often() -> None:
    server = MonitoredServer(SimulatedConnector(), SETTINGS)
    await server.read_inventory()
    usual = server.inventory_due_at
    assert server.set_wanted(["a.pt"]) and server.inventory_due_at == float("-inf")
    pauses = []
    for _ in range(3):
        await server.read_inventory()
        pauses.append(server.inventory_due_at - server._looked_at)
    assert pauses == [10.0, 20.0, 40.0]
    server.set_wanted([])
    assert server.inventory_due_at >= usual


async def test_a_server_that_does_not_answer_the_question_is_asked_again_later() -> None:
    class Broken(Finding):
        async def find(self, names: frozenset[str]) -> frozenset[str]:
            raise OSError("away")

    server = MonitoredServer(Broken(), SETTINGS)
    server.set_wanted(["a.pt"])
    await server.find_wanted()
    assert not server.needs_inventory and float("-inf") < server.find_due_at < float("inf")
