"""A fake ComfyUI server that behaves like a real one on the wire and needs no torch.

`FakeComfyUI` speaks ComfyUI's HTTP and WebSocket, simulates a GPU with models and memory, draws small real
pictures and can fail in every way a real server fails. It needs Pillow: `pip install 'comfyfleet[fake]'`.
"""

from comfyfleet.testing.fake_comfyui.catalogue import InputSpec, NodeClass, node_class_from_object_info
from comfyfleet.testing.fake_comfyui.clock import FakeClock, HandClock, ScaledClock
from comfyfleet.testing.fake_comfyui.faults import Faults, NodeFault
from comfyfleet.testing.fake_comfyui.server import FakeComfyUI
from comfyfleet.testing.fake_comfyui.settings import FakeSettings
from comfyfleet.testing.fake_comfyui.stats import FakePromptRun, FakeStats

__all__ = [
    "FakeClock",
    "FakeComfyUI",
    "FakePromptRun",
    "FakeSettings",
    "FakeStats",
    "Faults",
    "HandClock",
    "InputSpec",
    "NodeClass",
    "NodeFault",
    "ScaledClock",
    "node_class_from_object_info",
]
