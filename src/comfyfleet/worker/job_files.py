"""The files of a job at a worker: inputs before its run, and cleaning up after it.

Inputs are fetched to this machine's disk and checked against their size and SHA-256. The connector passes
them to its server, and removes what an attempt left there once the hub has taken the completion.
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

_log = logging.getLogger(__name__)

_TRIES = 4
_BATCH_SIZE = 4
_ENDING = re.compile(r"\.[A-Za-z0-9]{1,8}$")
_TIDY_UP_S = 10.0


class TransferRetry(Backoff):
    """A few tries for a file while the hub answers, any number while it is away. The lease bounds both."""

    def __init__(self, settings: AgentSettings, confirmed_at: Callable[[], float]) -> None:
        super().__init__(settings)
        self._confirmed_at = confirmed_at
        self._failures = 0
        self._failed_at: float | None = None

    def is_over(self) -> bool:
        """To be called after each failed try."""
        self._failures += 1
        if self._failed_at is None:
            self._failed_at = asyncio.get_running_loop().time()
        return self._failures >= _TRIES and self._confirmed_at() > self._failed_at


async def with_inputs(
    api: InputSource, job: LeasedJob, settings: AgentSettings, confirmed_at: Callable[[], float], folder: Path
) -> LeasedJob:
    """`confirmed_at`: when the hub last confirmed the lease. Raises `ServiceFailed`."""
    size = sum(file.size or 0 for file in job.inputs)
    if size > settings.max_input_bytes:
        most = settings.max_input_bytes
        raise _failed(
            FailureKind.MISSING_INPUT,
            job.inputs[0],
            f"the inputs have {size} bytes together; this worker takes at most {most}. Submit smaller files",
        )
    # Several inputs may use the same file.
    files = {file.file_id: file for file in job.inputs}
    paths = {file_id: folder / f"{index}" for index, file_id in enumerate(files)}
    await gather_bounded(
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


async def gather_bounded(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs a few at a time. The first failure ends the others and is raised."""
    if len(coroutines) < 2:
        return [await work for work in coroutines]
    free = asyncio.Semaphore(_BATCH_SIZE)

    async def one(work: Coroutine[Any, Any, T]) -> T:
        async with free:
            return await work

    tasks = [asyncio.create_task(one(work)) for work in coroutines]
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
        for work in coroutines:
            # A coroutine that never started would warn that nobody awaited it.
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
                    f"the hub does not have it any more ({refusal}). Upload it and submit again",
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
            # A first difference may come from the network; a second one comes from the hub's copy.
            if is_altered:
                raise _failed(
                    FailureKind.MISSING_INPUT,
                    file,
                    f"the hub's copy is not what was uploaded: {differs}. Upload it and submit again",
                )
            is_altered = True
        await asyncio.sleep(patience.next_s())


def _difference(file: InputFile, path: Path) -> str | None:
    size, digest = measured(path)
    if file.size is not None and size != file.size:
        return f"{size} bytes arrived, {file.size} were expected"
    if file.sha256 is not None and digest != file.sha256:
        return "its SHA-256 differs"
    return None


def measured(path: Path) -> tuple[int, str]:
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        return content.tell(), digest


def _own_name(file: InputFile) -> str:
    """The hub's id is unique and contains no path. The suffix stays because nodes look at it."""
    ending = _ENDING.search(file.name)
    return file.file_id + (ending[0].lower() if ending else "")


def _failed(kind: FailureKind, file: InputFile, why: str) -> ServiceFailed:
    target = f"{file.node}.{file.input}"
    message = f"Cannot fetch the file {file.file_id} for the input {target}: {why}."
    return ServiceFailed(Failure(kind, message, node_id=file.node, missing=(file.file_id,)))


@runtime_checkable
class CleansUp(Protocol):
    async def clean_up(self, job: LeasedJob, *, are_outputs_kept: bool) -> None:
        """Removes this attempt's files and no others; its outputs only if the hub has them."""


async def clean_up(connector: Connector, job: LeasedJob, result: JobResult) -> None:
    if not isinstance(connector, CleansUp):
        return
    are_kept = all(file.file_id is not None for file in result.files)
    try:
        async with asyncio.timeout(_TIDY_UP_S):
            await connector.clean_up(job, are_outputs_kept=are_kept)
    except Exception as error:
        _log.warning("cannot remove the files of %s from its server: %r", job.attempt_id, error)
