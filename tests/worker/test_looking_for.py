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
    assert server.seek_due_at == float("inf"), "nobody waits for anything"
    assert server.look_for(["a.pt", "sub\\b.pt"])
    assert not server.look_for(["a.pt", "sub/b.pt"]), "they are the same"
    assert server.seek_due_at == float("-inf")
    await server.look()
    usual = server.look_due_at
    await server.seek()
    assert server.look_due_at == usual
    connector.has = frozenset({"sub/b.pt"})
    await server.seek()
    assert server.look_due_at == float("-inf"), "at once"
    assert await server.look()
    await server.seek()
    assert server.look_due_at >= usual
    assert connector.asked == [{"a.pt", "sub/b.pt"}, {"a.pt", "sub/b.pt"}, {"a.pt"}]
    server.look_for([])
    assert server.seek_due_at == float("inf")


async def test_a_server_that_cannot_be_asked_by_name_is_looked_at_less_and_less_often() -> None:
    server = MonitoredServer(SimulatedConnector(), SETTINGS)
    await server.look()
    usual = server.look_due_at
    assert server.look_for(["a.pt"]) and server.look_due_at == float("-inf")
    pauses = []
    for _ in range(3):
        await server.look()
        pauses.append(server.look_due_at - server._looked_at)
    assert pauses == [10.0, 20.0, 40.0]
    server.look_for([])
    assert server.look_due_at >= usual


async def test_a_server_that_does_not_answer_the_question_is_asked_again_later() -> None:
    class Broken(Finding):
        async def find(self, names: frozenset[str]) -> frozenset[str]:
            raise OSError("away")

    server = MonitoredServer(Broken(), SETTINGS)
    server.look_for(["a.pt"])
    await server.seek()
    assert not server.wants_look and float("-inf") < server.seek_due_at < float("inf")
