"""How other queues are run: each in a process of its own, one after the other on one server, answering a line of JSON.

What each of them does is in bench/peers; what is asked of the figures, in the files of the goals.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence

import msgspec

from bench._report import BENCH_PYTHON, PEERS_PYTHON, ROOT

_BULLMQ = ROOT / "bench" / "peers" / "bullmq"


class Told(msgspec.Struct, frozen=True):
    """What a run of a queue answers; zeros and no latencies for what was not asked."""

    enqueue_s: float = 0.0
    process_s: float = 0.0
    latencies_ms: tuple[float, ...] = ()
    rate: float = 0.0


# Those of `--all-peers`.
FURTHER = ("arq", "saq", "dramatiq", "celery", "rq")
NAMES = {"bullmq": "BullMQ", "saq": "SAQ", "celery": "Celery", "rq": "RQ"}
"""As they write themselves, where that is not how we name them."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "ours": (sys.executable, "-m", "bench.redis_direct"),
    "bullmq": ("node", str(_BULLMQ / "run.mjs")),
    "taskiq": (str(BENCH_PYTHON), "-m", "bench.peers.taskiq"),
    "pgqueuer": (str(BENCH_PYTHON), "-m", "bench.peers.pgqueuer"),
    "procrastinate": (str(BENCH_PYTHON), "-m", "bench.peers.procrastinate"),
    "ours embedded": (sys.executable, "-m", "bench.sqlite_cycles"),
    **{name: (str(PEERS_PYTHON), "-m", f"bench.peers.{name}") for name in FURTHER},
}


class PeerFailed(Exception):
    """Says why, in the last words of the peer."""


def check(names: Sequence[str]) -> None:
    """Before anything is measured: a run without its peers would leave old figures beside new ones."""
    if not BENCH_PYTHON.exists():
        raise SystemExit(
            "the peers are not installed: `make bench` does it, or `make .venv-bench/.installed`"
        )
    if "bullmq" in names and not (shutil.which("node") and (_BULLMQ / "node_modules").is_dir()):
        raise SystemExit(
            "BullMQ needs node and npm, which were not found when the peers were installed: "
            "install them, then `rm .venv-bench/.installed && make bench`"
        )
    if set(names) & set(FURTHER) and not PEERS_PYTHON.exists():
        raise SystemExit(
            "the further peers are not installed: `make bench OPTIONS=--all-peers` does it, "
            "or `make .venv-peers/.installed`"
        )


async def that_run(names: Sequence[str], url: str, slots: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Those that work on this Python, and why the others do not, which is told at once."""
    failed: dict[str, str] = {}
    for name in names:
        try:
            await run(name, "throughput", url, slots, slots)
        except PeerFailed as failure:
            failed[name] = str(failure)
            print(f"{name} has no figures, it does not run here: {failure}", file=sys.stderr)
    return tuple(name for name in names if name not in failed), failed


async def run(name: str, *arguments: object) -> Told:
    # Not a pipe: a process of the peer that outlives it would keep it open.
    with tempfile.TemporaryFile() as errors:
        child = await asyncio.create_subprocess_exec(
            *COMMANDS[name], *map(str, arguments), stdout=asyncio.subprocess.PIPE, stderr=errors, cwd=ROOT
        )
        answer, _ = await child.communicate()
        if child.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            print(said, file=sys.stderr)
            last = said.splitlines()[-1] if said else "it said nothing"
            raise PeerFailed(f"{name} ended with {child.returncode}: {last}")
    return msgspec.json.decode(answer.splitlines()[-1], type=Told)
