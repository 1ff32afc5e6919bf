"""What a server's `/object_info` says of each node class: the widgets that the editor shows, and what inputs accept.

`editor_conversion.py` uses the widgets, `policy/acceptance.py` the signatures. Texts, prices and file lists are left
out, so servers with equal node versions have equal signatures whatever models and pictures they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from comfyfleet.model.workflow_hash import MODEL_EXTENSIONS, RESOURCE_INPUTS

MAX_DEPTH = 8
"""Nesting of dynamic combos."""
MAX_TEXT = 64 * 1024
"""A longer default is not a text that a person wrote."""

# As in the editor's table `ComfyWidgets`. Every other type is only a socket.
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
"""A longer list is not a list of modes."""

Trait = Literal["", "control", "control_and_filter", "curve", "button"]
"""`control`: a control_after_generate follows. `button`: the editor's upload button, which is not an input."""


class Widget(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    name: str
    default: Any = None
    """The editor's value if the file has none. None: not known."""
    trait: Trait = ""
    choices: dict[str, tuple[Widget, ...]] = {}
    """For a dynamic combo: the widgets that follow it, by choice."""


NodeDefinitions = Mapping[str, tuple[Widget, ...]]
"""The widgets of each node class, in the editor's order."""


def read_definitions(object_info: Mapping[str, Any]) -> dict[str, tuple[Widget, ...]]:
    """The widgets of each class. A class with unknown content has no entry."""
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
            # An optional input with `defaultInput` has no widget value.
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
    """The type and options of an input. Older servers send a list of choices in place of the type COMBO."""
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
    """The choices of a combo that the node's code defines. Empty if there are none, or if they list files on the
    server's disk, which differ between machines."""
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
    """Whether every JSON reader decodes it alike: a string, a boolean, or a number of at most 64 bits."""
    return isinstance(value, str | bool) or (isinstance(value, int | float) and abs(value) <= _LARGEST)


def _trait(name: str, kind: str, options: Mapping[str, Any]) -> Trait:
    if kind == "CURVE":
        return "curve"
    declared = options.get("control_after_generate")
    if kind == "COMBO":
        return "control_and_filter" if declared else ""
    # A seed has a control by default.
    is_controlled = kind == "INT" and name in _SEEDS if declared is None else declared
    return "control" if is_controlled else ""


_CORE_MODULES = ("nodes", "comfy_extras", "comfy_api_nodes")
_ENCODER = msgspec.json.Encoder(order="sorted")

Choice = str | int | float | bool


class InputSignature(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    kind: str
    is_required: bool = False
    choices: tuple[Choice, ...] | None = None
    """The accepted values, sorted. None: any value, or a list that differs between machines."""
    low: float | None = None
    high: float | None = None


class NodeSignature(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    inputs: dict[str, InputSignature]
    outputs: tuple[str, ...] = ()
    is_core: bool = False
    """The class is part of ComfyUI. Other classes may check values by rules that `/object_info` does not show."""
    is_output: bool = False
    """A server validates only output nodes and the nodes on which they depend."""


NodeSignatures = Mapping[str, NodeSignature]


class NodeCatalog(msgspec.Struct, frozen=True):
    """The node classes of a server. Servers with equal node versions have equal catalogs."""

    definitions: dict[str, tuple[Widget, ...]]
    signatures: dict[str, NodeSignature] = {}

    def signature(self) -> str:
        """The hash of the content, equal in every process."""
        return hashlib.sha256(_ENCODER.encode(self)).hexdigest()[:32]


def read_catalog(object_info: Mapping[str, Any], *, checks_new_style: bool = False) -> NodeCatalog:
    return NodeCatalog(
        read_definitions(object_info), read_signatures(object_info, checks_new_style=checks_new_style)
    )


def read_signatures(
    object_info: Mapping[str, Any], *, checks_new_style: bool = False
) -> dict[str, NodeSignature]:
    """The signature of each class. A class with unknown content has no entry; only a run shows what it accepts.

    `checks_new_style`: the server refuses values that a new-style combo (`["COMBO", {"options": …}]`) does not list.
    Releases up to 0.7.0 accept any value.
    """
    found: dict[str, NodeSignature] = {}
    for name, content in object_info.items():
        if isinstance(content, Mapping) and isinstance(content.get("input"), Mapping):
            is_core = _is_core(content.get("python_module"))
            outputs = content.get("output")
            found[name] = NodeSignature(
                {
                    input_name: _read_input(
                        input_name,
                        spec,
                        is_required=group == "required",
                        is_checked=is_core and (checks_new_style or _is_old_style(spec)),
                    )
                    for group in ("required", "optional")
                    if isinstance(inputs := content["input"].get(group), Mapping)
                    for input_name, spec in inputs.items()
                },
                tuple(map(_type_name, outputs)) if isinstance(outputs, list) else (),
                is_core,
                content.get("output_node") is True,
            )
    return found


def _is_core(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _CORE_MODULES


def _is_old_style(spec: Any) -> bool:
    return isinstance(spec, list) and bool(spec) and isinstance(spec[0], list)


def _read_input(name: str, spec: Any, *, is_required: bool, is_checked: bool) -> InputSignature:
    _, options = read_spec(spec)
    # The type of its links, not of its widget.
    kind = _type_name(spec[0]) if isinstance(spec, list) and spec else ""
    choices = fixed_choices(name, options) if is_checked and kind == "COMBO" else []
    return InputSignature(
        kind,
        is_required,
        _sorted(choices),
        _number(options.get("min")),
        _number(options.get("max")),
    )


def _sorted(choices: list[Any]) -> tuple[Choice, ...] | None:
    if not choices or not all(is_plain(choice) for choice in choices):
        return None
    # By type first: 1 and "1" do not compare.
    return tuple(choice for _, choice in sorted({(type(each).__name__, each) for each in choices}))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and is_plain(value) else None


def _type_name(output: Any) -> str:
    return output if isinstance(output, str) else "COMBO"
