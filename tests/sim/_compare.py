"""Comparing what the fake said with what a real server said.

Owns the rules for what may differ between two recordings of the same conversation: ids, times, file counters and what
a recording left out. Everything else has to be equal, types included.
"""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from typing import Any

from PIL import Image

Message = dict[str, Any]
"""A websocket message in the form of the recordings: with `json`, `raw_text`, `json_truncated` or `binary`."""

TIMES = ("timestamp", "create_time", "execution_start_time", "execution_end_time")
# Real servers build these from sets, so their order is chance.
UNORDERED = ("executed", "current_outputs", "errors")
# What a machine says about itself; only the type can be the same elsewhere.
MACHINE_SPECIFIC = (
    "ram_total", "ram_free", "vram_total", "vram_free", "torch_vram_total", "torch_vram_free", "python_version",
    "pytorch_version", "argv", "name", "required_frontend_version", "required_templates_version",
)  # fmt: skip
_FILE = re.compile(r"^(?P<stem>.*?)_?\d{5}_?\.[a-z0-9]+$")
_SERVER_MADE_SID = re.compile(r"^[0-9a-f]{32}$")
_MILLISECONDS = re.compile(r"\b\d{13}\b")


class Comparison:
    """Collects differences; remembers which recorded file name stands for which new one."""

    def __init__(self) -> None:
        self.differences: list[str] = []
        self.submitted: list[Any] = []
        self._files: dict[str, str] = {}

    def differ(self, where: str, expected: object, actual: object) -> None:
        self.differences.append(
            f"{where}: recorded {str(expected)[:300]!r}, the fake says {str(actual)[:300]!r}"
        )

    def compare(self, where: str, expected: Any, actual: Any, is_about_machine: bool = False) -> None:
        """Compare two JSON values."""
        key = where.rsplit(".", 1)[-1]
        if key in TIMES and isinstance(expected, int) and isinstance(actual, int):
            return
        if is_about_machine and key in MACHINE_SPECIFIC and type(expected) is type(actual):
            return
        if isinstance(expected, str):
            self._compare_text(where, expected, actual)
        elif type(expected) is not type(actual):
            self.differ(where, expected, actual)
        elif isinstance(expected, dict):
            if set(expected) != set(actual):
                self.differ(f"{where} keys", sorted(expected), sorted(actual))
                return
            for name, value in expected.items():
                self.compare(f"{where}.{name}", value, actual[name], is_about_machine)
        elif isinstance(expected, list):
            self._compare_lists(where, key, expected, actual, is_about_machine)
        elif expected != actual:
            self.differ(where, expected, actual)

    def _compare_lists(
        self, where: str, key: str, expected: list[Any], actual: list[Any], is_about_machine: bool
    ) -> None:
        if key == "traceback":
            if bool(expected) != bool(actual) or not all(isinstance(frame, str) for frame in actual):
                self.differ(where, expected, actual)
            return
        if len(expected) != len(actual):
            self.differ(where, expected, actual)
            return
        if key in UNORDERED:
            expected, actual = sorted(expected, key=json.dumps), sorted(actual, key=json.dumps)
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            self.compare(f"{where}[{index}]", one, other, is_about_machine)

    def _compare_text(self, where: str, expected: str, actual: Any) -> None:
        if expected == "<prompt as submitted>":
            if actual not in self.submitted:
                self.differ(where, expected, actual)
            return
        if not isinstance(actual, str):
            self.differ(where, expected, actual)
        elif expected.startswith("tensor("):
            if not actual.startswith("tensor("):
                self.differ(where, expected, actual)
        elif _FILE.match(expected):
            if (
                _plain_file(expected) != _plain_file(actual)
                or self._files.setdefault(expected, actual) != actual
            ):
                self.differ(where, expected, actual)
        elif expected != actual and not (_SERVER_MADE_SID.match(expected) and _SERVER_MADE_SID.match(actual)):
            self.differ(where, expected, actual)

    def compare_start(self, where: str, start: str, actual: str) -> None:
        """Compare a body of which only the beginning was recorded; the last token may have been cut."""
        if not _MILLISECONDS.sub("T", actual).startswith(_MILLISECONDS.sub("T", start[: start.rfind(" ")])):
            self.differ(where, start, actual)

    def compare_message(self, where: str, expected: Message, actual: Message) -> None:
        """Compare two websocket messages."""
        if "json_truncated" in expected:
            said = expected["json_truncated"]
            if actual.get("json", {}).get("type") != said["type"] or actual["length"] != said["length"]:
                self.differ(
                    where, said, {"length": actual.get("length"), "type": actual.get("json", {}).get("type")}
                )
        elif "raw_text" in expected:
            if actual.get("text") != expected["raw_text"]:
                self.differ(where, expected["raw_text"], actual.get("text"))
        elif "json" in expected:
            self.compare(where, expected["json"], actual.get("json"))
        else:
            self._compare_binary(where, expected["binary"], actual.get("binary"))

    def _compare_binary(self, where: str, expected: dict[str, Any], actual: dict[str, Any] | None) -> None:
        if actual is None or expected["event_type"] != actual["event_type"]:
            self.differ(where, expected, actual)
            return
        for name in ("image_format", "metadata", "node_id", "text"):
            if name in expected:
                self.compare(f"{where}.{name}", expected[name], actual.get(name))
        if "image" in actual:
            picture = Image.open(io.BytesIO(actual["image"])).convert("RGB")
            if "base64" in expected:
                recorded = Image.open(io.BytesIO(base64.b64decode(expected["base64"])[8:])).convert("RGB")
                if (recorded.size, recorded.tobytes()) != (picture.size, picture.tobytes()):
                    self.differ(where, "the recorded picture", "another picture")


def _plain_file(name: str) -> str:
    name = re.sub(r"ComfyUI_temp_[a-z]{5}", "ComfyUI_temp_?", name)
    return re.sub(r"\d{5}(?=_?\.)", "#", name)


def read_binary(frame: bytes) -> dict[str, Any]:
    """Decode a binary frame into the form of the recordings, with the picture beside it."""
    event_type, number = struct.unpack(">II", frame[:8])
    if event_type == 1:
        return {"event_type": 1, "image_format": number, "image": frame[8:]}
    if event_type == 3:
        return {
            "event_type": 3,
            "node_id": frame[8 : 8 + number].decode(),
            "text": frame[8 + number :].decode(),
        }
    return {
        "event_type": event_type,
        "metadata": json.loads(frame[8 : 8 + number]),
        "image": frame[8 + number :],
    }


class LeftOut:
    """What a recording does not show, as the notes at its end say; the same is taken out of the fake's messages."""

    def __init__(self, notes: list[str]) -> None:
        self._types = {
            kind
            for kind in ("progress_state", "execution_start")
            if any(f"{kind} messages left out" in note for note in notes)
        }
        self._status = any("status broadcasts" in note and "left out" in note for note in notes)
        self._progress = any("further progress messages left out" in note for note in notes)

    def apply(self, messages: list[Message]) -> list[Message]:
        """The messages without those kinds; runs of progress of one node become their first when some are missing."""
        kept: list[Message] = []
        for message in messages:
            content = message.get("json", {})
            kind, data = content.get("type"), content.get("data")
            if kind in self._types or (self._status and kind == "status" and "sid" not in data):
                continue
            if self._progress and kind == "progress" and kept and _is_progress_of(kept[-1], data):
                continue
            kept.append(message)
        return kept


def _is_progress_of(message: Message, data: dict[str, Any]) -> bool:
    other = message.get("json", {})
    if other.get("type") != "progress":
        return False
    return bool(other["data"]["node"] == data["node"] and other["data"]["prompt_id"] == data["prompt_id"])
