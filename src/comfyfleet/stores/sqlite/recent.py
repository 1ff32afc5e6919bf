"""The records of the jobs that came last, as they are written: most jobs are leased while theirs is still here.

It saves a look at the file and nothing else. What it holds never changes: what is said differently of a job by now
stands with its entry. Whether a job is there at all is asked elsewhere first.
"""

from __future__ import annotations

from collections import OrderedDict

from comfyfleet.model.ids import JobId

_MAX_BYTES = 8 * 1024 * 1024


class Recent:
    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        # Not a plain one: to find its first key, that looks at all that were removed before it.
        self._records: OrderedDict[JobId, bytes] = OrderedDict()

    def keep(self, job_id: JobId, record: bytes) -> None:
        """The oldest make room. One that is larger than all the room is not kept."""
        if len(record) > self._max_bytes:
            return
        self._records[job_id] = record
        self._bytes += len(record)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._records.popitem(last=False)[1])

    def get(self, job_id: JobId) -> bytes | None:
        return self._records.get(job_id)
