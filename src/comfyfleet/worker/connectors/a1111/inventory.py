"""Reads what a server of the A1111 family has: its flavour, models, samplers, scripts and memory.

`names.py` has the spelling of the names. A list that a flavour does not have is empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from comfyfleet.model.failure import ServiceFailed
from comfyfleet.model.worker import Gpu, Hardware, LiveState, Memory
from comfyfleet.worker.connectors.a1111.api import A1111Api
from comfyfleet.worker.connectors.a1111.failures import not_web_ui, refused_request
from comfyfleet.worker.connectors.a1111.names import (
    lora,
    module,
    plain,
    sampler,
    scheduler,
    script,
    upscaler,
    vae,
)
from comfyfleet.worker.connectors.comfyui.api import AnswerTooLarge, ApiAnswer, Unreachable

Flavour = Literal["a1111", "forge", "forge-classic", "sdnext"]
"""`a1111` is also reForge: nothing that matters here tells them from each other."""

GIGABYTE = 1024**3
FAKE_OPTION = "comfyfleet_fake"
"""Our fake server has this option, so that its worker is known as a fake."""
_HASH = re.compile(r"^(?P<name>.*?)(?: \[(?P<hash>[0-9a-fA-F]+)\])?$")
_INFO_MODEL = re.compile(r"(?:^|, )Model: (?P<name>[^,\n]+)")
_INFO_HASH = re.compile(r"(?:^|, )Model hash: (?P<hash>[0-9a-fA-F]+)")
_MAX_SIZE = 1 << 60


class ListedCheckpoint(msgspec.Struct, frozen=True):
    title: str
    """The name that the server understands."""
    names: frozenset[str]
    """Everything by which a job may name it."""
    short_names: frozenset[str]
    """What the server calls it in the answer to a run."""
    hash: str

    def is_used_in(self, name: str, found_hash: str) -> bool:
        """Whether an answer with this model name and hash was made with it."""
        if self.hash and found_hash:
            return self.hash.startswith(found_hash) or found_hash.startswith(self.hash)
        return name in self.short_names


class A1111Server(msgspec.Struct, frozen=True):
    """What one look found."""

    flavour: Flavour
    version: str
    checkpoints: tuple[ListedCheckpoint, ...]
    models: frozenset[str]
    node_classes: frozenset[str]
    hardware: Hardware
    live: LiveState
    option: str
    """The checkpoint of the server's options."""
    has_tasks: bool
    """It knows runs by our ids."""
    is_fake: bool = False


class _Lists:
    """Bounds all lists of a server together."""

    def __init__(self, api: A1111Api, timeout_s: float, most: int) -> None:
        self._api, self._timeout_s, self._most, self._left = api, timeout_s, most, most

    async def get(self, path: str) -> ApiAnswer:
        answer = await self._api.get(path, self._timeout_s)
        self._left -= answer.size
        if self._left < 0:
            words = f"its lists have more than {self._most} bytes together"
            self._api.on_too_much(words)
            raise AnswerTooLarge(words)
        return answer

    async def entries(self, path: str) -> list[Mapping[str, Any]] | None:
        """None: there is no such list."""
        answer = await self.get(f"/sdapi/v1/{path}")
        if not answer.is_ok or not isinstance(answer.body, list):
            return None
        return [each for each in answer.body if isinstance(each, Mapping)]

    async def object(self, path: str) -> Mapping[str, Any]:
        answer = await self.get(path)
        return answer.body if answer.is_ok and isinstance(answer.body, Mapping) else {}


async def ask(api: A1111Api, timeout_s: float, max_bytes: int) -> A1111Server:
    """Raises `Unreachable` if the server does not list its checkpoints, or has none."""
    lists = _Lists(api, timeout_s, max_bytes)
    checkpoints = await list_checkpoints(api, timeout_s)
    if not checkpoints:
        raise Unreachable("it lists no checkpoint. It is still starting, or its models folder is empty")
    vaes = await lists.entries("sd-vae")
    modules = await lists.entries("sd-modules")
    schedulers = await lists.entries("schedulers")
    version = await lists.object("/sdapi/v1/version")
    options = await lists.object("/sdapi/v1/options")
    models: set[str] = set().union(*(each.names for each in checkpoints))
    models |= {vae(name) for name in _names(vaes, "model_name")}
    models |= {module(name) for name in _names(modules, "model_name")}
    models |= {lora(name) for name in _names(await lists.entries("loras"), "name", "alias")}
    models |= {upscaler(name) for name in _names(await lists.entries("upscalers"), "name")}
    models |= {upscaler(name) for name in _names(await lists.entries("latent-upscale-modes"), "name")}
    classes = {sampler(name) for name in _names(await lists.entries("samplers"), "name")}
    classes |= {scheduler(name) for name in _names(schedulers, "name", "label")}
    classes |= set(_scripts(await lists.object("/sdapi/v1/scripts")))
    flavour: Flavour = "a1111"
    if "updated" in version or "app" in version:
        flavour = "sdnext"
    elif modules is not None:
        flavour = "forge"
    elif schedulers is None:
        flavour = "forge-classic"
    has_tasks = flavour != "sdnext" and (await lists.get("/internal/pending-tasks")).is_ok
    option = str(options.get("sd_model_checkpoint") or "")
    loaded = find_checkpoint(checkpoints, option)
    memory = await lists.object("/sdapi/v1/memory")
    return A1111Server(
        flavour=flavour,
        version=str(version.get("updated") or "")[:100],
        checkpoints=checkpoints,
        models=frozenset(models),
        node_classes=frozenset(classes),
        hardware=_hardware(memory),
        live=LiveState(
            _gigabytes(_part(memory, "cuda", "system").get("free")),
            _gigabytes(_part(memory, "ram").get("free")),
            loaded.names if loaded is not None else frozenset(),
        ),
        option=option,
        has_tasks=has_tasks,
        is_fake=options.get(FAKE_OPTION) is True,
    )


async def list_checkpoints(api: A1111Api, timeout_s: float) -> tuple[ListedCheckpoint, ...]:
    """Raises `Unreachable`, or `ServiceFailed` if the server refuses."""
    answer = await api.get("/sdapi/v1/sd-models", timeout_s)
    if not answer.is_ok:
        raise ServiceFailed(refused_request(answer.status, answer.body, "the request for its checkpoints"))
    if not isinstance(answer.body, list):
        raise Unreachable(not_web_ui(answer.status))
    return tuple(_checkpoint(each) for each in answer.body if isinstance(each, Mapping) and each.get("title"))


async def configured_checkpoint(api: A1111Api, timeout_s: float) -> str:
    """The checkpoint of the server's options; empty if it does not tell. Raises `Unreachable`."""
    answer = await api.get("/sdapi/v1/options", timeout_s)
    body = answer.body if answer.is_ok and isinstance(answer.body, Mapping) else {}
    return str(body.get("sd_model_checkpoint") or "")


def find_checkpoint(checkpoints: Iterable[ListedCheckpoint], wanted: str) -> ListedCheckpoint | None:
    """By any of its names. A server that has not hashed a checkpoint yet lists its title without the hash."""
    name = plain(wanted)
    listed = list(checkpoints)
    found = next((each for each in listed if name in each.names), None)
    if found is not None or not name:
        return found
    parts = _HASH.match(name)
    assert parts is not None
    return next((each for each in listed if not each.hash and parts["name"] in each.names), None)


def used_checkpoint(info: Mapping[str, Any]) -> tuple[str, str]:
    """The name and hash of the model in the answer to a run. Empty: the server does not tell."""
    name, found_hash = str(info.get("sd_model_name") or ""), str(info.get("sd_model_hash") or "")
    texts = info.get("infotexts")
    text = texts[0] if isinstance(texts, list) and texts and isinstance(texts[0], str) else ""
    # The settings are in the last line; a prompt may say anything.
    last = text.rpartition("\n")[2]
    if not name and (found := _INFO_MODEL.search(last)) is not None:
        name = found["name"].strip()
    if not found_hash and (found := _INFO_HASH.search(last)) is not None:
        found_hash = found["hash"]
    return name, found_hash


def _checkpoint(entry: Mapping[str, Any]) -> ListedCheckpoint:
    title = str(entry["title"])
    parts = _HASH.match(plain(title))
    assert parts is not None
    file = plain(str(entry.get("filename") or parts["name"])).rpartition("/")[2]
    stem = file.rpartition(".")[0] or file
    model_name = str(entry.get("model_name") or stem)
    known_hash = str(entry.get("hash") or "")
    names = {plain(title), parts["name"], plain(model_name), file, stem, known_hash}
    return ListedCheckpoint(
        title, frozenset(names - {""}), frozenset({stem, model_name, parts["name"]}), known_hash
    )


def _names(entries: list[Mapping[str, Any]] | None, *fields: str) -> Iterator[str]:
    for entry in entries or ():
        for field in fields:
            if isinstance(entry.get(field), str) and entry[field]:
                yield entry[field]


def _scripts(lists: Mapping[str, Any]) -> Iterator[str]:
    for route in ("txt2img", "img2img"):
        names = lists.get(route)
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str):
                yield script("txt2img" if route == "txt2img" else "img2img", name)


def _hardware(memory: Mapping[str, Any]) -> Hardware:
    total = _size(_part(memory, "cuda", "system").get("total"))
    # Whole gigabytes, rounded up: a card sold as 24 GB reports a little less, and jobs ask for 24.
    gpu = Gpu(1, float(math.ceil(total / GIGABYTE))) if total else Gpu()
    ram = _size(_part(memory, "ram").get("total"))
    return Hardware(gpu=gpu, memory=Memory(float(math.ceil(ram / GIGABYTE)) if ram else 0))


def _part(value: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for name in path:
        inner = value.get(name)
        value = inner if isinstance(inner, Mapping) else {}
    return value


def _gigabytes(value: Any) -> float | None:
    size = _size(value)
    return None if size is None else round(size / GIGABYTE, 2)


def _size(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < _MAX_SIZE else None
