"""Reads what a server has: node classes, models, GPU and memory. `BootWatch` notices restarts.

No single list of ComfyUI is complete, so the models are the union of all lists.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from comfyfleet.model.node_classes import NodeCatalog, read_catalog
from comfyfleet.model.worker import Gpu, Hardware, Memory, Service
from comfyfleet.worker.connectors.comfyui.api import AnswerTooLarge, ApiAnswer, ComfyApi, Unreachable
from comfyfleet.worker.connectors.comfyui.failures import choices_of, looks_like_model
from comfyfleet.worker.connectors.comfyui.prompt_state import parse_version

GIGABYTE = 1024**3
FAKE = "(main, fake)"
MAX_FOLDERS = 200
_MAX_SIZE = 1 << 60
_MAX_FIND_BYTES = 1 << 26
_MAX_CLASSES_ASKED = 50
NOT_MODELS = frozenset({"configs", "custom_nodes"})
_LAST_UNCHECKED = (0, 7, 0)
"""The last release that accepts any value for a combo of a new-style node."""
_DEVICE = re.compile(r"^(?:\w+:\d+ )?(?P<name>.*?)(?: : .*)?$")


class ServerMachine(msgspec.Struct, frozen=True):
    version: str | None = None
    hardware: Hardware = Hardware()
    free_vram_gb: float | None = None
    available_ram_gb: float | None = None
    is_fake: bool = False


class BootWatch:
    """Notices a server's restart by signs, because no endpoint reports one.

    The signs: connections refused after the WebSocket was lost; queue numbers that begin again; a finished
    prompt that is unknown after the WebSocket was lost. A value is unique across connectors.
    """

    def __init__(self) -> None:
        self._instance = uuid.uuid4().hex[:12]
        self._count = 0
        self._highest: float | None = None
        self.remembered: str | None = None
        """A prompt id that the server's history had."""

    @property
    def value(self) -> str:
        return f"{self._instance}-{self._count}"

    def restarted(self) -> None:
        self._count += 1
        self._highest = None
        self.remembered = None

    def numbered(self, number: float | None, under_way: int) -> bool:
        """Whether the queue number of a new submit shows a restart. Other submits may be answered late."""
        if number is None:
            return False
        is_reset = self._highest is not None and number + under_way < self._highest
        if is_reset:
            self.restarted()
        self._highest = max(number, self._highest or 0)
        return is_reset


async def ask(
    api: ComfyApi, timeout_s: float, providers: tuple[str, ...], max_bytes: int = 1 << 28
) -> tuple[Service, ServerMachine, NodeCatalog]:
    """Raises `Unreachable` if the server does not return its system stats or its nodes."""
    budget = _Budget(api, timeout_s, max_bytes)
    stats = await _object(budget, "/system_stats")
    nodes = await _object(budget, "/object_info")
    embeddings = await _names(budget, "/embeddings")
    folders = await _names(budget, "/models")
    listings = [
        await _names(budget, f"/models/{quote(folder, safe='')}")
        for folder in folders[:MAX_FOLDERS]
        if folder not in NOT_MODELS
    ]
    # In a thread: a catalogue has thousands of nodes.
    return await asyncio.to_thread(_read, stats, nodes, [embeddings, *listings], providers)


async def find(api: ComfyApi, timeout_s: float, names: frozenset[str]) -> frozenset[str]:
    """Which of these the server has. It reads the model lists and asks for node classes one by one."""
    budget = _Budget(api, timeout_s, _MAX_FIND_BYTES)
    found = set()
    classes = [name for name in names if not looks_like_model(name)]
    for name in sorted(classes)[:_MAX_CLASSES_ASKED]:
        answer = await budget.get(f"/object_info/{quote(name, safe='')}")
        if answer.is_ok and isinstance(answer.body, dict) and name in answer.body:
            found.add(name)
    models = names.difference(classes)
    if models:
        for folder in (await _names(budget, "/models"))[:MAX_FOLDERS]:
            if folder in NOT_MODELS:
                continue
            listed = {
                each.replace("\\", "/") for each in await _names(budget, f"/models/{quote(folder, safe='')}")
            }
            # A name without a folder matches in any folder.
            listed |= {each.rpartition("/")[2] for each in listed}
            found |= models & listed
    return frozenset(found)


def _read(
    stats: dict[str, Any], nodes: dict[str, Any], listings: list[list[str]], providers: tuple[str, ...]
) -> tuple[Service, ServerMachine, NodeCatalog]:
    machine = read_machine(stats)
    models = combo_models(nodes).union(*listings)
    is_newer = (parse_version(machine.version) or ()) > _LAST_UNCHECKED
    catalog = read_catalog(nodes, checks_new_style=is_newer)
    service = Service(
        name="comfyui",
        providers=providers,
        version=machine.version,
        # A graph names models with '/' between folders, on any operating system.
        models=frozenset(model.replace("\\", "/") for model in models),
        node_classes=frozenset(nodes),
        signature=_signature(catalog),
    )
    return service, machine, catalog


def _signature(catalog: NodeCatalog) -> str | None:
    try:
        return catalog.signature()
    except (ValueError, OverflowError):
        # Text or numbers that JSON cannot represent: such servers are compared by trying.
        return None


def combo_models(object_info: Mapping[str, Any]) -> set[str]:
    """The model files among the choices of all nodes' inputs."""
    found: set[str] = set()
    for content in object_info.values():
        inputs = content.get("input") if isinstance(content, Mapping) else None
        for group in inputs.values() if isinstance(inputs, Mapping) else ():
            for config in group.values() if isinstance(group, Mapping) else ():
                found.update(filter(looks_like_model, choices_of(config)))
    return found


def read_machine(stats: Mapping[str, Any]) -> ServerMachine:
    system = stats.get("system")
    system = system if isinstance(system, Mapping) else {}
    listing = stats.get("devices")
    devices = [
        device
        for device in (listing if isinstance(listing, list) else [])
        if isinstance(device, Mapping) and device.get("type") != "cpu"
    ]
    version = system.get("comfyui_version")
    return ServerMachine(
        version=version if isinstance(version, str) else None,
        hardware=Hardware(gpu=_gpu(devices), memory=Memory(_sold_gb(system.get("ram_total")))),
        free_vram_gb=_smallest(device.get("vram_free") for device in devices),
        available_ram_gb=_smallest([system.get("ram_free")]),
        is_fake=is_fake(stats),
    )


def is_fake(stats: Mapping[str, Any]) -> bool:
    """Our fake servers say so in their Python version, so their answer has the shape of a real one."""
    system = stats.get("system")
    return isinstance(system, Mapping) and FAKE in str(system.get("python_version"))


def _gpu(devices: list[Mapping[str, Any]]) -> Gpu:
    if not devices:
        return Gpu()
    found = _DEVICE.match(str(devices[0].get("name") or ""))
    smallest = min(_sold_gb(device.get("vram_total")) for device in devices)
    return Gpu(len(devices), smallest, found["name"].strip() if found else "")


def _sold_gb(size: Any) -> float:
    """Whole gigabytes, rounded up: a card sold as 24 GB reports a little less, and jobs ask for 24."""
    known = _size(size)
    return float(math.ceil(known / GIGABYTE)) if known is not None and known > 0 else 0.0


def _smallest(sizes: Iterable[Any]) -> float | None:
    known = [size for size in map(_size, sizes) if size is not None]
    return round(min(known) / GIGABYTE, 2) if known else None


def _size(value: Any) -> float | None:
    """A server's JSON may contain NaN, infinities and integers of any length."""
    return float(value) if isinstance(value, int | float) and abs(value) < _MAX_SIZE else None


class _Budget:
    """Bounds all lists of a server together: there may be hundreds."""

    def __init__(self, api: ComfyApi, timeout_s: float, most: int) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._most = most
        self._left = most

    async def get(self, path: str) -> ApiAnswer:
        answer = await self._api.get(path, self._timeout_s)
        self._left -= answer.size
        if self._left < 0:
            words = f"its lists of nodes and models have more than {self._most} bytes together"
            self._api.on_too_much(words)
            raise AnswerTooLarge(words)
        return answer


async def _object(budget: _Budget, path: str) -> dict[str, Any]:
    answer = await budget.get(path)
    if answer.is_ok and isinstance(answer.body, dict):
        return answer.body
    raise Unreachable(f"the server answered {answer.status} to {path}")


async def _names(budget: _Budget, path: str) -> list[str]:
    """Older servers may not have this list."""
    answer = await budget.get(path)
    if not answer.is_ok or not isinstance(answer.body, list):
        return []
    return [name for name in answer.body if isinstance(name, str)]
