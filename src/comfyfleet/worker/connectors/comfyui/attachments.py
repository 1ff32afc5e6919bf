"""Files that go with an attempt: placed on the server, then wired into the graph.

Each attempt has a folder of its own below the server's input folder, so equal names of two attempts never meet and a
repeated upload writes the same file again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.job import Attachment
from comfyfleet.model.workflow import Workflow, with_input
from comfyfleet.worker.connectors.comfyui import failures
from comfyfleet.worker.connectors.comfyui.api import Answer, Api, Refusals, Unreachable, Upload
from comfyfleet.worker.connectors.comfyui.failures import fail, nobody_there
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings

_ANNOTATED = re.compile(r"^(?P<path>.*?)(?: \[(?P<folder>input|output|temp)\])?$", re.DOTALL)


async def place(
    api: Api,
    settings: ComfyUISettings,
    attachments: Iterable[Attachment | FetchedFile],
    workflow: Workflow,
    folder: str,
) -> Workflow:
    """Upload all and give back the graph that names them. Raises `ServiceFailed` or `InvalidWorkflow`."""
    used: set[str] = set()
    for index, attachment in enumerate(attachments):
        filename = _own_name(attachment.filename, index, used)
        current = workflow.nodes[attachment.node].inputs if attachment.node in workflow.nodes else {}
        # Checked before the upload: a wrong node id must not leave files behind.
        workflow = with_input(workflow, attachment.node, attachment.input, filename)
        original = _reference(current.get(attachment.input)) if attachment.kind == "mask" else None
        content = attachment.data if isinstance(attachment, Attachment) else attachment.path
        upload = Upload(filename, content, folder, original)
        answer = await upload_patiently(api, settings, upload)
        workflow = with_input(workflow, attachment.node, attachment.input, _name_in_graph(answer, filename))
    return workflow


async def upload_patiently(api: Api, settings: ComfyUISettings, upload: Upload) -> Answer:
    """Through short absences of the server. Raises `ServiceFailed`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.unreachable_s
    refusals = Refusals(settings.refused_s)
    while True:
        try:
            answer = await api.upload(upload)
        except Unreachable as error:
            if refusals.are_enough(error):
                raise nobody_there(error) from error
            # An upload that overwrites may be repeated; one that took too long would only take as long again.
            if error.is_timeout or loop.time() >= deadline:
                kind = FailureKind.CRASHED if error.is_refused else FailureKind.TRANSIENT
                raise fail(kind, f"The upload of {upload.filename!r} did not get through: {error}") from error
        else:
            if not answer.is_ok:
                raise ServiceFailed(failures.refused_upload(answer.status, answer.body, upload.filename))
            return answer
        await asyncio.sleep(settings.settle_s)


def _own_name(filename: str, index: int, used: set[str]) -> str:
    name = filename.replace("\\", "/").rsplit("/", 1)[-1].strip().replace("\0", "")
    if name in ("", ".", ".."):
        name = f"file-{index}"
    if name in used:
        name = f"{index}-{name}"
    used.add(name)
    return name


def _name_in_graph(answer: Answer, filename: str) -> str:
    """How a loading node names the file: folder and name, and where it lies unless that is the input folder."""
    body = answer.body
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise ServiceFailed(
            Failure(FailureKind.UNKNOWN, f"The server did not say under what name it keeps {filename!r}.")
        )
    subfolder, kind = body.get("subfolder"), body.get("type", "input")
    path = f"{subfolder}/{body['name']}" if subfolder else body["name"]
    return path if kind == "input" else f"{path} [{kind}]"


def _reference(value: Any) -> dict[str, str] | None:
    """The image a mask is laid upon: the one its input names so far."""
    found = _ANNOTATED.match(value) if isinstance(value, str) and value.strip() else None
    if found is None:
        return None
    subfolder, _, filename = found["path"].replace("\\", "/").rpartition("/")
    return {"filename": filename, "subfolder": subfolder, "type": found["folder"] or "input"}
