"""Values as bytes in a database: packed, or refused before anything is changed."""

from __future__ import annotations

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode

_encoder = msgspec.msgpack.Encoder()


def pack(value: object) -> bytes:
    """Called before anything is changed: what cannot be written must not be found out by the writer."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"this cannot be stored: {error}. Values must be plain JSON: text in UTF-8, numbers of 64 bits",
        ) from error
