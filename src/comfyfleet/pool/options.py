"""What a user of the pool may say: servers, affinities, durations, files to attach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import Attachment, Timeouts
from comfyfleet.model.requirement import Preferences, Requirements
from comfyfleet.model.worker import Capabilities
from comfyfleet.model.workflow_files import read_workflow_file, workflow_in
from comfyfleet.pool.checks import AFFINITY, check
from comfyfleet.ports import Connector

Seconds = float | timedelta
"""A duration: a number of seconds, or a timedelta."""

AffinityMode = Literal["require", "prefer"]

# Most jobs have none; they share what says so.
_NO_TIMEOUTS = Timeouts()


class Server(msgspec.Struct, frozen=True):
    """A server of the pool. Its id is its host and port unless named."""

    url: str | None = None
    id: str | None = None
    slots: int = 1
    capabilities: Capabilities | None = None
    """What cannot be discovered: region, cost, tenants. What is declared wins over what is found."""
    connector: Connector | None = None
    """Speaks to the server instead of the ComfyUI connector."""
    more: tuple[Connector, ...] = ()
    """Connectors of further services that the same worker offers, one for each."""
    headers: dict[str, str] = {}
    folder: Path | None = None
    """The server's own folder, where its disk is this machine's: what jobs left there is removed once it is kept
    elsewhere."""
    clears_history: bool = False
    keeps_journal: bool = True
    """False for a server that ends with this process: there is nothing to go on with at the next start."""


class Affinity(msgspec.Struct, frozen=True):
    """Which servers a workflow goes to. `require` restricts; `prefer` waits a little for them, then takes any."""

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
    """Refuses an affinity that would mean something else than it says."""
    if not isinstance(affinity, Affinity):
        raise Refusal(RefusalCode.INVALID_REQUEST, f"an affinity is an Affinity; {affinity!r} is not")
    check(AFFINITY, msgspec.structs.asdict(affinity))
    return affinity


def attach(source: str | Path | bytes, node: str, input: str, filename: str | None = None) -> Attachment:  # noqa: A002
    """A file to upload before the run; the input of that node gets its name on the server."""
    if isinstance(source, bytes):
        return Attachment(filename or f"{node}-{input}.png", source, node, input)
    path = Path(source)
    return Attachment(filename or path.name, path.read_bytes(), node, input)


def read_workflow(workflow: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """A graph as it is, or from a file: JSON, or a picture that carries it."""
    if isinstance(workflow, Mapping):
        return workflow_in(workflow)
    path = Path(workflow)
    try:
        with path.open("rb") as file:
            return read_workflow_file(file, str(path))
    except FileNotFoundError:
        raise Refusal(RefusalCode.INVALID_WORKFLOW, f"there is no workflow file {path}") from None
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_WORKFLOW, f"{path} cannot be read: {error.strerror}") from error


def routed(
    needs: Requirements, wishes: Preferences, affinity: Affinity, known: Sequence[str]
) -> tuple[Requirements, Preferences]:
    """An affinity as needs and wishes. One that nobody of the pool meets is a slip, and would wait for ever."""
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
        wishes = msgspec.structs.replace(wishes, workers=workers)
    return needs, wishes
