"""What a server accepts of each node class: its inputs, their types and choices, and its outputs.

Read from `/object_info`, whose text, prices and file lists are left out. So servers with equal versions of their nodes
have equal signatures, whatever models and pictures lie on their disks. What follows from a signature that does not
accept a graph is policy's business (`policy/refusals.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from comfyfleet.model.node_definitions import Widget, fixed_choices, is_plain, read_definitions, read_spec

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
