"""Every node class a fake can have installed, from wherever it is declared."""

from __future__ import annotations

from comfyfleet.sim.fake_comfyui.catalogue import NodeClass
from comfyfleet.sim.fake_comfyui.core_nodes import core_node_classes
from comfyfleet.sim.fake_comfyui.lab_nodes import lab_node_classes
from comfyfleet.sim.fake_comfyui.usual_nodes import usual_node_classes


def known_node_classes() -> list[NodeClass]:
    return [*core_node_classes(), *usual_node_classes(), *lab_node_classes()]
