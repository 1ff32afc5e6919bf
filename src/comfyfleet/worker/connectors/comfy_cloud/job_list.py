"""Finds an attempt's job among all jobs of the account.

Nothing at Comfy Cloud tells which job an idempotency key made, so each submission carries a mark: the attempt's id in
the prefix of its output files, and in the `_meta` of its nodes. The list of v1 has no graphs; they are read once for
each job and remembered.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from comfyfleet.worker.connectors.comfy_cloud.api import CloudAnswer, CloudApi
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui.api import Unreachable

META = "comfyfleet"
_PAGE = 100
_AT_A_TIME = 5
_NONE: frozenset[str] = frozenset()
_MAX_KNOWN = 10_000
_MAX_VALUES = 200_000
_JOB_ID = re.compile(r"[\w.~-]{1,256}", re.ASCII)
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class ListedJob(msgspec.Struct, frozen=True):
    job_id: str
    mark: str
    status: str
    """v1's word: pending, in_progress, completed, failed, cancelled."""

    @property
    def may_give_a_result(self) -> bool:
        return self.status in ("pending", "in_progress", "completed")


def with_mark(graph: dict[str, Any], mark: str) -> dict[str, Any]:
    """A copy whose nodes carry the mark. `_meta` is a part of the API format that nothing executes."""
    return {
        node_id: {**node, "_meta": {**_meta(node), META: mark}} if isinstance(node, Mapping) else node
        for node_id, node in graph.items()
    }


def _meta(node: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = node.get("_meta")
    return meta if isinstance(meta, Mapping) else {}


def marks_in(workflow: Any, subfolder: str) -> frozenset[str]:
    """The marks of a graph, which may be inside other objects."""
    prefix = re.compile(rf"{re.escape(subfolder)}/({_UUID})(?:/|$)")
    found: set[str] = set()
    for name, value in _texts(workflow):
        if name == META and re.fullmatch(_UUID, value):
            found.add(value)
        elif name == "filename_prefix" and (match := prefix.match(value)) is not None:
            found.add(match[1])
    return frozenset(found)


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    waiting: list[tuple[str, Any]] = [("", value)]
    for _ in range(_MAX_VALUES):
        if not waiting:
            return
        name, each = waiting.pop()
        if isinstance(each, str):
            yield name, each
        elif isinstance(each, Mapping):
            waiting.extend((str(key), inner) for key, inner in each.items())
        elif isinstance(each, list):
            waiting.extend((name, inner) for inner in each)


class CloudJobList:
    def __init__(self, api: CloudApi, settings: ComfyCloudSettings) -> None:
        self._api = api
        self._settings = settings
        self._known: OrderedDict[str, frozenset[str]] = OrderedDict()
        """The marks of jobs. A job's graph never changes."""

    def remember(self, job_id: str, mark: str) -> None:
        self._keep(job_id, frozenset((mark,)))

    def known(self, mark: str) -> str | None:
        return next((job_id for job_id, marks in reversed(self._known.items()) if mark in marks), None)

    async def find(self, marks: Collection[str]) -> list[ListedJob]:
        """The account's newest jobs with one of these marks, the oldest first: somebody may load a finished picture
        and run its graph again, with our mark in it. Raises `Unreachable`."""
        listed = [entry async for entry in self._newest()]
        unknown = [entry["id"] for entry in listed if entry["id"] not in self._known]
        for start in range(0, len(unknown), _AT_A_TIME):
            await self._read(unknown[start : start + _AT_A_TIME])
        found = [
            ListedJob(entry["id"], mark, str(entry.get("status")))
            for entry in listed
            for mark in self._known.get(entry["id"], _NONE).intersection(marks)
        ]
        return found[::-1]

    async def _read(self, job_ids: Sequence[str]) -> None:
        """What was read stays known, also if another request fails."""
        graphs = await asyncio.gather(*map(self._workflow, job_ids), return_exceptions=True)
        for job_id, graph in zip(job_ids, graphs, strict=True):
            if not isinstance(graph, BaseException):
                self._keep(job_id, marks_in(graph, self._settings.subfolder))
        if (error := next((each for each in graphs if isinstance(each, BaseException)), None)) is not None:
            raise error

    def _keep(self, job_id: str, marks: frozenset[str]) -> None:
        self._known[job_id] = marks
        self._known.move_to_end(job_id)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _newest(self) -> AsyncIterator[dict[str, Any]]:
        offset, most = 0, self._settings.find_jobs
        while offset < most:
            size = min(_PAGE, most - offset)
            query = {
                "sort_by": "create_time",
                "sort_order": "desc",
                "limit": str(size),
                "offset": str(offset),
            }
            answer = await self._api.get("/api/jobs", None, query)
            jobs = answer.body.get("jobs") if answer.is_ok and isinstance(answer.body, dict) else None
            if not isinstance(jobs, list):
                raise _no_answer(answer, "the list of jobs")
            for entry in jobs[:size]:
                job_id = entry.get("id") if isinstance(entry, dict) else None
                if isinstance(job_id, str) and _JOB_ID.fullmatch(job_id):
                    yield entry
            offset += len(jobs)
            if len(jobs) < size:
                return

    async def _workflow(self, job_id: str) -> Any:
        """The graph as v2 returns it, or as v1 does. A job whose graph nobody has gets no mark."""
        answer = await self._api.workflow(job_id)
        if answer.is_ok:
            return answer.body
        if answer.status not in (403, 404, 501):
            raise _no_answer(answer, "the graph of a job")
        answer = await self._api.get(f"/api/jobs/{job_id}")
        if answer.is_ok:
            return answer.body.get("workflow") if isinstance(answer.body, dict) else None
        if answer.status not in (403, 404):
            raise _no_answer(answer, "a job")
        return None


def _no_answer(answer: CloudAnswer, what: str) -> Unreachable:
    return Unreachable(f"it answers {answer.status} to the request for {what}", status=answer.status)
