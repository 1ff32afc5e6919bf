"""What a job brings, before its run: each file fetched from the hub, compared with what was promised, and attached.

From here on a file is an attachment like any other: how a server takes it in is the connector's. A file that is gone or
altered is nobody's but the caller's to replace; a hub that cannot be reached is tried again, then another attempt may.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable

import msgspec

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.file import InputFile
from comfyfleet.model.job import Attachment
from comfyfleet.ports import InputSource, WorkerApi
from comfyfleet.worker.settings import AgentSettings, Backoff

_TRIES = 4
_ENDING = re.compile(r"\.[A-Za-z0-9]{1,8}$")


class Patience:
    """How long a file is tried to be moved: a few times with a hub that answers, and through its absence for as long as
    the lease lives. Whoever holds the lease ends the tries with it."""

    def __init__(self, settings: AgentSettings, confirmed_at: Callable[[], float]) -> None:
        self._backoff = Backoff(settings)
        self._confirmed_at = confirmed_at
        self._tries = 0
        self._failed_at: float | None = None

    def is_over(self) -> bool:
        """Asked after each try that failed."""
        self._tries += 1
        if self._failed_at is None:
            self._failed_at = asyncio.get_running_loop().time()
        return self._tries >= _TRIES and self._confirmed_at() > self._failed_at

    async def pause(self) -> None:
        await asyncio.sleep(self._backoff.next_s())


async def with_inputs(
    api: WorkerApi, job: LeasedJob, settings: AgentSettings, confirmed_at: Callable[[], float]
) -> LeasedJob:
    """`confirmed_at`: when the hub last answered for the lease. Raises `ServiceFailed`."""
    if not isinstance(api, InputSource):
        raise _failed(FailureKind.UNKNOWN, job.inputs[0], "this worker has no hub to fetch files from")
    size = sum(file.size or 0 for file in job.inputs)
    if size > settings.max_input_bytes:
        most = settings.max_input_bytes
        raise _failed(
            FailureKind.MISSING_INPUT,
            job.inputs[0],
            f"the inputs have {size} bytes together and at most {most} are taken. Bring smaller files",
        )
    contents: dict[str, bytes] = {}
    for file in job.inputs:
        if file.file_id not in contents:
            contents[file.file_id] = await _fetched(api, job, file, Patience(settings, confirmed_at))
    attached = tuple(
        Attachment(_own_name(file), contents[file.file_id], file.node, file.input, file.kind)
        for file in job.inputs
    )
    return msgspec.structs.replace(job, attachments=(*job.attachments, *attached), inputs=())


async def _fetched(api: InputSource, job: LeasedJob, file: InputFile, patience: Patience) -> bytes:
    is_altered = False
    while True:
        try:
            content = await api.fetch_input(job, file)
        except Refusal as refusal:
            if refusal.code is RefusalCode.NOT_FOUND:
                raise _failed(
                    FailureKind.MISSING_INPUT, file, "it is not there any more. Upload it and submit again"
                ) from refusal
            if refusal.code is RefusalCode.LEASE_LOST or patience.is_over():
                raise _failed(FailureKind.TRANSIENT, file, f"the hub refused it: {refusal}") from refusal
        except Exception as error:
            if patience.is_over():
                raise _failed(FailureKind.TRANSIENT, file, f"it did not arrive: {error}") from error
        else:
            differs = _difference(file, content)
            if differs is None:
                return content
            # Once may have been the way; twice is what lies at the hub.
            if is_altered:
                raise _failed(
                    FailureKind.MISSING_INPUT,
                    file,
                    f"what the hub has is not what was uploaded: {differs}. Upload it and submit again",
                )
            is_altered = True
        await patience.pause()


def _difference(file: InputFile, content: bytes) -> str | None:
    if file.size is not None and len(content) != file.size:
        return f"{len(content)} bytes came, {file.size} were promised"
    if file.sha256 is not None and hashlib.sha256(content).hexdigest() != file.sha256:
        return "its SHA-256 differs"
    return None


def _own_name(file: InputFile) -> str:
    """The hub's id, which no two files share and which leads nowhere; nodes look at the ending of a name."""
    ending = _ENDING.search(file.name)
    return file.file_id + (ending[0].lower() if ending else "")


def _failed(kind: FailureKind, file: InputFile, why: str) -> ServiceFailed:
    target = f"{file.node}.{file.input}"
    message = f"The file {file.file_id} for the input {target} could not be had: {why}."
    return ServiceFailed(Failure(kind, message, node_id=file.node, missing=(file.file_id,)))
