"""What the editor exports and what is converted here are one workflow: its values, its defaults, its hash."""

from __future__ import annotations

import pytest
from tests.policy._editor import Editor
from tests.policy.test_conversion import convert, text_to_image

from comfyfleet.model.editor_conversion import convert_workflow
from comfyfleet.model.node_classes import read_definitions
from comfyfleet.model.workflow_hash import hash_workflow


def test_a_long_default_is_kept_as_a_short_one_is() -> None:
    """A server requires the input: left out, the prompt is refused."""
    words = "You are an assistant who describes pictures. " * 100
    content = {"input": {"required": {"system_prompt": ["STRING", {"default": words}], "seed": ["INT", {}]}}}
    editor = Editor()
    editor.node("Chat", [])
    graph = convert_workflow(editor.saved(), read_definitions({"Chat": content}))
    assert graph["1"]["inputs"] == {"system_prompt": words, "seed": 0}


def test_a_seed_whose_node_wants_no_control_beside_it_takes_one_value() -> None:
    """`control_after_generate: false` on a seed: the editor saves nothing behind it."""
    inputs = {"seed": ["INT", {"control_after_generate": False}], "mode": ["STRING", {"default": "auto"}]}
    editor = Editor()
    editor.node("Api", [7, "fixed"])
    graph = convert_workflow(editor.saved(), read_definitions({"Api": {"input": {"required": inputs}}}))
    assert graph["1"]["inputs"] == {"seed": 7, "mode": "fixed"}


@pytest.mark.parametrize("mode", [2, 4])
def test_a_primitive_gives_its_value_muted_or_bypassed(mode: int) -> None:
    """The editor writes it into the inputs it feeds before it looks what is switched off."""
    editor, places = text_to_image()
    primitive = editor.node("PrimitiveNode", [99, "fixed"], mode=mode)
    editor.wire(primitive, 0, places["sampler"], "seed", "INT", widget="seed")
    assert convert(editor)["3"]["inputs"]["seed"] == 99


def test_a_workflow_has_one_hash_exported_by_the_editor_and_converted_here() -> None:
    """Exports have inputs that only the editor has: players, previews, buttons."""
    definitions = read_definitions(
        {
            "LoadAudio": {"input": {"required": {"audio": [["a.mp3"], {"audio_upload": True}]}}},
            "SaveAudioMP3": {
                "input": {
                    "required": {"audio": ["AUDIO"], "filename_prefix": ["STRING", {}], "quality": [["V0"]]}
                }
            },
            "Preview3D": {"input": {"required": {"model_file": ["STRING", {"default": ""}]}}},
            "PreviewAny": {"input": {"required": {"source": ["*", {}]}}},
        }
    )
    editor = Editor()
    loader = editor.node("LoadAudio", ["a.mp3", None, ""])
    saver = editor.node("SaveAudioMP3", ["audio/x", "V0", ""])
    editor.node("Preview3D", ["mesh.glb", ""])
    shown = editor.node("PreviewAny", ["words", "words", None])
    editor.wire(loader, 0, saver, "audio", "AUDIO")
    editor.wire(loader, 0, shown, "source", "*")
    exported = {
        "1": {"class_type": "LoadAudio", "inputs": {"audio": "a.mp3", "audioUI": "", "upload": "audio"}},
        "2": {
            "class_type": "SaveAudioMP3",
            "inputs": {"filename_prefix": "audio/x", "quality": "V0", "audioUI": "", "audio": ["1", 0]},
        },
        "3": {"class_type": "Preview3D", "inputs": {"model_file": "mesh.glb", "image": ""}},
        "4": {
            "class_type": "PreviewAny",
            "inputs": {"preview_markdown": "words", "preview_text": "words", "previewMode": None, "source": ["1", 0]},
        },
    }  # fmt: skip
    assert hash_workflow(convert_workflow(editor.saved(), definitions)) == hash_workflow(exported)
