"""Which values of a node the ComfyUI editor shows as widgets, and in which order: all it takes to read its files.

Read from a server's `/object_info`, which is megabytes; this is a few bytes for each input. What is done with it is
`editor_conversion.py`'s.

What a server accepts of each node class: its inputs, their types and choices, and its outputs.

Read from `/object_info`, whose text, prices and file lists are left out. So servers with equal versions of their nodes
have equal signatures, whatever models and pictures lie on their disks. What follows from a signature that does not
accept a graph is policy's business (`policy/acceptance.py`).
"""

from __future__ import annotations

import hashlib
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


_CORE_MODULES = ("nodes", "comfy_extras", "comfy_api_nodes")
_ENCODER = msgspec.json.Encoder(order="sorted")

Choice = str | int | float | bool


class InputSignature(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    kind: str
    is_required: bool = False
    choices: tuple[Choice, ...] | None = None
    """The values that it accepts, sorted. None: any, or a list that differs from machine to machine."""
    low: float | None = None
    high: float | None = None


class NodeSignature(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    inputs: dict[str, InputSignature]
    outputs: tuple[str, ...] = ()
    is_core: bool = False
    """It comes with ComfyUI. Any other class may check its values by rules that cannot be seen from outside."""
    is_output: bool = False
    """A server checks nodes of this class, and all that they depend on. Others it does not look at."""


NodeSignatures = Mapping[str, NodeSignature]


class NodeCatalog(msgspec.Struct, frozen=True):
    """All that a fleet keeps of a server's node classes. Servers with equal versions of their nodes have equal ones."""

    definitions: dict[str, tuple[Widget, ...]]
    signatures: dict[str, NodeSignature] = {}

    def signature(self) -> str:
        """Its name: the hash of its content, the same in every process."""
        return hashlib.sha256(_ENCODER.encode(self)).hexdigest()[:32]


def read_catalog(object_info: Mapping[str, Any], *, checks_new_style: bool = False) -> NodeCatalog:
    return NodeCatalog(
        read_definitions(object_info), read_signatures(object_info, checks_new_style=checks_new_style)
    )


def read_signatures(
    object_info: Mapping[str, Any], *, checks_new_style: bool = False
) -> dict[str, NodeSignature]:
    """A class that cannot be understood has no entry: a server that has it is asked by trying.

    `checks_new_style`: the server refuses values that a new-style combo (`["COMBO", {"options": …}]`) does not list.
    Releases up to 0.7.0 accept any.
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
    # The type of its wires; which widget the editor shows for it is another matter.
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
    # By type first: of two choices, one may be 1 and the other "1".
    return tuple(choice for _, choice in sorted({(type(each).__name__, each) for each in choices}))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and is_plain(value) else None


def _type_name(output: Any) -> str:
    return output if isinstance(output, str) else "COMBO"
