"""What a node class is: its inputs, outputs and price, as data.

Owns `NodeClass` and `InputSpec` and their printing in the format of `/object_info`. The classes themselves are
listed in `core_nodes` and `lab_nodes`; what they do when they run is in `behaviours`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

ListNames = Callable[[str], list[str]]
"""Gives the installed file names of a model folder, or the input pictures for the folder `INPUT_IMAGES`."""

INPUT_IMAGES = "<input images>"


class InputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One input: a type name, a fixed list of choices, or the files of a folder."""

    type: str = ""
    choices: tuple[str, ...] | None = None
    folder: str | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    new_style: bool = False
    """Print choices as ["COMBO", {"options": [...]}], as node classes of the newer kind do."""

    def declared_type(self, list_names: ListNames) -> str | list[str]:
        """The type as ComfyUI's validation sees it: a name, or the list of choices."""
        if self.folder is not None:
            return list_names(self.folder)
        if self.choices is not None and not self.new_style:
            return list(self.choices)
        return "COMBO" if self.choices is not None else self.type

    def declared_options(self) -> dict[str, Any]:
        """The options beside the type."""
        if self.new_style and self.choices is not None:
            return {**self.options, "options": list(self.choices)}
        return dict(self.options)

    def allowed(self, list_names: ListNames) -> list[str] | None:
        """The values that may be given, or None when any may."""
        if self.folder is not None:
            return list_names(self.folder)
        return None if self.choices is None else list(self.choices)

    def printed(self, list_names: ListNames) -> list[Any]:
        """The input as `/object_info` shows it."""
        options = self.declared_options()
        declared = self.declared_type(list_names)
        return [declared, options] if options else [declared]


class NodeClass(msgspec.Struct, frozen=True, kw_only=True):
    """A node class of the fake. Costs are in simulated seconds on a card of speed 1."""

    name: str
    required: dict[str, InputSpec] = msgspec.field(default_factory=dict)
    optional: dict[str, InputSpec] = msgspec.field(default_factory=dict)
    hidden: dict[str, str] = msgspec.field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    output_tooltips: tuple[str, ...] | None = None
    display_name: str | None = None
    description: str = ""
    category: str = "image"
    python_module: str = "nodes"
    output_node: bool = False
    behaviour: str = "generic"
    """The name of what it does, from the table in `behaviours`."""
    cost_s: float = 0.0
    uses_gpu: bool = False
    is_async: bool = False
    always_runs: bool = False
    """Never taken from the cache."""
    slow_validation_input: str | None = None
    """An input that says for how many seconds validating this node blocks the server."""

    def input(self, name: str) -> tuple[InputSpec | None, str | None]:
        """The input of that name and its kind ("required", "optional"), or two Nones."""
        if name in self.required:
            return self.required[name], "required"
        if name in self.optional:
            return self.optional[name], "optional"
        return None, None

    def printed(self, list_names: ListNames) -> dict[str, Any]:
        """The class as `/object_info` shows it."""
        inputs: dict[str, dict[str, Any]] = {}
        for kind, specs in (("required", self.required), ("optional", self.optional)):
            if specs:
                inputs[kind] = {name: spec.printed(list_names) for name, spec in specs.items()}
        if self.hidden:
            inputs["hidden"] = dict(self.hidden)
        printed: dict[str, Any] = {
            "input": inputs,
            "input_order": {kind: list(names) for kind, names in inputs.items()},
            "output": list(self.outputs),
            "output_is_list": [False] * len(self.outputs),
            "output_name": list(self.outputs),
            "name": self.name,
            "display_name": self.display_name or self.name,
            "description": self.description,
            "python_module": self.python_module,
            "category": self.category,
            "output_node": self.output_node,
        }
        if self.output_tooltips is not None:
            printed["output_tooltips"] = list(self.output_tooltips)
        return printed


def input_of(type_name: str, **options: Any) -> InputSpec:
    """An input of a type."""
    return InputSpec(type=type_name, options=options)


def choice(*choices: str, **options: Any) -> InputSpec:
    """An input with a fixed list, printed in the old way."""
    return InputSpec(choices=choices, options=options)


def combo(*choices: str, **options: Any) -> InputSpec:
    """An input with a fixed list, printed in the new way."""
    return InputSpec(choices=choices, options=options, new_style=True)


def files(folder: str, **options: Any) -> InputSpec:
    """An input that names an installed file."""
    return InputSpec(folder=folder, options=options)


def node_class_from_object_info(name: str, info: Mapping[str, Any]) -> NodeClass:
    """Make a class from an entry of a real server's `/object_info`, so that a fake can have the same nodes."""
    inputs = info.get("input", {})
    return NodeClass(
        name=name,
        required={key: _spec_from_printed(value) for key, value in inputs.get("required", {}).items()},
        optional={key: _spec_from_printed(value) for key, value in inputs.get("optional", {}).items()},
        hidden={key: str(value) for key, value in inputs.get("hidden", {}).items()},
        outputs=tuple(str(output) for output in info.get("output", ())),
        display_name=info.get("display_name"),
        description=info.get("description", ""),
        category=info.get("category", ""),
        python_module=info.get("python_module", "custom_nodes"),
        output_node=bool(info.get("output_node", False)),
    )


def _spec_from_printed(printed: list[Any]) -> InputSpec:
    declared = printed[0]
    options = dict(printed[1]) if len(printed) > 1 else {}
    if isinstance(declared, list):
        return InputSpec(choices=tuple(str(value) for value in declared), options=options)
    if declared == "COMBO":
        choices = tuple(str(value) for value in options.pop("options", ()))
        return InputSpec(choices=choices, options=options, new_style=True)
    return InputSpec(type=str(declared), options=options)


def make_catalogue(
    known: Iterable[NodeClass], only: tuple[str, ...] | None, extra: Iterable[NodeClass]
) -> dict[str, NodeClass]:
    """The installed classes by name; a class in `extra` replaces one of the same name."""
    catalogue = {node_class.name: node_class for node_class in known}
    if only is not None:
        unknown = [name for name in only if name not in catalogue]
        if unknown:
            raise ValueError(
                f"the fake ComfyUI has no node class {', '.join(unknown)}: describe it in extra_node_classes"
            )
        catalogue = {name: catalogue[name] for name in only}
    catalogue.update({node_class.name: node_class for node_class in extra})
    return catalogue
