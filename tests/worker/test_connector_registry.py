"""Connectors are found by name: built-in ones, and those of other packages by their entry points."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import msgspec
import pytest

from comfyfleet.model.payload import OpaqueFormat, PayloadReading
from comfyfleet.ports import Connector, ConnectorPlugin
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.registry import BUILT_IN, GROUP, ConnectorRegistry
from comfyfleet.worker.connectors.settings import converted_settings
from comfyfleet.worker.connectors.simulated import SimulatedConnector


class _Upper(msgspec.Struct, frozen=True):
    service: str

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        return OpaqueFormat(self.service).read({key.upper(): value for key, value in payload.items()})

    def json_schema(self) -> dict[str, Any]:
        return {"type": "object", "title": "upper"}


def _connect(address: str, settings: Mapping[str, Any]) -> Connector:
    return SimulatedConnector(address, live=None)


def _plugin(name: str, service: str | None = None) -> ConnectorPlugin:
    return ConnectorPlugin(name, _Upper(service or name), _connect)


def _entry(name: str, found: object, module: str = "") -> EntryPoint:
    """An entry point whose module has `found` as PLUGIN; an exception is raised when it is imported."""
    module = module or f"_plugin_{name}"
    made = ModuleType(module)
    if not isinstance(found, BaseException):
        made.PLUGIN = found  # type: ignore[attr-defined]
    sys.modules[module] = made
    return EntryPoint(name, f"{module}:PLUGIN", GROUP)


def test_every_built_in_connector_can_be_used_under_its_name() -> None:
    registry = ConnectorRegistry(installed=[])
    assert registry.names() == tuple(BUILT_IN)
    assert [plugin.name for plugin in registry.plugins()] == list(BUILT_IN)
    assert registry.problems == {}
    assert {"comfyui", "simulated"} <= registry.payload_formats().keys()


def test_a_package_adds_its_connector_by_an_entry_point() -> None:
    registry = ConnectorRegistry(installed=[_entry("upscaler", _plugin("upscaler"))])
    assert registry.names()[-1] == "upscaler"
    assert registry.connect("upscaler", "somewhere").service_name == "somewhere"
    read = registry.payload_formats()["upscaler"].read({"a": 1})
    assert read.payload == {"A": 1}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (ImportError("no"), "AttributeError"),
        (object(), "is not a ConnectorPlugin but object"),
        (_plugin("other"), "has the other name 'other'"),
        (_plugin("broken", "two words"), "'two words'"),
    ],
)
def test_a_broken_package_is_reported_and_does_not_stop_the_others(
    found: object, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = ConnectorRegistry(installed=[_entry("broken", found), _entry("good", _plugin("good"))])
    with caplog.at_level(logging.WARNING):
        assert "good" in registry.payload_formats()
    assert told in caplog.text and "_plugin_broken:PLUGIN" in caplog.text
    assert "broken" not in registry.names()
    with pytest.raises(ValueError, match="Update or uninstall the package"):
        registry.connect("broken", "x")
    # It is reported once, not with each use.
    assert len(caplog.records) == 1


def test_a_package_may_not_take_the_name_of_a_built_in_connector(caplog: pytest.LogCaptureFixture) -> None:
    registry = ConnectorRegistry(installed=[_entry("comfyui", _plugin("comfyui"))])
    assert registry.names().count("comfyui") == 1
    assert isinstance(registry.connect("comfyui", "gpu-a:8188"), ComfyUI)
    assert "_plugin_comfyui:PLUGIN offers a connector 'comfyui', a name of ComfyFleet itself" in caplog.text


def test_two_packages_may_not_take_one_name(caplog: pytest.LogCaptureFixture) -> None:
    one, two = _entry("same", _plugin("same"), "_one"), _entry("same", _plugin("same"), "_two")
    registry = ConnectorRegistry(installed=[two, one])
    assert "same" not in registry.names()
    with pytest.raises(ValueError, match=r"_one:PLUGIN and _two:PLUGIN both offer a connector 'same'"):
        registry.connect("same", "x")


def test_a_name_that_could_not_be_written_is_refused() -> None:
    registry = ConnectorRegistry(installed=[_entry("Two Words\x1b", _plugin("Two Words\x1b"), "_words")])
    assert registry.names() == tuple(BUILT_IN)
    (problem,) = registry.problems.values()
    assert "lower-case" in problem and "\x1b" not in problem


def test_the_built_in_format_wins_if_a_package_reads_the_same_service_differently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = ConnectorRegistry(installed=[_entry("faster", _plugin("faster", "simulated"))])
    assert registry.payload_formats()["simulated"].json_schema().get("title") != "upper"
    assert "'simulated' and 'faster' read payloads of 'simulated' differently" in caplog.text


class _Settings(msgspec.Struct, frozen=True):
    retries: int = 1
    exclusive: bool = True
    password: str = ""


def test_settings_of_the_environment_are_texts_of_the_right_type() -> None:
    assert converted_settings({"retries": "3", "exclusive": "false"}, _Settings) == _Settings(3, False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"retry": 1}, "there is no setting 'retry'; known: exclusive, password, retries"),
        ({"retries": "secret-word"}, "the setting 'retries' is not valid"),
        ({"password": ["secret-word"]}, "the setting 'password' is not valid"),
    ],
)
def test_a_wrong_setting_is_named_without_its_value(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        converted_settings(given, _Settings)
    assert "secret-word" not in str(refused.value)


def test_the_settings_of_a_connector_reach_it() -> None:
    registry = ConnectorRegistry(installed=[])
    made = registry.connect("comfyui", "gpu-a:8188", {"request_s": "3", "headers": {"x-key": "1"}})
    assert isinstance(made, ComfyUI)
    assert (made.settings.request_s, made.settings.headers) == (3.0, {"x-key": "1"})
    with pytest.raises(ValueError, match="there is no setting 'requests_s'"):
        registry.connect("comfyui", "gpu-a:8188", {"requests_s": 3})
