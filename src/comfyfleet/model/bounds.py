"""How much of a ComfyUI server a worker reads, and how long it puts up with one that is of no use.

Data only, apart from the connector that heeds it, so that the command line knows the names without loading that.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MEGABYTE = 1 << 20

Bytes = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class ServerBounds(msgspec.Struct, frozen=True, kw_only=True):
    max_answer_bytes: Bytes = 128 * MEGABYTE
    """What an answer of the server may have; one that has more is not read to its end."""
    max_answer_values: Bytes = 4_000_000
    """How many values there may be in it: decoded, an empty list takes twenty times its text."""
    max_message_bytes: Bytes = 128 * MEGABYTE
    """What a message of the websocket may have, and all outputs together that are heard of one run, and all pictures
    that one run sends."""
    max_file_bytes: Bytes = 64 * 1024 * MEGABYTE
    """What a file of the server may have that is saved on this machine."""
    max_fetch_bytes: Bytes = 1024 * MEGABYTE
    """What a file may have that is read into memory."""
    min_free_bytes: Annotated[int, Meta(ge=0)] = 1024 * MEGABYTE
    """What no file of the server takes of the disk that it is saved on."""
    broken_s: Seconds = 300.0
    """A server that sends more than it may is not used for so long, then tried again."""

    occupied_s: Seconds = 120.0
    """A prompt of ours waits for so long behind one of somebody else's that shows no sign of life: ours is given back,
    and the server is not used until that one has ended. Where it ends, the next is waited for twice as long."""
    occupied_dead_s: Seconds = 900.0
    """Such a prompt of somebody else's has not ended after so long: the server's execution thread is dead."""
    dead_worker_s: Seconds = 600.0
    """A server whose execution thread was found dead is tried again after so long, should nothing wait in its queue."""
