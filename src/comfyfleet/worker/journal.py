"""A file of the attempts that an agent has started: after a crash the next process resumes or stops them.

The poll id is enough to get the same lease again, and the prompt id follows from the attempt. The journal
contains no secrets. If it cannot be written, jobs still run.
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
"""At this number of lines the file is rewritten with the open attempts only."""
_MAX_OPEN = 10_000


class StartedAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt that has started and that has no end in the file."""

    job_id: str
    round: int
    number: int
    epoch: int
    poll_id: str
    service: str

    @property
    def ref(self) -> LeaseRef:
        """Names the attempt and proves nothing: the journal does not store tokens."""
        return LeaseRef(JobId(self.job_id), self.round, self.number, self.epoch, LeaseToken(""))

    @property
    def attempt_id(self) -> str:
        return self.ref.attempt_id


async def stop_orphan(
    begun: StartedAttempt, worker_id: WorkerId, connector: Connector, within_s: float
) -> None:
    """Stops an earlier process's run whose lease is over, so that it does not keep the service busy."""
    _log.info("worker %s: the lease of %s is over; its run is stopped", worker_id, begun.attempt_id)
    orphan = LeasedJob(begun.ref, worker_id, 0.0, 0.0, {}, WorkflowHash(""), begun.service)
    try:
        async with asyncio.timeout(within_s):
            await connector.cancel_job(orphan)
    except Exception as error:
        _log.warning("%s could not stop %s: %r", begun.service, begun.attempt_id, error)


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    begun: StartedAttempt | None = None
    ended: str | None = None


class Journal:
    """The journal of one worker. A second process with the same worker name runs without one."""

    def __init__(self, folder: Path, worker_id: WorkerId) -> None:
        readable = re.sub(r"[^\w.-]", "_", worker_id, flags=re.ASCII)[:60]
        name = f"{readable}-{hashlib.sha256(worker_id.encode()).hexdigest()[:12]}"
        self._path = folder / f"{name}.jsonl"
        self._lock_path = folder / f"{name}.lock"
        self.spool = folder / f"{name}.files"
        """The folder for files in transit. It is emptied at each start."""
        self.instance = ""
        """Identifies this agent to the hub: the same at each start, another one for a second process."""
        self.client_id: str | None = None
        """Identifies this worker to its servers at each start. One process has it at a time."""
        self._worker_id = worker_id
        self._lock: io.FileIO | None = None
        self._file: io.BufferedWriter | None = None
        self._open: dict[str, StartedAttempt] = {}
        self._lines = 0

    def open(self) -> tuple[StartedAttempt, ...]:
        """Returns the attempts that have no end. Without a journal there are none."""
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
    def is_persistent(self) -> bool:
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
            # Windows has no such lock, and two agents that stop each other's runs are worse than no journal.
            return False
        import fcntl

        self._lock = io.FileIO(os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            self.instance = secrets.token_hex(16)
            _log.warning(
                "another process on this machine already runs as worker %s: give every worker its own name",
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
                # A crash cut this line off; the hub knows what it would have said.
                continue
            if line.begun is not None:
                found[line.begun.attempt_id] = line.begun
            if line.ended is not None:
                found.pop(line.ended, None)
        return dict(list(found.items())[-_MAX_OPEN:])

    def _rewrite(self) -> None:
        """The old file stays until the new one is complete."""
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
            # The system has it, so it survives this process. A power failure ends the runs as well.
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            self._lines += 1
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "worker %s cannot write its journal in %s (%s): after a crash it will not know what it ran",
            self._worker_id,
            self._path.parent,
            error.strerror or error,
        )
        self.close()
