"""Test node classes that no real server has: slow, blocking, failing and odd ones.

They are the `Lab...` nodes of the recorded conversations, plus one in the manner of third-party video nodes. Only
declarations; what they do is in `lab_behaviours`.
"""

from __future__ import annotations

from typing import Any

from comfyfleet.testing.fake_comfyui.catalogue import NodeClass, choice, input_of

_MODULE = "custom_nodes.lab_nodes"
_SECONDS: dict[str, Any] = {"default": 1.0, "min": 0.0, "max": 3600.0}
_SEED: dict[str, Any] = {"default": 0, "min": 0, "max": 0xFFFFFFFFFFFFFFFF}


def _lab(name: str, **fields: Any) -> NodeClass:
    return NodeClass(name=name, category="lab", python_module=_MODULE, **fields)


def lab_node_classes() -> list[NodeClass]:
    """The test classes; leave them out of `FakeSettings.node_classes` for a server without them."""
    seed = input_of("INT", **_SEED)
    seconds = input_of("FLOAT", **_SECONDS)
    return [
        _lab(
            "LabSlow",
            required={
                "steps": input_of("INT", default=4, min=1, max=10000),
                "step_seconds": input_of("FLOAT", default=0.1, min=0.0, max=600.0),
                "preview": input_of("BOOLEAN", default=False),
                "seed": seed,
            },
            outputs=("IMAGE",),
            behaviour="lab_slow",
            uses_gpu=True,
        ),
        _lab(
            "LabBlock", required={"seconds": seconds, "seed": seed}, outputs=("IMAGE",), behaviour="lab_block"
        ),
        _lab(
            "LabBlockOut",
            required={"seconds": seconds, "seed": seed, "image": input_of("IMAGE")},
            output_node=True,
            behaviour="lab_block_out",
        ),
        _lab(
            "LabFail",
            required={
                "kind": choice(
                    "ValueError", "torch OOM", "MemoryError", "FileNotFoundError", "RuntimeError", "Interrupt"
                ),
                "seed": seed,
            },
            optional={"image": input_of("IMAGE")},
            outputs=("IMAGE",),
            behaviour="lab_fail",
        ),
        _lab(
            "LabBlocker",
            required={"message": input_of("STRING", default="")},
            outputs=("IMAGE",),
            behaviour="lab_blocker",
        ),
        _lab(
            "LabUi",
            required={
                "kind": choice("gifs", "nested", "empty", "progress text", "nan", "bytes", "big"),
                "size": input_of("INT", default=1, min=0, max=1_000_000_000),
                "seed": seed,
            },
            output_node=True,
            behaviour="lab_ui",
        ),
        _lab(
            "LabFile",
            required={
                "filename_prefix": input_of("STRING", default="lab"),
                "size": input_of("INT", default=1024, min=0, max=1 << 40),
                "seed": seed,
            },
            optional={"file": input_of("STRING", default="")},
            output_node=True,
            behaviour="lab_file",
        ),
        _lab("LabExpand", required={"seed": seed}, outputs=("IMAGE",), behaviour="lab_expand"),
        _lab(
            "LabAsync",
            required={"seconds": seconds, "seed": seed},
            outputs=("IMAGE",),
            behaviour="lab_async",
            is_async=True,
        ),
        _lab(
            "LabSlowValidate",
            required={"seconds": seconds, "seed": seed},
            outputs=("IMAGE",),
            behaviour="lab_picture",
            slow_validation_input="seconds",
        ),
        NodeClass(
            name="VHS_VideoCombine",
            display_name="Video Combine",
            required={
                "images": input_of("IMAGE"),
                "frame_rate": input_of("FLOAT", default=8.0, min=1.0, max=120.0),
                "filename_prefix": input_of("STRING", default="AnimateDiff"),
                "save_output": input_of("BOOLEAN", default=True),
            },
            category="Video Helper Suite",
            python_module="custom_nodes.ComfyUI-VideoHelperSuite",
            output_node=True,
            behaviour="video_combine",
        ),
    ]
