"""What keeps a worker from work, in a line: for `workers` and `top`."""

from __future__ import annotations

from comfyfleet.wire.answers import WorkerBody


def note_on(worker: WorkerBody, now: float) -> str:
    """Empty: nothing does."""
    if worker.offline_reason:
        return f"offline: {worker.offline_reason}"
    notes = []
    if worker.quarantined_until is not None and now < worker.quarantined_until:
        left_s = worker.quarantined_until - now
        notes.append(f"quarantined for another {left_s:.0f} s: too many different workflows failed on it")
    if worker.blocked_workflows:
        count = worker.blocked_workflows
        what = "1 workflow" if count == 1 else f"{count} workflows"
        until = "until lifted"
        if worker.blocked_until is not None:
            first = "" if count == 1 else "the first one "
            until = f"{first}for another {max(0.0, worker.blocked_until - now):.0f} s"
        notes.append(f"blocked for {what}, {until} (comfyfleet blocks)")
    return "; ".join(notes)


def notes_on(workers: list[WorkerBody], now: float) -> list[str]:
    """One line for each worker that something keeps from work."""
    return [f"{worker.id}: {note}" for worker in workers if (note := note_on(worker, now))]
