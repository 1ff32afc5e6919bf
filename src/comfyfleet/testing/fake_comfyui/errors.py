"""How a simulated node fails.

A node raises `NodeError` with the name that the exception would have had on a real server. The run turns it into an
`execution_error`; nothing here reaches the caller of the fake as a Python exception.
"""

from __future__ import annotations

OUT_OF_MEMORY_TIPS = (
    "This error means you ran out of memory on your GPU.\n\n"
    "TIPS: If the workflow worked before you might have accidentally set the batch_size to a large number."
)


class NodeError(Exception):
    """A node raised; `exception_type` is the full name of the Python exception on a real server."""

    def __init__(self, exception_type: str, message: str) -> None:
        super().__init__(message)
        self.exception_type = exception_type
        self.message = message
        self.tips = ""


class OutOfMemory(NodeError):
    """The card is full."""

    def __init__(self, message: str = "Allocation on device ") -> None:
        super().__init__("torch.OutOfMemoryError", message)
        self.tips = OUT_OF_MEMORY_TIPS


class Interrupted(Exception):
    """The run was interrupted, by a request or by a node."""


class WorkerDied(Exception):
    """The worker thread is gone; only a restart of the server brings it back."""
