"""Reads payloads of services other than ComfyUI, by the formats that this process was given.

A format comes from a connector, perhaps from somebody else's package, so what it returns is bounded here.
`graph_reader.py` reads ComfyUI graphs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from comfyfleet.model.encrypted import found_in
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.job import Submission
from comfyfleet.model.payload import COMFYUI, OpaqueFormat, PayloadFormat, PayloadReading, check_plain
from comfyfleet.model.workflow import MAX_FILE_NAME, GraphNeeds
from comfyfleet.model.workflow_graph import InvalidWorkflow, decode_workflow, decoded_graph

_MAX_SEEDS = 1_000
_AT_ONCE_BYTES = 64 * 1024
"""A larger stored payload is read in a thread."""


class PayloadReader:
    def __init__(self, formats: Mapping[str, PayloadFormat], max_names: int) -> None:
        self.formats = dict(formats)
        self._max_names = max_names

    def format_of(self, service: str) -> PayloadFormat:
        return self.formats.get(service) or OpaqueFormat(service)

    def read(self, service: str, payload: Mapping[str, Any], *, is_own: bool = False) -> PayloadReading:
        """Raises `InvalidWorkflow`. `is_own`: the payload comes from decoded JSON and has no other owner."""
        if is_own:
            # Its parts may still be text.
            payload = decoded_graph(payload)
        check_plain(payload)
        if not is_own:
            # Copied by way of JSON: the caller may change its payload for the next job.
            payload = decode_workflow(payload)
        reading = self.format_of(service).read(payload)
        if found_in(reading.payload) is not None:
            raise InvalidWorkflow("The payload has the form of an encrypted one: send it as it was before.")
        self._check_bounds(reading)
        return reading

    def _check_bounds(self, reading: PayloadReading) -> None:
        for kind, names in (("models", reading.models), ("node classes", reading.node_classes)):
            if len(names) > self._max_names:
                raise InvalidWorkflow(
                    f"The payload names {len(names)} {kind}, and at most {self._max_names} are allowed: split it."
                )
            for name in names:
                if not 0 < len(name) <= MAX_FILE_NAME:
                    raise InvalidWorkflow(
                        f"One of the {kind} that the payload names has {len(name)} characters; "
                        f"1 to {MAX_FILE_NAME} are allowed."
                    )
        if len(reading.seeds) > _MAX_SEEDS:
            raise InvalidWorkflow(
                f"The payload asks for {len(reading.seeds)} seeds, and at most {_MAX_SEEDS} are allowed: split it."
            )

    async def of_stored(self, submission: Submission, size: int) -> PayloadReading | None:
        """What a stored payload of so many bytes needs; None for a graph of ComfyUI. A payload that the present format
        refuses was accepted under another one, so nothing is known of it."""
        service = submission.requirements.service
        if service == COMFYUI:
            return None
        unknown = PayloadReading(submission.workflow, WorkflowHash(""), inputs=None)
        if service not in self.formats:
            return unknown
        read = partial(self.read, service, submission.workflow, is_own=True)
        try:
            return await asyncio.to_thread(read) if size > _AT_ONCE_BYTES else read()
        except InvalidWorkflow:
            return unknown


def needs_of(reading: PayloadReading) -> GraphNeeds:
    return GraphNeeds(reading.node_classes, reading.models, frozenset())
