"""Makes the request to a server from a payload, the files of its job and our own fields.

Files go in as base64, at the places that `payload.py` declares. Nothing here talks to the server.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.failure import FailureKind
from comfyfleet.worker.connectors.a1111.failures import fail
from comfyfleet.worker.connectors.a1111.names import Route
from comfyfleet.worker.connectors.a1111.payload import PICTURE_LISTS, PICTURES, checked_parts
from comfyfleet.worker.connectors.a1111.settings import A1111Settings


def build_request(job: LeasedJob, task_id: str, settings: A1111Settings) -> tuple[Route, dict[str, Any]]:
    """Blocks: it reads files. Raises `InvalidWorkflow` or `ServiceFailed`."""
    route, given = checked_parts(job.workflow)
    body = copy.deepcopy(given)
    files: Iterable[tuple[str, str, str, bytes | Path]] = [
        *((each.node, each.input, each.filename, each.data) for each in job.attachments),
        *((each.node, each.input, each.filename, each.path) for each in job.fetched),
    ]
    for node, place, name, data in files:
        _put(body, f"{node}.{place}", name, data)
    for name in PICTURES[route]:
        if name != "mask" and not body.get(name):
            raise fail(
                FailureKind.MISSING_INPUT,
                f"{route} needs a picture: give `body.{name}` in base64, or a file for it in `inputs`.",
                (name,),
            )
    if not route.startswith("extra"):
        body["force_task_id"] = task_id
        body["send_images"] = True
        body["save_images"] = settings.save_images
        body["override_settings_restore_afterwards"] = True
    return route, body


def named_checkpoint(body: Mapping[str, Any]) -> str:
    return str((body.get("override_settings") or {}).get("sd_model_checkpoint") or "")


def with_checkpoint(body: dict[str, Any], title: str) -> dict[str, Any]:
    """The server loads the checkpoint of its options for a request that names none."""
    return {
        **body,
        "override_settings": {**(body.get("override_settings") or {}), "sd_model_checkpoint": title},
    }


def picture_count(body: Mapping[str, Any]) -> int | None:
    """How many pictures the request orders. None: a script decides."""
    if body.get("script_name"):
        return None
    return int(body.get("batch_size", 1)) * int(body.get("n_iter", 1))


def _put(body: dict[str, Any], target: str, name: str, data: bytes | Path) -> None:
    content = data if isinstance(data, bytes) else data.read_bytes()
    text = base64.b64encode(content).decode()
    first, *path = target.split(".")
    if first != "body" or not path:
        raise _no_place(target, name)
    last = path.pop()
    place: Any = body
    for step in path:
        if isinstance(place, dict):
            place = place.get(step)
        elif isinstance(place, list) and step.isdecimal() and int(step) < len(place):
            place = place[int(step)]
        else:
            place = None
    if not isinstance(place, dict):
        raise _no_place(target, name)
    if not path and last in PICTURE_LISTS:
        entry: Any = {"data": text, "name": name} if last == "imageList" else text
        place[last] = [*(place.get(last) or []), entry]
    else:
        place[last] = text


def _no_place(target: str, name: str) -> Exception:
    return fail(
        FailureKind.INVALID_WORKFLOW,
        f"The file {name!r} has no place {target!r} in the payload. Name one such as node `body`, input `init_images`.",
    )
