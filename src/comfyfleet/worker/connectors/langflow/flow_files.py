"""The files of attempts in LangFlow's storage: inputs before a run, their removal, and files of the user.

A file for `files.NAME` is attached to the run's input. A file for COMPONENT.FIELD becomes the tweak of that field.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.job import Attachment, OutputFile
from comfyfleet.worker.connectors.langflow import failures
from comfyfleet.worker.connectors.langflow.api import LangFlowApi, Unreachable
from comfyfleet.worker.connectors.langflow.flows import Component, find_component, only_chat_input
from comfyfleet.worker.connectors.langflow.payload import FILES
from comfyfleet.worker.connectors.langflow.settings import LangFlowSettings

log = logging.getLogger(__name__)

_TRIES = 3
_RETRY_S = 0.5


class PlacedFiles:
    """What was uploaded for one attempt."""

    def __init__(self) -> None:
        self.attached: list[str] = []
        """Paths for the `files` of a run."""
        self.names: list[tuple[str, str]] = []
        """Flow id and name in the storage."""


class FlowFiles:
    def __init__(self, api: LangFlowApi, settings: LangFlowSettings) -> None:
        self._api = api
        self._settings = settings

    async def place(
        self,
        files: Sequence[Attachment | FetchedFile],
        flow_id: str,
        owner: str,
        components: tuple[Component, ...],
        tweaks: dict[str, dict[str, Any]],
        placed: PlacedFiles,
        *,
        has_files: bool,
    ) -> None:
        """Uploads each file and sets its place. `has_files`: a run takes attached files, and not only tweaks.

        `owner` makes the names of one attempt unique. Raises `ServiceFailed` and `Unreachable`."""
        targets = [self._target(file, components, has_files=has_files) for file in files]
        for file, target in zip(files, targets, strict=True):
            path = await self._upload(file, flow_id, f"{owner}-{file.filename}", placed)
            if target is None:
                placed.attached.append(path)
                continue
            component, field = target
            fields = tweaks.setdefault(component.component_id, {})
            template = component.fields.get(field)
            if isinstance(template, dict) and template.get("list") is True:
                earlier = fields.get(field)
                fields[field] = [*(earlier if isinstance(earlier, list) else []), path]
            else:
                fields[field] = path

    def _target(
        self, file: Attachment | FetchedFile, components: tuple[Component, ...], *, has_files: bool
    ) -> tuple[Component, str] | None:
        if file.node == FILES:
            return None if has_files else (only_chat_input(components), "files")
        component = find_component(file.node, components)
        if component.fields and file.input not in component.fields:
            raise ServiceFailed(
                Failure(
                    FailureKind.INVALID_WORKFLOW,
                    f"The component {file.node!r} has no field {file.input!r} for the input file. Use a field of the "
                    f"component, or `{FILES}.NAME` to attach the file to the run.",
                    node_id=component.component_id,
                )
            )
        return component, file.input

    async def _upload(
        self, file: Attachment | FetchedFile, flow_id: str, name: str, placed: PlacedFiles
    ) -> str:
        data = file.data if isinstance(file, Attachment) else file.path
        for left in reversed(range(_TRIES)):
            try:
                answer = await self._api.upload(flow_id, name, data)
            except Unreachable:
                if not left:
                    raise
            else:
                path = answer.body.get("file_path") if isinstance(answer.body, dict) else None
                if answer.is_ok and isinstance(path, str):
                    placed.names.append((flow_id, path.rpartition("/")[2]))
                    return path
                if answer.status < 500 or not left:
                    raise failures.refused_request(
                        answer.status, answer.body, f"the upload of {file.filename}"
                    )
            await asyncio.sleep(_RETRY_S)
        raise AssertionError("the last try returns or raises")

    async def remove(self, placed: PlacedFiles) -> None:
        """Best effort: files that stay only take space."""
        for flow_id, name in placed.names:
            try:
                await self._api.remove_file(flow_id, name)
            except Unreachable as error:
                log.warning("cannot remove the input %s from LangFlow: %s", name, error)
                return

    async def remove_all(self, flow_id: str, owner: str) -> None:
        """Removes every file of this attempt, also those that an earlier process uploaded. Raises `Unreachable`."""
        answer = await self._api.files_of_flow(flow_id)
        names = answer.body.get("files") if isinstance(answer.body, dict) else None
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str) and f"_{owner}-" in name:
                await self._api.remove_file(flow_id, name)

    async def path_of_user_file(self, file: OutputFile) -> str | None:
        """Where a file of the user's own storage can be downloaded. Raises `Unreachable`."""
        answer = await self._api.files_of_user()
        for each in answer.body if isinstance(answer.body, list) else ():
            if isinstance(each, dict) and each.get("path") == f"{file.subfolder}/{file.filename}":
                return f"/api/v2/files/{quote(str(each.get('id')), safe='')}"
        return None
