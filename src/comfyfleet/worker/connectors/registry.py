"""Connectors by name: the built-in ones, and those of installed packages under the entry point group
`comfyfleet.connectors`.

A module is imported when its connector is used. A broken package is reported and does not stop the others. A connector
needs only an address and settings, so the command line can name any: `--service NAME=ADDRESS`.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from comfyfleet.model.payload import PayloadFormat
from comfyfleet.ports import Connector, ConnectorPlugin

GROUP = "comfyfleet.connectors"

# A new connector adds its line: its module has a `PLUGIN`.
BUILT_IN: Mapping[str, str] = {
    "comfyui": "comfyfleet.worker.connectors.comfyui:PLUGIN",
    "a1111": "comfyfleet.worker.connectors.a1111:PLUGIN",
    "langflow": "comfyfleet.worker.connectors.langflow:PLUGIN",
    "simulated": "comfyfleet.worker.connectors.simulated:PLUGIN",
    "comfy_cloud": "comfyfleet.worker.connectors.comfy_cloud:PLUGIN",
}

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class ConnectorRegistry:
    """The connectors of one process. `installed` are the entry points of other packages."""

    def __init__(
        self, built_in: Mapping[str, str] = BUILT_IN, installed: Iterable[EntryPoint] | None = None
    ) -> None:
        if installed is None:
            installed = entry_points(group=GROUP)
        self._places = dict(built_in)
        self._built_in = frozenset(built_in)
        self._installed: dict[str, EntryPoint] = {}
        self._loaded: dict[str, ConnectorPlugin] = {}
        self.problems: dict[str, str] = {}
        """By name: why the connector of a package cannot be used. Each problem is also logged once."""
        for point in sorted(installed, key=lambda each: (each.name, package_of(each), each.value)):
            self._claim(point)

    def _claim(self, point: EntryPoint) -> None:
        name = point.name
        other = self._installed.get(name)
        if name in self._built_in:
            self._report(
                f"{package_of(point)}:{name}",
                f"the package {package_of(point)} offers a connector {name!r}, a name of ComfyFleet itself. "
                "Ask its author to rename it.",
            )
        elif not _NAME.fullmatch(name):
            self._report(
                name,
                f"the package {package_of(point)} offers a connector {name[:80]!r}: a name has lower-case letters, "
                "digits, _ and -. Ask its author to rename it.",
            )
        elif other is not None and other.value != point.value:
            self._report(
                name,
                f"the packages {package_of(other)} and {package_of(point)} both offer a connector {name!r}. "
                "Uninstall one of them.",
            )
        else:
            self._installed[name] = point

    def names(self) -> tuple[str, ...]:
        """The connectors that can be named. None is imported yet."""
        return (*self._places, *(name for name in self._installed if name not in self.problems))

    def plugin(self, name: str) -> ConnectorPlugin:
        """Raises `ValueError` for an unknown name, or one whose package is broken."""
        known = self._loaded.get(name)
        if known is not None:
            return known
        if name in self.problems:
            raise ValueError(self.problems[name])
        if name in self._places:
            module, _, attribute = self._places[name].partition(":")
            plugin = getattr(importlib.import_module(module), attribute)
            assert isinstance(plugin, ConnectorPlugin) and plugin.name == name, name
        elif name in self._installed:
            plugin = self._load(self._installed[name])
        else:
            raise ValueError(f"there is no connector for {name!r}; choose one of: {', '.join(self.names())}")
        self._loaded[name] = plugin
        return plugin

    def _load(self, point: EntryPoint) -> ConnectorPlugin:
        name, package = point.name, package_of(point)
        try:
            found = point.load()
            if not isinstance(found, ConnectorPlugin):
                raise TypeError(f"{point.value} is not a ConnectorPlugin but {type(found).__name__}")
            if found.name != name:
                raise ValueError(f"its ConnectorPlugin has the other name {found.name!r}")
            if not _NAME.fullmatch(found.payload.service):
                raise ValueError(f"its service has the name {found.payload.service[:80]!r}")
        # A package of somebody else may do anything when it is imported, but it must not stop this process.
        except (Exception, SystemExit) as error:
            message = (
                f"the connector {name!r} of the package {package} cannot be used: "
                f"{type(error).__name__}: {error}. Update or uninstall the package."
            )
            self._report(name, message)
            raise ValueError(message) from error
        return found

    def _report(self, name: str, message: str) -> None:
        self.problems[name] = message
        _LOG.warning("%s", message)

    def plugins(self) -> Iterator[ConnectorPlugin]:
        """Every connector that can be used, the built-in ones first."""
        for name in self.names():
            try:
                yield self.plugin(name)
            except ValueError:
                assert name in self.problems, "it was reported"

    def connect(self, name: str, address: str, settings: Mapping[str, Any] | None = None) -> Connector:
        """Raises `ValueError` for an unknown connector, and for a wrong address or setting."""
        return self.plugin(name).connect(address, settings or {})

    def payload_formats(self) -> dict[str, PayloadFormat]:
        """By service. If connectors of one service disagree, the first wins; built-in ones are first."""
        found: dict[str, tuple[str, PayloadFormat]] = {}
        for plugin in self.plugins():
            service = plugin.payload.service
            if service not in found:
                found[service] = (plugin.name, plugin.payload)
                continue
            first, known = found[service]
            if plugin.payload != known and plugin.payload.json_schema() != known.json_schema():
                _LOG.warning(
                    "The connectors %r and %r read payloads of %r differently: the hub reads them as %r does.",
                    first,
                    plugin.name,
                    service,
                    first,
                )
        return {service: payload for service, (_, payload) in found.items()}


def package_of(point: EntryPoint) -> str:
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"


@cache
def registry() -> ConnectorRegistry:
    """Of this process. Installed packages do not change while it runs."""
    return ConnectorRegistry()


def connect(name: str, address: str, settings: Mapping[str, Any] | None = None) -> Connector:
    return registry().connect(name, address, settings)


def names() -> tuple[str, ...]:
    return registry().names()


def payload_formats() -> dict[str, PayloadFormat]:
    return registry().payload_formats()
