"""What a job brings, before its run: each file fetched to this machine's disk and compared with what was promised.

How a server takes it in is the connector's. A file that is gone or
altered is nobody's but the caller's to replace; a hub that cannot be reached is tried again, then another attempt may.

What an attempt left on its service, once the hub has taken its end: removed by connectors that are set up to.

Only here is it known that a completion was taken and that every output is kept elsewhere. What a service removes, and
how, is its connector's. Nothing depends on it: what could not be removed is told and left.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.file import FetchedFile, InputFile
from comfyfleet.model.job import JobResult
from comfyfleet.ports import Connector, InputSource
from comfyfleet.worker.settings import AgentSettings, Backoff

T = TypeVar("T")

_TRIES = 4
_BATCH_SIZE = 4
_ENDING = re.compile(r"\.[A-Za-z0-9]{1,8}$")


class TransferRetry:
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

    def next_s(self) -> float:
        return self._backoff.next_s()


async def with_inputs(
    api: InputSource, job: LeasedJob, settings: AgentSettings, confirmed_at: Callable[[], float], folder: Path
) -> LeasedJob:
    """`confirmed_at`: when the hub last answered for the lease. Raises `ServiceFailed`."""
    size = sum(file.size or 0 for file in job.inputs)
    if size > settings.max_input_bytes:
        most = settings.max_input_bytes
        raise _failed(
            FailureKind.MISSING_INPUT,
            job.inputs[0],
            f"the inputs have {size} bytes together and at most {most} are taken. Bring smaller files",
        )
    # One file may go into several inputs.
    files = {file.file_id: file for file in job.inputs}
    paths = {file_id: folder / f"{index}" for index, file_id in enumerate(files)}
    await side_by_side(
        [
            _fetch(api, job, file, paths[file_id], TransferRetry(settings, confirmed_at))
            for file_id, file in files.items()
        ]
    )
    fetched = tuple(
        FetchedFile(_own_name(file), paths[file.file_id], file.node, file.input, file.kind)
        for file in job.inputs
    )
    return msgspec.structs.replace(job, fetched=fetched, inputs=())


def no_source(job: LeasedJob) -> ServiceFailed:
    return _failed(FailureKind.UNKNOWN, job.inputs[0], "this worker has no hub to fetch files from")


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """A few at a time. The first that fails ends the others, and what it raised is raised."""
    if len(works) < 2:
        return [await work for work in works]
    free = asyncio.Semaphore(_BATCH_SIZE)

    async def one(work: Coroutine[Any, Any, T]) -> T:
        async with free:
            return await work

    tasks = [asyncio.create_task(one(work)) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in works:
            # One whose turn never came would complain that nobody awaited it.
            work.close()


async def _fetch(
    api: InputSource, job: LeasedJob, file: InputFile, path: Path, patience: TransferRetry
) -> None:
    is_altered = False
    while True:
        try:
            await api.fetch_input(job, file, path)
        except Refusal as refusal:
            if refusal.code is RefusalCode.NOT_FOUND:
                raise _failed(
                    FailureKind.MISSING_INPUT,
                    file,
                    f"it is not there any more ({refusal}). Upload it and submit again",
                ) from refusal
            if refusal.code is RefusalCode.LEASE_LOST or patience.is_over():
                raise _failed(FailureKind.TRANSIENT, file, f"the hub refused it: {refusal}") from refusal
        except Exception as error:
            if patience.is_over():
                raise _failed(FailureKind.TRANSIENT, file, f"it did not arrive: {error}") from error
        else:
            differs = await asyncio.to_thread(_difference, file, path)
            if differs is None:
                return
            # Once may have been the way; twice is what lies at the hub.
            if is_altered:
                raise _failed(
                    FailureKind.MISSING_INPUT,
                    file,
                    f"what the hub has is not what was uploaded: {differs}. Upload it and submit again",
                )
            is_altered = True
        await asyncio.sleep(patience.next_s())


def _difference(file: InputFile, path: Path) -> str | None:
    size, digest = measured(path)
    if file.size is not None and size != file.size:
        return f"{size} bytes came, {file.size} were promised"
    if file.sha256 is not None and digest != file.sha256:
        return "its SHA-256 differs"
    return None


def measured(path: Path) -> tuple[int, str]:
    """Size and SHA-256."""
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        return content.tell(), digest


def _own_name(file: InputFile) -> str:
    """The hub's id, which no two files share and which leads nowhere; nodes look at the ending of a name."""
    ending = _ENDING.search(file.name)
    return file.file_id + (ending[0].lower() if ending else "")


def _failed(kind: FailureKind, file: InputFile, why: str) -> ServiceFailed:
    target = f"{file.node}.{file.input}"
    message = f"The file {file.file_id} for the input {target} could not be had: {why}."
    return ServiceFailed(Failure(kind, message, node_id=file.node, missing=(file.file_id,)))


_log = logging.getLogger(__name__)

_WITHIN_S = 10.0


@runtime_checkable
class CleansUp(Protocol):
    async def tidy_up(self, job: LeasedJob, *, are_outputs_kept: bool) -> None:
        """Removes what this attempt left, and nothing of others; its outputs only if they are kept elsewhere."""


async def tidy_up(connector: Connector, job: LeasedJob, result: JobResult) -> None:
    """After a completion was taken."""
    if not isinstance(connector, CleansUp):
        return
    are_kept = all(file.file_id is not None for file in result.files)
    try:
        async with asyncio.timeout(_WITHIN_S):
            await connector.tidy_up(job, are_outputs_kept=are_kept)
    except Exception as error:
        _log.warning("what %s left on its server stays there: %r", job.attempt_id, error)
