"""What a shell completes behind a command: the ids of jobs and workers, asked of the hub while somebody presses a key.

Nothing is ever told here: a hub that is away, or a key that may not look, completes nothing.

Ids of jobs as people write them: whole, or the beginning or the end of one, as far as that means one job.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from comfyfleet.cli.exit_codes import CommandFailed, ExitCode

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from comfyfleet.client.client import FleetClient


_MOST = 50
_ANSWER_S = 1.0
"""Whoever waits for a completion has typed on by then."""


def job_ids(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    async def found(client: FleetClient) -> Sequence[tuple[str, str]]:
        return [(job.id, job.status) for job in (await client.jobs(limit=_MOST)).jobs]

    return _completed(context, begun, found)


def worker_ids(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    async def found(client: FleetClient) -> Sequence[tuple[str, str]]:
        return [(worker.id, worker.status.value) for worker in await client.workers()]

    return _completed(context, begun, found)


def _completed(
    context: click.Context,
    begun: str,
    found: Callable[[FleetClient], Coroutine[Any, Any, Sequence[tuple[str, str]]]],
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from comfyfleet.cli.hub_connection import ask
    from comfyfleet.cli.options import TO_REACH

    flags = {name: context.params.get(name) for name in TO_REACH}
    try:
        listed = ask(flags, found, patience_s=_ANSWER_S)
    except Exception:
        # A traceback between the words that somebody types helps nobody.
        return []
    return [CompletionItem(name, help=state) for name, state in listed if name.startswith(begun)]


T = TypeVar("T")

_WHOLE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PART = re.compile(r"[0-9a-f-]{4,35}")
_SHOWN = 8
"""Characters at the end of an id that a table shows: ids begin with the time, so jobs of one moment begin alike."""
_PAGE, _PAGES = 1_000, 10
_NAMED = 5


def short_ids(job_ids: Iterable[str]) -> dict[str, str]:
    """The end of each, as long as it takes to tell them apart."""
    every = set(job_ids)
    for length in range(_SHOWN, 36):
        if len({job_id[-length:] for job_id in every}) == len(every):
            return {job_id: job_id[-length:] for job_id in every}
    return {job_id: job_id for job_id in every}


async def whole_id(client: FleetClient, given: str) -> str:
    """The id of the one job that is meant. What is no part of an id, or of no job, is left to the hub to refuse."""
    part = given.lower().removeprefix("…")
    if _WHOLE.fullmatch(part) or not _PART.fullmatch(part):
        return given
    found: dict[str, str] = {}
    cursor: str | None = None
    for _ in range(_PAGES):
        page = await client.jobs(cursor=cursor, limit=_PAGE)
        found |= {job.id: job.status for job in page.jobs if job.id.startswith(part) or job.id.endswith(part)}
        cursor = page.cursor
        if cursor is None:
            break
    if not found:
        if cursor is not None:
            raise CommandFailed(
                f"none of the newest {_PAGE * _PAGES:,} jobs has an id that begins or ends with {given!r}: give the "
                "whole id",
                ExitCode.REFUSED,
            )
        return given
    if len(found) > 1:
        named = ", ".join(f"{job_id} ({status})" for job_id, status in list(found.items())[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise CommandFailed(
            f"{given!r} may mean {len(found)} jobs: {named}{more}. Give more of the id", ExitCode.USAGE
        )
    return next(iter(found))


def ask_about(flags: dict[str, Any], job_id: str, work: Callable[[FleetClient, str], Awaitable[T]]) -> T:
    """`ask` about one job, by its id or a part of it."""
    from comfyfleet.cli.hub_connection import ask

    async def asking(client: FleetClient) -> T:
        return await work(client, await whole_id(client, job_id))

    return ask(flags, asking)
