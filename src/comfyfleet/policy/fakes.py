"""Whether a fake worker may take a job. It makes pictures that nobody can use, so it never takes what is real work.

A fleet of fakes alone works, to try things. Once a real worker was there, whether it is online or not, the jobs are
taken to be meant for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from comfyfleet.model.worker import WorkerRecord


def is_held_back(worker: WorkerRecord, fleet: Iterable[WorkerRecord]) -> bool:
    said = worker.capabilities
    if not said.is_fake or said.works_beside_real:
        return False
    # A server that never answered may be a fake as well.
    return any(other.capabilities.services and not other.capabilities.is_fake for other in fleet)
