"""How other queues are run: each in a process of its own, one after the other on one server, answering a line of JSON.

What each of them does is in bench/peers; what is asked of the figures, in the files of the goals.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence

import msgspec

from bench._report import BENCH_PYTHON, ROOT

_BULLMQ = ROOT / "bench" / "peers" / "bullmq"


class Told(msgspec.Struct, frozen=True):
    """What a run of a queue answers; zeros and no latencies for what was not asked."""

    enqueue_s: float = 0.0
    process_s: float = 0.0
    latencies_ms: tuple[float, ...] = ()
    rate: float = 0.0


COMMANDS: dict[str, tuple[str, ...]] = {
    "ours": (sys.executable, "-m", "bench.redis_direct"),
    "bullmq": ("node", str(_BULLMQ / "run.mjs")),
    "taskiq": (str(BENCH_PYTHON), "-m", "bench.peers.taskiq"),
    "pgqueuer": (str(BENCH_PYTHON), "-m", "bench.peers.pgqueuer"),
    "procrastinate": (str(BENCH_PYTHON), "-m", "bench.peers.procrastinate"),
    "ours embedded": (sys.executable, "-m", "bench.sqlite_cycles"),
}


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


async def run(name: str, *arguments: object) -> Told:
    child = await asyncio.create_subprocess_exec(
        *COMMANDS[name], *map(str, arguments), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    answer, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"{name} ended with {child.returncode}; see above")
    return msgspec.json.decode(answer.splitlines()[-1], type=Told)
