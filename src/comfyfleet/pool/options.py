"""Arguments of the pool: servers, affinities, durations and attachments, and one table of rules that check their types.

`policy/admission.py` decides whether the engine accepts a job with these values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import Attachment, Timeouts
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.requirement import Preferences, Requirements
from comfyfleet.model.worker import Capabilities
from comfyfleet.model.workflow import read_payload_file, read_workflow_file, workflow_in
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Connector
from comfyfleet.worker.connectors.comfyui import ComfyUISettings
from comfyfleet.worker.settings import AgentSettings

_FAILOVER = ("should_skip", "record_failure", "record_success", "is_blocked")
# The usual types come first, because a check against an abstract class is slow.
_LISTS = (tuple, list, Sequence, Set)
_TEXTS = (str, bytes)


class _Rule(NamedTuple):
    is_right: Callable[[Any], bool]
    words: str


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_duration(value: Any) -> bool:
    number = value.total_seconds() if isinstance(value, timedelta) else value
    return _is_number(number) and number >= 0


def _each(kind: type) -> Callable[[Any], bool]:
    """A string is a sequence of strings, but never meant as a list."""

    def is_right(value: Any) -> bool:
        is_list = isinstance(value, _LISTS) and not isinstance(value, _TEXTS)
        return is_list and all(isinstance(each, kind) for each in value)

    return is_right


def _none_or(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _kind(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


_FLAG = _Rule(_kind(bool), "True or False")
_TEXT = _Rule(_none_or(lambda value: isinstance(value, str) and value != ""), "a text that is not empty")
_WHOLE = _Rule(_is_whole, "a whole number")
_COUNT = _Rule(lambda value: _is_whole(value) and value >= 1, "a whole number of at least 1")
_MOMENT = _Rule(_none_or(_is_number), "a finite number of seconds since the epoch")
_DURATION = _Rule(_is_duration, "a finite number of seconds or a timedelta, and not negative")
_LIMIT = _Rule(_none_or(_is_duration), f"{_DURATION.words}, or None")
_CLIENTS = _Rule(_each(str), "a list of server ids")
_MODE = _Rule(lambda value: value in ("require", "prefer"), "'require' or 'prefer'")

Rulebook = Mapping[str, _Rule]

JOB: Rulebook = {
    "workflow": _Rule(_kind(dict, str, Path, Mapping), "an API-format graph, or the path of a file with one"),
    "priority": _WHOLE,
    "job_id": _TEXT,
    "metadata": _Rule(_none_or(_kind(Mapping)), "a mapping"),
    "max_attempts": _Rule(_none_or(_COUNT.is_right), _COUNT.words),
    "retry_delay": _LIMIT,
    "preferred_client_ids": _CLIENTS,
    "excluded_client_ids": _CLIENTS,
    "affinity_mode": _MODE,
    "include_outputs": _Rule(_each(str), "a list of node ids, each a text"),
    "attachments": _Rule(_each(Attachment), "a list of what attach() makes"),
    "execution_start_timeout": _LIMIT,
    "node_execution_timeout": _LIMIT,
    "timeout": _LIMIT,
    "not_before": _MOMENT,
    "deadline": _MOMENT,
    "on_deadline": _Rule(lambda value: value in ("fail", "flag"), "'fail' or 'flag'"),
    "urgency": _Rule(_kind(str), "a text"),
    "requirements": _Rule(_none_or(_kind(Requirements)), "a Requirements"),
    "service": _TEXT,
    "preferences": _Rule(_none_or(_kind(Preferences)), "a Preferences"),
    "require_workable": _FLAG,
}
WAIT: Rulebook = {"timeout": _LIMIT}
PRIORITY: Rulebook = {"priority": _WHOLE}
POOL: Rulebook = {
    "servers": _Rule(
        lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping),
        'a list of addresses and Servers, such as ["http://gpu-a:8188"]',
    ),
    "store": _Rule(
        lambda value: isinstance(value, str) or callable(getattr(value, "lease", None)),
        "a URL, such as 'memory:', or a store",
    ),
    "cooldown": _DURATION,
    "max_failures_before_block": _COUNT,
    "failover": _Rule(
        _none_or(lambda value: all(callable(getattr(value, name, None)) for name in _FAILOVER)),
        f"a FailoverStrategy with {', '.join(_FAILOVER)}",
    ),
    "workflow_affinities": _Rule(_kind(Iterable), "a list of Affinity"),
    "max_attempts": _COUNT,
    "execution_start_timeout": _LIMIT,
    "node_execution_timeout": _LIMIT,
    "affinity_wait": _DURATION,
    "patience": _Rule(lambda value: _is_number(value) and value >= 0, "a finite number that is not negative"),
    "health_check_interval": _DURATION,
    "reconnection_grace": _DURATION,
    "slots": _COUNT,
    "rules": _Rule(_none_or(_kind(Rules)), "a Rules"),
    "agent": _Rule(_none_or(_kind(AgentSettings)), "an AgentSettings"),
    "comfyui": _Rule(_none_or(_kind(ComfyUISettings)), "a ComfyUISettings"),
}
SERVER: Rulebook = {
    "url": _TEXT,
    "id": _TEXT,
    "slots": _COUNT,
    "capabilities": _Rule(_none_or(_kind(Capabilities)), "a Capabilities"),
    "headers": _Rule(_kind(Mapping), "a mapping"),
}
AFFINITY: Rulebook = {
    "workflow_hash": _Rule(_kind(str), "a text: hash_workflow(graph)"),
    "preferred_client_ids": _CLIENTS,
    "excluded_client_ids": _CLIENTS,
    "mode": _MODE,
}


def check(rules: Rulebook, given: Mapping[str, Any]) -> None:
    """Refuse the first argument that breaks its rule. Arguments without a rule are not checked."""
    for name, rule in rules.items():
        if not rule.is_right(given[name]):
            raise Refusal(RefusalCode.INVALID_REQUEST, f"{name} must be {rule.words}; {given[name]!r} is not")


def check_outputs(names: Iterable[str], graph: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in graph]
    if unknown:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"include_outputs names nodes that the workflow does not have: {', '.join(unknown)}; "
            f"it has {', '.join(graph)}",
        )


Seconds = float | timedelta
"""A duration: a number of seconds, or a timedelta."""

AffinityMode = Literal["require", "prefer"]

# Most jobs have no requirements and no timeouts and share these values.
_NO_REQUIREMENTS = Requirements()
_NO_TIMEOUTS = Timeouts()


class Server(msgspec.Struct, frozen=True):
    """A server of the pool. The default id is its host and port."""

    url: str | None = None
    id: str | None = None
    slots: int = 1
    capabilities: Capabilities | None = None
    """Declared capabilities such as region, cost and tenants. They override discovered ones."""
    connector: Connector | None = None
    """Replaces the ComfyUI connector. It may be of another service."""
    more: tuple[Connector, ...] = ()
    """Connectors of further services of the same worker."""
    headers: dict[str, str] = {}
    folder: Path | None = None
    """The server's folder, if this machine has access to its disk. Job files there are removed once they are stored
    elsewhere."""
    clears_history: bool = False
    keeps_journal: bool = True
    """False for a server that ends with this process and so has nothing to resume."""


class Affinity(msgspec.Struct, frozen=True):
    """The servers of a workflow. `require` restricts it to them; `prefer` waits a little for them, then takes any."""

    workflow_hash: str
    preferred_client_ids: Sequence[str] = ()
    excluded_client_ids: Sequence[str] = ()
    mode: AffinityMode = "require"


def seconds(value: Seconds | None) -> float | None:
    if value is None:
        return None
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def timeouts(start: Seconds | None, stall: Seconds | None, total: Seconds | None) -> Timeouts:
    if start is None and stall is None and total is None:
        return _NO_TIMEOUTS
    return Timeouts(start_s=seconds(start), stall_s=seconds(stall), total_s=seconds(total))


def checked(affinity: Affinity) -> Affinity:
    """Refuse an affinity with wrong types."""
    if not isinstance(affinity, Affinity):
        raise Refusal(RefusalCode.INVALID_REQUEST, f"an affinity is an Affinity; {affinity!r} is not")
    check(AFFINITY, msgspec.structs.asdict(affinity))
    return affinity


def attach(source: str | Path | bytes, node: str, input: str, filename: str | None = None) -> Attachment:  # noqa: A002
    """A file that is uploaded before the run. The input of this node gets its name on the server."""
    if isinstance(source, bytes):
        return Attachment(filename or f"{node}-{input}.png", source, node, input)
    path = Path(source)
    return Attachment(filename or path.name, path.read_bytes(), node, input)


def read_workflow(workflow: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The graph itself, or the graph in a JSON file or a picture."""
    if isinstance(workflow, Mapping):
        return workflow_in(workflow)
    path = Path(workflow)
    try:
        with path.open("rb") as file:
            return read_workflow_file(file, str(path))
    except FileNotFoundError:
        folder = "" if path.is_absolute() else f" in the folder {Path.cwd()}"
        raise Refusal(RefusalCode.INVALID_WORKFLOW, f"there is no workflow file {path}{folder}") from None
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_WORKFLOW, f"{path} cannot be read: {error.strerror}") from error


def read_payload(payload: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The payload of another service than ComfyUI: the object itself, or the one in a JSON file."""
    if isinstance(payload, Mapping):
        return dict(payload)
    path = Path(payload)
    try:
        with path.open("rb") as file:
            return read_payload_file(file, str(path))
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_WORKFLOW, f"{path} cannot be read: {error.strerror}") from error


def of_service(needs: Requirements | None, service: str | None) -> Requirements:
    """The requirements with the service."""
    if needs is None:
        return _NO_REQUIREMENTS if service is None else Requirements(service=service)
    if service is None or service == needs.service:
        return needs
    if needs.service != COMFYUI:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the requirements name the service {needs.service!r}, and the job {service!r}: name one of them",
        )
    return msgspec.structs.replace(needs, service=service)


def routed(
    needs: Requirements, preferences: Preferences, affinity: Affinity, known: Sequence[str]
) -> tuple[Requirements, Preferences]:
    """Add an affinity to requirements and preferences. Refuse one that no server meets: its jobs would never run."""
    preferred = affinity.preferred_client_ids
    workers = tuple(WorkerId(each) for each in preferred)
    if affinity.excluded_client_ids:
        without = tuple(WorkerId(each) for each in affinity.excluded_client_ids)
        needs = msgspec.structs.replace(needs, exclude_workers=(*needs.exclude_workers, *without))
    if workers and affinity.mode == "require":
        if not any(each in known for each in preferred):
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"none of the required servers ({', '.join(preferred)}) is in the pool; it has: "
                f"{', '.join(known) or 'none'}",
            )
        needs = msgspec.structs.replace(needs, workers=workers)
    elif workers:
        preferences = msgspec.structs.replace(preferences, workers=workers)
    return needs, preferences
