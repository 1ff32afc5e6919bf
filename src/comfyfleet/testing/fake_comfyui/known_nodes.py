"""Every node class that a fake can have, as its release declares it.

`core_nodes`, `usual_nodes` and `lab_nodes` declare the newest known release; this module has the differences
of older ones. The releases are those whose sources first show the change.
"""

from __future__ import annotations

import msgspec

from comfyfleet.testing.fake_comfyui.catalogue import InputSpec, NodeClass
from comfyfleet.testing.fake_comfyui.core_nodes import NEWER_SAMPLERS, SAMPLERS, core_node_classes
from comfyfleet.testing.fake_comfyui.lab_nodes import lab_node_classes
from comfyfleet.testing.fake_comfyui.usual_nodes import usual_node_classes

_KSAMPLER_SELECT_IS_NEW_STYLE = (0, 4, 0)
_NEWER_SAMPLERS_EXIST = (0, 5, 0)
_RESOLUTION_STEPS_REQUIRED = (0, 6, 0)


def known_node_classes(release: tuple[int, ...] | None = None) -> list[NodeClass]:
    """The classes of a release, or of the newest known one."""
    newest = [*core_node_classes(), *usual_node_classes(), *lab_node_classes()]
    return newest if release is None else [_as_of(release, node_class) for node_class in newest]


def _as_of(release: tuple[int, ...], node_class: NodeClass) -> NodeClass:
    required = {
        name: _spec_as_of(release, node_class.name, spec)
        for name, spec in node_class.required.items()
        if release >= _RESOLUTION_STEPS_REQUIRED or name != "resolution_steps"
    }
    return msgspec.structs.replace(node_class, required=required)


def _spec_as_of(release: tuple[int, ...], class_name: str, spec: InputSpec) -> InputSpec:
    if spec.choices == SAMPLERS and release < _NEWER_SAMPLERS_EXIST:
        older = tuple(name for name in SAMPLERS if name not in NEWER_SAMPLERS)
        spec = msgspec.structs.replace(spec, choices=older)
    if class_name == "KSamplerSelect" and release < _KSAMPLER_SELECT_IS_NEW_STYLE:
        spec = msgspec.structs.replace(spec, new_style=False)
    return spec
