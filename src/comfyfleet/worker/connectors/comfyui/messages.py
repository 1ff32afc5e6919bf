"""The frames of ComfyUI's websocket as values.

Reads text and binary frames and knows nothing of runs. What cannot be read is None: a server and its custom nodes may
send anything, and none of it may end a run.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

FEATURE_FLAGS = '{"type": "feature_flags", "data": {"supports_preview_metadata": true}}'
"""The first message to a server: previews then name the prompt and node they belong to."""

MAX_PREVIEW_HEADER = 1 << 20
_IMAGE_FORMATS = {1: "image/jpeg", 2: "image/png"}


class Message(msgspec.Struct, frozen=True):
    """One frame. Kinds are the server's own, besides `preview` and `text` for the binary ones."""

    kind: str
    prompt_id: str | None
    data: dict[str, Any]
    image: bytes | None = None
    size: int = 0
    """Of a text frame, in characters."""

    @property
    def node(self) -> str | None:
        return text_or_none(self.data.get("node"))

    @property
    def is_end_of_run(self) -> bool:
        """The one message that ends every run, whatever came of it."""
        return self.kind == "executing" and "node" in self.data and self.data["node"] is None


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def parse_text(frame: str) -> Message | None:
    try:
        # Not msgspec: servers write NaN and Infinity.
        content = json.loads(frame)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    kind, data = content.get("type"), content.get("data")
    if not isinstance(kind, str) or not isinstance(data, dict):
        return None
    return Message(kind, text_or_none(data.get("prompt_id")), data, size=len(frame))


def parse_binary(frame: bytes) -> Message | None:
    match int.from_bytes(frame[:4], "big"):
        case 1 if len(frame) > 8:
            image_format = _IMAGE_FORMATS.get(int.from_bytes(frame[4:8], "big"), "application/octet-stream")
            return Message("preview", None, {"format": image_format}, frame[8:])
        case 3 if len(frame) >= 8:
            end = 8 + int.from_bytes(frame[4:8], "big")
            if end > len(frame):
                return None
            node = frame[8:end].decode("utf-8", "replace")
            return Message("text", None, {"node": node, "text": frame[end:].decode("utf-8", "replace")})
        case 4 if len(frame) > 8:
            return _preview_with_metadata(frame)
    return None


def _preview_with_metadata(frame: bytes) -> Message | None:
    length = int.from_bytes(frame[4:8], "big")
    if length > MAX_PREVIEW_HEADER or 8 + length > len(frame):
        return None
    try:
        header = json.loads(frame[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    node = text_or_none(header.get("display_node_id")) or text_or_none(header.get("node_id"))
    data = {"format": text_or_none(header.get("image_type")) or "application/octet-stream", "node": node}
    return Message("preview", text_or_none(header.get("prompt_id")), data, frame[8 + length :])
