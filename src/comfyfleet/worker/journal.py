"""What an agent has begun, in a file that outlives it: after a crash the next one goes on with it, or clears it away.

A line for each attempt that begins and one for its end; the poll it was leased by is enough to get the same lease again
from the other side, and the prompt id follows from the attempt. Nothing secret is kept. A journal that cannot be
written costs its comfort, never a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import os
import re
import secrets
import shutil
import sys
from pathlib import Path

import msgspec

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.ids import JobId, LeaseToken, PollId, WorkerId, WorkflowHash
from comfyfleet.ports import Connector

_log = logging.getLogger(__name__)

_MAX_LINES = 1_000
"""A file of so many lines is written anew with what is still open."""
_MAX_OPEN = 10_000


class StartedAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt that was begun and, as far as the file knows, has not ended."""

    job_id: str
    round: int
    number: int
    epoch: int
    poll_id: str
    service: str

    @property
    def ref(self) -> LeaseRef:
        """Names the attempt and proves nothing: the token is not kept."""
        return LeaseRef(JobId(self.job_id), self.round, self.number, self.epoch, LeaseToken(""))

    @property
    def attempt_id(self) -> str:
        return self.ref.attempt_id


async def stop_orphan(
    begun: StartedAttempt, worker_id: WorkerId, connector: Connector, within_s: float
) -> None:
    """What an agent before us began and nobody waits for any more must not keep the service busy."""
    _log.info("worker %s: the lease of %s is over; it is stopped", worker_id, begun.attempt_id)
    nobodys = LeasedJob(begun.ref, worker_id, 0.0, 0.0, {}, WorkflowHash(""), begun.service)
    try:
        async with asyncio.timeout(within_s):
            await connector.cancel_job(nobodys)
    except Exception as error:
        _log.warning("%s could not stop %s: %r", begun.service, begun.attempt_id, error)


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    begun: StartedAttempt | None = None
    ended: str | None = None


class Journal:
    """Of one worker. Opened by one process at a time; another one of the same name gets on without."""

    def __init__(self, folder: Path, worker_id: WorkerId) -> None:
        readable = re.sub(r"[^\w.-]", "_", worker_id, flags=re.ASCII)[:60]
        name = f"{readable}-{hashlib.sha256(worker_id.encode()).hexdigest()[:12]}"
        self._path = folder / f"{name}.jsonl"
        self._lock_path = folder / f"{name}.lock"
        self.spool = folder / f"{name}.files"
        """For files on their way. What is found there at the start is nobody's."""
        self.instance = ""
        """Which agent this is to the other side: the same at each start, and another's where one runs already."""
        self.client_id: str | None = None
        """Who this worker is to its servers, at each start; of one process at a time."""
        self._worker_id = worker_id
        self._lock: io.FileIO | None = None
        self._file: io.BufferedWriter | None = None
        self._open: dict[str, StartedAttempt] = {}
        self._lines = 0

    def open(self) -> tuple[StartedAttempt, ...]:
        """What was begun and not ended before. Without a journal, nothing."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._take_lock():
                return ()
            shutil.rmtree(self.spool, ignore_errors=True)
            self.spool.mkdir(mode=0o700)
            self._open = self._read()
            self._rewrite()
        except OSError as error:
            self._give_up(error)
            return ()
        return tuple(self._open.values())

    @property
    def is_kept(self) -> bool:
        return self._file is not None

    def begin(self, ref: LeaseRef, service: str, poll_id: PollId) -> None:
        if self._file is None or len(self._open) >= _MAX_OPEN:
            return
        begun = StartedAttempt(ref.job_id, ref.round, ref.number, ref.epoch, poll_id, service)
        self._open[ref.attempt_id] = begun
        self._append(_Line(begun=begun))

    def end(self, ref: LeaseRef) -> None:
        if self._open.pop(ref.attempt_id, None) is not None and self._file is not None:
            self._append(_Line(ended=ref.attempt_id))

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._file = self._lock = self.client_id = None

    def _take_lock(self) -> bool:
        if sys.platform == "win32":
            # There is no lock of this kind, and two agents that clear away each other's runs are worse than none.
            return False
        import fcntl

        self._lock = io.FileIO(os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            self.instance = secrets.token_hex(16)
            _log.warning(
                "another process on this machine works as %s already: give every worker a name of its own",
                self._worker_id,
            )
            return False
        self.client_id = self._lock.read().decode("ascii", "replace")
        if re.fullmatch("[0-9a-f]{32}", self.client_id) is None:
            self.client_id = secrets.token_hex(16)
            self._lock.truncate(0)
            self._lock.seek(0)
            self._lock.write(self.client_id.encode())
        self.instance = self.client_id
        return True

    def _read(self) -> dict[str, StartedAttempt]:
        found: dict[str, StartedAttempt] = {}
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return found
        for text in content.splitlines():
            try:
                line = msgspec.json.decode(text, type=_Line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                # Torn by whatever ended us; what it would have said is found out at the other side.
                continue
            if line.begun is not None:
                found[line.begun.attempt_id] = line.begun
            if line.ended is not None:
                found.pop(line.ended, None)
        return dict(list(found.items())[-_MAX_OPEN:])

    def _rewrite(self) -> None:
        """Whole or not at all: the old file stays until the new one stands."""
        if self._file is not None:
            self._file.close()
            self._file = None
        fresh = self._path.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for begun in self._open.values():
                file.write(msgspec.json.encode(_Line(begun=begun)) + b"\n")
        fresh.replace(self._path)
        self._file = self._path.open("ab")
        self._lines = len(self._open)

    def _append(self, line: _Line) -> None:
        assert self._file is not None
        try:
            if self._lines >= _MAX_LINES + 2 * len(self._open):
                self._rewrite()
                return
            # Handed to the system, it outlives this process; a machine that loses its power loses its runs as well.
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            self._lines += 1
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "worker %s keeps no journal in %s (%s): after a crash it will not know what it ran",
            self._worker_id,
            self._path.parent,
            error.strerror or error,
        )
        self.close()
