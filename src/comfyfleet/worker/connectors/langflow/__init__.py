"""The connector for LangFlow servers: background jobs from version 1.11 on, and older versions with losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfyfleet.ports.connector import ConnectorPlugin
from comfyfleet.worker.connectors.langflow.connector import LangFlow
from comfyfleet.worker.connectors.langflow.payload import SERVICE, LangFlowPayload
from comfyfleet.worker.connectors.langflow.settings import LangFlowSettings, read_settings


def _connect(address: str, options: Mapping[str, Any]) -> LangFlow:
    return LangFlow(address, read_settings(options))


PLUGIN = ConnectorPlugin(SERVICE, LangFlowPayload(), _connect)

__all__ = ["PLUGIN", "LangFlow", "LangFlowPayload", "LangFlowSettings"]
