"""Names that must not be mixed up. Each is a plain string at run time; the type checker keeps them apart."""

from __future__ import annotations

import uuid
from typing import NewType

JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)
TenantId = NewType("TenantId", str)
WorkflowHash = NewType("WorkflowHash", str)
ClassKey = NewType("ClassKey", str)
ProfileKey = NewType("ProfileKey", str)
PollId = NewType("PollId", str)
LeaseToken = NewType("LeaseToken", str)

DEFAULT_TENANT = TenantId("default")

_ATTEMPTS = uuid.UUID("6b0f3f0c-5d0a-5c57-9f43-2c7f1e6c0a11")


def prompt_id_of(attempt_id: str) -> str:
    """The id an attempt runs under on a server.

    It follows from the attempt alone, so that any agent can look up what became of it, and it has the one form
    every ComfyUI accepts: a canonical lower-case UUID.
    """
    return str(uuid.uuid5(_ATTEMPTS, attempt_id))
