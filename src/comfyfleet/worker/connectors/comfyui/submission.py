"""Submits a prompt with its files to a server exactly once, and removes them after the run.

A server does not de-duplicate prompt ids, so the id is looked up before each submit and after an unclear
answer. Each attempt has its own folder below the server's `input` and `output`. ComfyUI has no route that
removes files, so only a worker on the server's disk removes them, and only in these folders.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from comfyfleet.model.failure import FailureKind, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.job import Attachment
from comfyfleet.model.workflow import with_input
from comfyfleet.model.workflow_graph import Workflow
from comfyfleet.worker.connectors.comfyui import failures
from comfyfleet.worker.connectors.comfyui.api import (
    AnswerTooLarge,
    ApiAnswer,
    ComfyApi,
    HttpRefusals,
    Unreachable,
    UploadedImage,
)
from comfyfleet.worker.connectors.comfyui.failures import fail, nobody_there
from comfyfleet.worker.connectors.comfyui.prompt_state import PromptState, fetch_prompt_state
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings


class AcceptedPrompt(msgspec.Struct, frozen=True):
    number: float | None
    is_fresh: bool = False
    """The server's own answer to this submit, not the result of a lookup."""


class UnwantedPrompt(Exception):
    """The server accepted the prompt wrongly: the caller must stop it and raise the failure."""

    def __init__(self, prompt_id: str, failure: ServiceFailed) -> None:
        super().__init__(str(failure))
        self.prompt_id = prompt_id
        self.failure = failure


class PromptSubmission:
    """Submits one prompt. `may_arrive_late`: after a failure the prompt may still appear on the server."""

    def __init__(
        self, api: ComfyApi, settings: ComfyUISettings, graph: dict[str, Any], prompt_id: str, client_id: str
    ) -> None:
        self._api = api
        self._settings = settings
        self._graph = graph
        self._prompt_id = prompt_id
        self._client_id = client_id
        self.may_arrive_late = False

    async def submit(self, accept_s: float) -> AcceptedPrompt:
        """Raises `ServiceFailed` or `UnwantedPrompt`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        refusals = HttpRefusals(self._settings.refused_s)
        while True:
            try:
                known = await self._known()
                if known is not None:
                    return known
                left_s = max(0.05, began + accept_s - loop.time())
                return await self._post(left_s, accept_s)
            except AnswerTooLarge as error:
                raise fail(FailureKind.DEAD_WORKER, f"The server cannot be used: {error}.") from error
            except Unreachable as error:
                if error.status is not None and error.status < 500:
                    # Another program, or a proxy that refuses us: waiting does not help.
                    raise ServiceFailed(
                        failures.refused_request(error.status, None, "a request for its queue")
                    ) from error
                # Nothing was sent, so another try is safe.
                if refusals.are_enough(error):
                    raise nobody_there(error) from error
                waited_s = loop.time() - began
                if error.is_refused and waited_s >= self._settings.unreachable_s:
                    raise fail(
                        FailureKind.CRASHED, f"The server was away for {waited_s:.1f} s: {error}"
                    ) from error
                if waited_s >= accept_s:
                    raise self._timed_out(accept_s) from error
            await asyncio.sleep(self._settings.settle_s)

    async def _known(self) -> AcceptedPrompt | None:
        standing = await fetch_prompt_state(self._api, self._prompt_id)
        return None if standing.state is PromptState.UNKNOWN else AcceptedPrompt(standing.number)

    async def _post(self, timeout_s: float, accept_s: float) -> AcceptedPrompt:
        self.may_arrive_late = True
        try:
            answer = await self._api.submit(self._graph, self._prompt_id, self._client_id, timeout_s)
        except Unreachable as error:
            if error.is_refused:
                self.may_arrive_late = False
                raise
            lost = self._timed_out(accept_s) if error.is_timeout else None
            return await self._find_out(
                lost or fail(FailureKind.TRANSIENT, f"The submit got no answer and did not arrive: {error}")
            )
        if answer.status >= 500:
            # Real servers have answered 500 with the prompt in the queue.
            return await self._find_out(ServiceFailed(failures.refused_prompt(answer.status, answer.body)))
        self.may_arrive_late = False
        return self._read(answer)

    async def _find_out(self, otherwise: ServiceFailed) -> AcceptedPrompt:
        """Looks whether the prompt arrived although the submit got no clear answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.unreachable_s
        refusals = HttpRefusals(self._settings.refused_s)
        misses = 0
        while True:
            try:
                known = await self._known()
            except Unreachable as error:
                if refusals.are_enough(error) or loop.time() >= deadline:
                    raise fail(
                        FailureKind.CRASHED,
                        f"The server did not answer the submit and was away afterwards: {error}",
                    ) from error
            else:
                if known is not None:
                    return known
                misses += 1
                if misses > 1:
                    raise otherwise
            await asyncio.sleep(self._settings.settle_s)

    def _read(self, answer: ApiAnswer) -> AcceptedPrompt:
        body = answer.body
        if not answer.is_ok:
            raise ServiceFailed(failures.refused_prompt(answer.status, body))
        if not isinstance(body, dict) or not isinstance(body.get("prompt_id"), str):
            raise fail(
                FailureKind.DEAD_WORKER,
                "The answer to the submit is not from ComfyUI: check the server's address.",
            )
        if body["prompt_id"] != self._prompt_id:
            raise UnwantedPrompt(
                body["prompt_id"],
                fail(
                    FailureKind.DEAD_WORKER,
                    "The server replaced the prompt id: it is older than 0.3.45. Update it.",
                ),
            )
        errors = body.get("node_errors")
        if isinstance(errors, dict) and errors:
            # Partly accepted: the server drops outputs with errors and runs the rest.
            message = "The server would run only a part of the workflow"
            raise UnwantedPrompt(self._prompt_id, ServiceFailed(failures.invalid_nodes(errors, message)))
        number = body.get("number")
        return AcceptedPrompt(number if isinstance(number, int | float) else None, is_fresh=True)

    def _timed_out(self, accept_s: float) -> ServiceFailed:
        return fail(
            FailureKind.ACCEPT_TIMEOUT, f"The server did not accept the prompt within {accept_s:g} s."
        )


_ANNOTATED = re.compile(r"^(?P<path>.*?)(?: \[(?P<folder>input|output|temp)\])?$", re.DOTALL)


async def place(
    api: ComfyApi,
    settings: ComfyUISettings,
    attachments: Iterable[Attachment | FetchedFile],
    workflow: Workflow,
    folder: str,
) -> Workflow:
    """Uploads the files and returns a graph that names them. Raises `ServiceFailed`, `InvalidWorkflow`."""
    used: set[str] = set()
    for index, attachment in enumerate(attachments):
        filename = _own_name(attachment.filename, index, used)
        current = workflow.nodes[attachment.node].inputs if attachment.node in workflow.nodes else {}
        # Checked before the upload: a wrong node id must not leave files on the server.
        workflow = with_input(workflow, attachment.node, attachment.input, filename)
        original = _reference(current.get(attachment.input)) if attachment.kind == "mask" else None
        content = attachment.data if isinstance(attachment, Attachment) else attachment.path
        upload = UploadedImage(filename, content, folder, original)
        answer = await upload_with_retries(api, settings, upload)
        workflow = with_input(workflow, attachment.node, attachment.input, _name_in_graph(answer, filename))
    return workflow


async def upload_with_retries(api: ComfyApi, settings: ComfyUISettings, upload: UploadedImage) -> ApiAnswer:
    """Repeats the upload while the server is away for a short time. Raises `ServiceFailed`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.unreachable_s
    refusals = HttpRefusals(settings.refused_s)
    while True:
        try:
            answer = await api.upload(upload)
        except Unreachable as error:
            if refusals.are_enough(error):
                raise nobody_there(error) from error
            # A repeated upload overwrites the file. After a timeout it would only take as long again.
            if error.is_timeout or loop.time() >= deadline:
                kind = FailureKind.CRASHED if error.is_refused else FailureKind.TRANSIENT
                raise fail(kind, f"The upload of {upload.filename!r} failed: {error}") from error
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


def _name_in_graph(answer: ApiAnswer, filename: str) -> str:
    """The name that a loading node uses: subfolder and name, and the folder type if it is not `input`."""
    body = answer.body
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise fail(
            FailureKind.UNKNOWN, f"The server did not return the name under which it saved {filename!r}."
        )
    subfolder, kind = body.get("subfolder"), body.get("type", "input")
    path = f"{subfolder}/{body['name']}" if subfolder else body["name"]
    return path if kind == "input" else f"{path} [{kind}]"


def _reference(value: Any) -> dict[str, str] | None:
    """The image that a mask belongs to: the one that its input names."""
    found = _ANNOTATED.match(value) if isinstance(value, str) and value.strip() else None
    if found is None:
        return None
    subfolder, _, filename = found["path"].replace("\\", "/").rpartition("/")
    return {"filename": filename, "subfolder": subfolder, "type": found["folder"] or "input"}


def remove_own(base: Path, subfolder: str, prompt_id: str, *, with_outputs: bool) -> None:
    """`base` is the server's folder, with `input` and `output` in it."""
    # A path that leads elsewhere must never get here.
    assert str(uuid.UUID(prompt_id)) == prompt_id
    for kind in ("input", *(("output",) if with_outputs else ())):
        folder = base / kind / subfolder / prompt_id
        # A symbolic link may lead to other files.
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
