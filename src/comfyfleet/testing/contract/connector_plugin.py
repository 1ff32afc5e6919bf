"""The contract of a connector's plugin: how it is named, found and made, and its payload format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from comfyfleet.model.payload import PayloadFormat
from comfyfleet.ports import ConnectorPlugin
from comfyfleet.testing.contract.payload_format import PayloadFormatContract

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class ConnectorPluginContract(PayloadFormatContract):
    """Inherit it and set the class attributes, also those of `PayloadFormatContract` except `payload_format`."""

    plugin: ConnectorPlugin
    address: str
    """A valid address. Nobody has to listen there."""
    wrong_addresses: Sequence[str] = ()
    settings: Mapping[str, Any] = {}
    """Those that the connector requires, such as a key."""

    @property
    def payload_format(self) -> PayloadFormat:  # type: ignore[override]
        return self.plugin.payload

    def test_its_names_can_be_written_on_a_command_line(self) -> None:
        assert _NAME.fullmatch(self.plugin.name)
        assert _NAME.fullmatch(self.plugin.payload.service)

    async def test_it_makes_a_connector_of_its_service_without_connecting(self) -> None:
        connector = self.plugin.connect(self.address, self.settings)
        assert connector.service_name == self.plugin.payload.service
        await connector.close()

    def test_a_wrong_address_is_refused_at_once(self) -> None:
        for address in self.wrong_addresses:
            with pytest.raises(ValueError, match=r"\w"):
                self.plugin.connect(address, self.settings)

    def test_a_setting_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(ValueError, match="no_such_setting"):
            self.plugin.connect(self.address, {**self.settings, "no_such_setting": 1})
