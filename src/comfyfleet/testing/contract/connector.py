"""The whole contract of connectors. A connector's test module only provides the scene with its server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio

from comfyfleet.testing.contract.connector_faults import (
    ConnectorFailureContract,
    ConnectorLossContract,
    HostileServerContract,
)
from comfyfleet.testing.contract.connector_runs import (
    ConnectorCancelContract,
    ConnectorInventoryContract,
    ConnectorReturnContract,
    ConnectorRunContract,
)
from comfyfleet.testing.contract.connector_scene import ConnectorBench, ConnectorScene

MakeScene = Callable[[], ConnectorScene]


class ConnectorContract(
    ConnectorRunContract,
    ConnectorCancelContract,
    ConnectorReturnContract,
    ConnectorInventoryContract,
    ConnectorFailureContract,
    ConnectorLossContract,
    HostileServerContract,
):
    """Needs one fixture, `make_scene`: makes a scene whose server is not started."""

    @pytest_asyncio.fixture
    async def bench(self, make_scene: MakeScene, tmp_path: Path) -> AsyncIterator[ConnectorBench]:
        scene = make_scene()
        await scene.start()
        try:
            connector = scene.connect()
            await connector.open()
            bench = ConnectorBench(scene, connector, tmp_path)
            try:
                yield bench
            finally:
                await bench.end_attempts()
                await connector.close()
        finally:
            await scene.stop()
