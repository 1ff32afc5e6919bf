"""A real hub is killed at random moments and comes back on its port, while callers, watchers and workers go on.

Callers and watchers are processes of their own; workers are `comfyfleet worker --hub`, some with fake ComfyUI servers.
What workers did is taken from what they print, and from what the fake servers say they ran.
"""

from __future__ import annotations

import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from chaos import watchers
from chaos.checker import Finding, check
from chaos.kill_loop import QUIET_WITHIN_S, Teller
from chaos.logs import Line, Log, Role, Tail, read_logs
from chaos.programs import HubProgram, Program, settings_of
from chaos.setting import RULES
from chaos.stage import Actor, Kind, Stage
from chaos.watch_checker import Watched, check_watchers
from comfyfleet.model.ids import prompt_id_of

_POLL_S = 0.02
_MOST_LEASES = 30

HUB_RULES = {
    # Shorter than a hub may be away, so that some leases are over when it is back and some are not.
    "lease_ttl_s": 4.0,
    "acknowledge_s": 4.0,
    **{
        name: getattr(RULES, name)
        for name in (
            "sweep_s",
            "cooldown_s",
            "max_attempts",
            "max_worker_faults",
            "max_releases",
            "give_up_workers",
            "max_failures_before_block",
            "quarantine_blocks",
            "retry_base_s",
            "retry_cap_s",
        )
    },
}


class Size(msgspec.Struct, frozen=True):
    store: Kind
    jobs: int
    kills: int
    window: int = 24
    simulated: tuple[float, ...] = (0.02, 0.1, 0.5, 2.0)
    """For each worker without a server, how long a job takes it."""
    servers: int = 2
    streams: int = 2
    """Watchers of every job over Server-Sent Events, beside its caller."""
    sockets: int = 1
    longest_away_s: float = 5.0


class Sieged(msgspec.Struct, frozen=True):
    finding: Finding
    watched: Watched
    kills: dict[Role, int]


def run(size: Size, seed: int, tell: Teller) -> Sieged:
    with Stage(size.store, 0) as stage, ExitStack() as stack:
        store = None if size.store == "sqlite" else stage.setting.url
        env = settings_of("rules", HUB_RULES)
        hub = HubProgram(stage.setting.folder / "hub", env, store)
        stack.callback(hub.kill)
        hub.start()
        fleet = stack.enter_context(_fleet(stage, hub, size))
        address = watchers.Address(hub.url, hub.key)
        caller = stage.add(
            "caller", "caller", watchers.caller_process, address, seed, size.jobs, size.window, fleet.names
        )
        jobs = size.jobs + len(fleet.names)
        for number in range(size.streams):
            stage.add(f"stream-{number}", "caller", watchers.stream_process, address, caller.who, jobs)
        for number in range(size.sockets):
            stage.add(f"socket-{number}", "caller", watchers.socket_process, address, caller.who, jobs)
        kills = _kill(stage, hub, caller, size, random.Random(seed), tell)
        for actor in list(stage.actors.values()):
            stage.await_end(actor, QUIET_WITHIN_S)
        _read_again(stage, address)
        fleet.note_prompts(read_logs(stage.setting.logs))
        lines = read_logs(stage.setting.logs)
        finding = check(lines)
        watched = check_watchers(
            # The caller and the last reader hear the whole story too.
            lines,
            streams=size.streams + 2,
            sockets=size.sockets,
            workers=fleet.names,
        )
        if not finding.is_clean or watched.wrong:
            print(f"not clean: the logs are kept in {stage.keep_logs()}", file=sys.stderr)
        return Sieged(finding, watched, {"hub": kills})


def _kill(
    stage: Stage, hub: HubProgram, caller: Actor, size: Size, chance: random.Random, tell: Teller
) -> int:
    """The moments are places in the row of finished jobs; the last tenth runs in peace."""
    finished = Tail(stage.setting.logs / f"{caller.who}.jsonl", "seen")
    due = sorted((chance.uniform(0, 0.9 * size.jobs) for _ in range(size.kills)), reverse=True)
    changed_at, before = time.monotonic(), -1
    kills, back_at, is_noted = 0, 0.0, True
    while not stage.has_ended(caller):
        time.sleep(_POLL_S)
        count = finished.look()
        if count != before:
            changed_at, before = time.monotonic(), count
        elif time.monotonic() - changed_at > QUIET_WITHIN_S:
            # The checker will name what is missing.
            break
        stage.check_alive()
        tell(f"{count} of {size.jobs} jobs, {len(due)} kills to come")
        if back_at:
            if time.monotonic() >= back_at:
                back_at, is_noted = 0.0, False
                hub.begin()
            continue
        hub.check_alive()
        if hub.is_up and not is_noted:
            is_noted = True
            stage.note("up", role="hub", value=f"hub.{hub.lives - 2}")
        if hub.is_up and due and due[-1] <= count:
            due.pop()
            kills += 1
            stage.note("killing", role="hub", value=hub.who)
            hub.kill()
            # Mostly at once; sometimes for longer than a lease.
            away_s = (
                chance.uniform(0, 0.5) if chance.random() < 0.7 else chance.uniform(0.5, size.longest_away_s)
            )
            back_at = time.monotonic() + away_s
    return kills


def _read_again(stage: Stage, address: watchers.Address) -> None:
    acknowledged = [
        line.job for line in read_logs(stage.setting.logs) if line.what == "acknowledged" and line.job
    ]
    reader = stage.add("reader", "caller", watchers.reader_process, address, acknowledged)
    stage.await_end(reader, QUIET_WITHIN_S)


class _Fleet:
    """The workers' processes, and the log that is kept for them."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._logs: dict[str, Log] = {}
        self.names: list[str] = []
        self.servers: dict[str, str] = {}
        """By the worker's name, the address of its server."""

    def log(self, worker: str) -> Log:
        if worker not in self._logs:
            self._logs[worker] = Log(self._stage.setting.logs, worker)
        return self._logs[worker]

    def hear(self, worker: str, line: str) -> None:
        """`run ATTEMPT` and `ran ATTEMPT`, as workers without a server say."""
        word, _, attempt = line.partition(" ")
        if word in ("run", "ran") and attempt.count("/") == 3:
            self.log(worker).write("began" if word == "run" else "finished", **_told(attempt))

    def note_prompts(self, lines: list[Line]) -> None:
        """What the servers ran: the id of a prompt follows from the attempt, so attempts are found by trying."""
        jobs = {line.job for line in lines if line.what == "acknowledged" and line.job}
        said = [line.execution or line.value or "" for line in lines]
        epochs = {text.rpartition("/")[2] for text in said if text.count("/") == 3}
        attempts = {
            prompt_id_of(attempt): attempt
            for job in jobs
            for epoch in epochs
            for number in range(1, _MOST_LEASES)
            if (attempt := f"{job}/1/{number}/{epoch}")
        }
        shift = time.monotonic() - time.time()
        for worker, url in self.servers.items():
            for run in _stats(url)["prompt_log"]:
                # Not as of now: the line is written after the fact, and says when it was.
                self.log(worker).write(
                    "began", **_told(attempts[run["prompt_id"]]) | {"at": run["started_at"] + shift}
                )


def _told(attempt: str) -> dict[str, Any]:
    job, round_, lease, epoch = attempt.rsplit("/", 3)
    return {
        "job": job,
        "round": int(round_),
        "lease": int(lease),
        "epoch": int(epoch),
        "execution": attempt,
        "is_bridged": True,
    }


def _stats(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/fake/stats", timeout=10) as response:
        return msgspec.json.decode(response.read())


@contextmanager
def _fleet(stage: Stage, hub: HubProgram, size: Size) -> Iterator[_Fleet]:
    fleet = _Fleet(stage)
    folder = stage.setting.folder
    with ExitStack() as stack:
        urls = _servers(stack, folder, size.servers)
        for number, url in enumerate(urls):
            _worker(stack, fleet, hub, folder, f"gpu-{number}", "--server", url)
            fleet.servers[f"gpu-{number}"] = url
        for number, seconds in enumerate(size.simulated):
            _worker(
                stack, fleet, hub, folder, f"simulated-{number}", "--simulated", str(seconds), "--slots", "4"
            )
        yield fleet


def _servers(stack: ExitStack, folder: Path, count: int) -> list[str]:
    if not count:
        return []
    urls: list[str] = []
    arguments = ["fake-comfyui", "--port", "0", "--count", str(count), "--time-scale", "0.01"]
    program = Program(
        arguments,
        {},
        folder / "servers.said",
        lambda line: urls.append(line.split()[0]) if line.startswith("http://") else None,
    )
    stack.callback(program.kill)
    deadline = time.monotonic() + QUIET_WITHIN_S
    while len(urls) < count:
        if program.has_ended or time.monotonic() > deadline:
            raise RuntimeError("the fake servers did not start")
        time.sleep(_POLL_S)
    return urls


def _worker(stack: ExitStack, fleet: _Fleet, hub: HubProgram, folder: Path, name: str, *how: str) -> None:
    program = Program(
        ["worker", "--hub", hub.url, "--name", name, *how],
        {"COMFYFLEET_KEY": hub.key, "COMFYFLEET_DATA": str(folder / name)},
        folder / "logs" / f"{name}.said",
        lambda line: fleet.hear(name, line),
    )
    fleet.names.append(name)
    stack.callback(program.kill)
