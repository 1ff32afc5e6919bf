"""What a shell completes behind a command: the ids of jobs and workers, asked of the hub while somebody presses a key.

Nothing is ever told here: a hub that is away, or a key that may not look, completes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from comfyfleet.client.fleet import FleetClient

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

    from comfyfleet.cli.options import TO_REACH
    from comfyfleet.cli.reach import ask

    flags = {name: context.params.get(name) for name in TO_REACH}
    try:
        listed = ask(flags, found, patience_s=_ANSWER_S)
    except Exception:
        # A traceback between the words that somebody types helps nobody.
        return []
    return [CompletionItem(name, help=state) for name, state in listed if name.startswith(begun)]
