"""Which values of a node the ComfyUI editor shows as widgets, and in which order: all it takes to read its files.

Read from a server's `/object_info`, which is megabytes; this is a few bytes for each input. What is done with it is
`conversion.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from comfyfleet.model.workflow_hash import MODEL_EXTENSIONS, RESOURCE_INPUTS

MAX_DEPTH = 8
"""Choices within choices of a dynamic combo."""
MAX_TEXT = 64 * 1024
"""A longer default is no text that a person wrote."""

# As in the editor's own table of widgets (`ComfyWidgets`); every other type is a socket and nothing else.
_WIDGET_TYPES = frozenset(
    [
        "INT",
        "FLOAT",
        "BOOLEAN",
        "STRING",
        "MARKDOWN",
        "COMBO",
        "COLOR",
        "BOUNDING_BOX",
        "CHART",
        "GALLERIA",
        "PAINTER",
        "COMPOSITOR",
        "TEXTAREA",
        "CURVE",
        "RANGE",
        "VIDEO_EDIT",
        "BOUNDING_BOXES",
        "COLORS",
    ]
)
_DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
_SEEDS = ("seed", "noise_seed")
_UPLOADS = ("image_upload", "animated_image_upload", "video_upload", "audio_upload")
_LIBRARIES = (*_UPLOADS, "file_upload", "remote")
_LARGEST = (1 << 64) - 1
_MAX_CHOICES = 1_000
"""A longer list is no list of modes."""

Trait = Literal["", "control", "control_and_filter", "curve", "button"]
"""`control`: a control_after_generate follows; `button`: the editor's own upload button, which is no input."""


class Widget(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    name: str
    default: Any = None
    """What the editor shows where a file has no value. None: nothing is known."""
    trait: Trait = ""
    choices: dict[str, tuple[Widget, ...]] = {}
    """Of a dynamic combo: the widgets that follow it when this was chosen."""


NodeDefinitions = Mapping[str, tuple[Widget, ...]]
"""The widgets of each node class, in the editor's order."""


def read_definitions(object_info: Mapping[str, Any]) -> dict[str, tuple[Widget, ...]]:
    """A class that cannot be understood has no entry; whatever else a server says of it is not needed here."""
    found: dict[str, tuple[Widget, ...]] = {}
    for name, content in object_info.items():
        if isinstance(content, Mapping) and isinstance(content.get("input"), Mapping):
            order = content.get("input_order")
            found[name] = tuple(_widgets(content["input"], order if isinstance(order, Mapping) else {}))
    return found


def _widgets(
    groups: Mapping[str, Any], order: Mapping[str, Any], prefix: str = "", depth: int = 0
) -> Iterator[Widget]:
    for group in ("required", "optional"):
        inputs = groups.get(group)
        if not isinstance(inputs, Mapping):
            continue
        names = order.get(group)
        if not isinstance(names, list) or set(map(str, names)) != set(inputs):
            names = list(inputs)
        has_button = False
        for name in names:
            kind, options = read_spec(inputs[name])
            # Of an optional input, "as an input by default" means that it has no value of its own.
            is_socket = options.get("forceInput") or (group == "optional" and options.get("defaultInput"))
            if is_socket:
                continue
            if kind == _DYNAMIC_COMBO and depth < MAX_DEPTH:
                yield _dynamic(prefix + name, options, depth)
            elif kind in _WIDGET_TYPES:
                has_button = has_button or any(options.get(upload) for upload in _UPLOADS)
                yield Widget(prefix + name, _default(name, kind, options), _trait(name, kind, options))
        if has_button:
            yield Widget("", trait="button")


def read_spec(spec: Any) -> tuple[str, Mapping[str, Any]]:
    """The type and the options of an input; a list of choices is a combo, as in older servers."""
    if not isinstance(spec, list) or not spec:
        return "", {}
    options: dict[str, Any] = dict(spec[1]) if len(spec) > 1 and isinstance(spec[1], Mapping) else {}
    if isinstance(spec[0], list):
        return "COMBO", {**options, "options": spec[0]}
    return str(options.get("widgetType") or spec[0]), options


def _dynamic(name: str, options: Mapping[str, Any], depth: int) -> Widget:
    choices: dict[str, tuple[Widget, ...]] = {}
    listed = options.get("options")
    for choice in listed if isinstance(listed, list) else ():
        if isinstance(choice, Mapping) and isinstance(choice.get("key"), str):
            inputs = choice.get("inputs")
            within = _widgets(inputs, {}, f"{name}.", depth + 1) if isinstance(inputs, Mapping) else ()
            choices[choice["key"]] = tuple(within)
    return Widget(name, options.get("default", next(iter(choices), None)), choices=choices)


def fixed_choices(name: str, options: Mapping[str, Any]) -> list[Any]:
    """The choices of a combo, where they come with the node's code. Empty: it has none, or they list what lies on the
    server's disk (models, pictures, folders), which differs from machine to machine."""
    choices = options.get("options")
    if not isinstance(choices, list) or len(choices) > _MAX_CHOICES:
        return []
    is_library = (
        any(options.get(library) for library in _LIBRARIES)
        or name.rstrip("0123456789") in RESOURCE_INPUTS
        or any(isinstance(choice, str) and _is_path(choice) for choice in choices)
    )
    return [] if is_library else choices


def _is_path(choice: str) -> bool:
    stem, _, extension = choice.rpartition(".")
    return (
        "/" in choice
        or "\\" in choice
        or choice.lower().endswith(MODEL_EXTENSIONS)
        or bool(stem and 1 < len(extension) <= 5 and extension.isalnum() and not extension.isdigit())
    )


def _default(name: str, kind: str, options: Mapping[str, Any]) -> Any:
    value = options.get("default")
    if value is None and kind == "COMBO":
        value = next(iter(fixed_choices(name, options)), None)
    if value is None:
        value = {"INT": 0, "FLOAT": 0, "BOOLEAN": False, "STRING": ""}.get(kind)
    return value if is_plain(value) and not (isinstance(value, str) and len(value) > MAX_TEXT) else None


def is_plain(value: Any) -> bool:
    """Whether it is the same for every reader of JSON: a text, a truth value, or a number of ordinary size."""
    return isinstance(value, str | bool) or (isinstance(value, int | float) and abs(value) <= _LARGEST)


def _trait(name: str, kind: str, options: Mapping[str, Any]) -> Trait:
    if kind == "CURVE":
        return "curve"
    told = options.get("control_after_generate")
    if kind == "COMBO":
        return "control_and_filter" if told else ""
    # A seed has one unless its node says that it has none.
    is_controlled = kind == "INT" and name in _SEEDS if told is None else told
    return "control" if is_controlled else ""
