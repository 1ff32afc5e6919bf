"""`comfyfleet audit`: who changed what at a hub, and whether the log of it is whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from comfyfleet.cli.endings import CommandFailed, ExitCode
from comfyfleet.cli.helping import group
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.printing import echo

if TYPE_CHECKING:
    from comfyfleet.client.fleet import FleetClient
    from comfyfleet.wire.chaining import Verifier

Kind = Literal["operations", "jobs"]
_PAGE = 1000


@group("audit")
def command() -> None:
    """Look at the audit log, and check that nobody changed it."""


@command.command("list")
@click.option(
    "--jobs", "is_of_jobs", is_flag=True, help="What callers did to jobs, in place of what operators did."
)
@click.option(
    "--hours",
    type=click.FloatRange(0, min_open=True),
    default=24.0,
    show_default=True,
    help="Of the last so many hours.",
)
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many, the newest."
)
@as_json
@settings(*TO_REACH)
def list_(is_of_jobs: bool, hours: float, limit: int, as_json: bool, **flags: Any) -> None:
    """The newest entries, in order of time."""
    import time
    from collections import deque
    from datetime import datetime

    from comfyfleet.cli.reach import ask, print_json, print_table

    async def newest(client: FleetClient) -> list[dict[str, Any]]:
        found: deque[dict[str, Any]] = deque(maxlen=limit)
        async for entry in _every(
            client, "jobs" if is_of_jobs else "operations", time.time() - hours * 3600, _PAGE
        ):
            found.append(entry)
        return list(found)

    found = ask(flags, newest)
    if as_json:
        print_json(found)
        return
    rows = [
        [
            str(entry["number"]),
            datetime.fromtimestamp(entry["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            entry.get("role") or "–",
            entry.get("key_id") or "–",
            entry["action"],
            entry.get("target", ""),
            entry.get("outcome", ""),
        ]
        for entry in found
    ]
    print_table(["", "at", "role", "key", "action", "target", "outcome"], rows, empty="nothing is noted")


@command.command("verify")
@click.option(
    "--since",
    "notes",
    multiple=True,
    metavar="KIND=NUMBER:HASH",
    help="A head that was noted before; it must still be there. Repeatable.",
)
@as_json
@settings(*TO_REACH)
def verify(notes: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Check that no entry was changed, removed, moved or slipped in. The exit code is 1 if one was.

    Every hash is computed here, from what the hub lists. Whoever can write to the store could write its end anew,
    so note the heads that are printed somewhere else, and give them with --since the next time.
    """
    from comfyfleet.cli.reach import ask, print_json

    noted = _noted(notes)

    async def look(client: FleetClient) -> dict[str, Verifier]:
        from comfyfleet.wire.chaining import Verifier

        found = {}
        for kind in get_args(Kind):
            found[kind] = verifier = Verifier(noted.get(kind))
            async for entry in _every(client, kind, None, _PAGE):
                verifier.take(entry)
            verifier.end()
        return found

    found = ask(flags, look)
    if as_json:
        print_json(
            {
                kind: {"entries": each.entries, "head": each.head, "problems": each.problems}
                for kind, each in found.items()
            }
        )
    else:
        for kind, each in found.items():
            echo(f"{kind}={each.head}  {each.entries} entries, {'not whole' if each.problems else 'whole'}")
            for problem in each.problems:
                echo(f"  {problem}")
    if any(each.problems for each in found.values()):
        raise CommandFailed("the audit log is not as it was written")


def _noted(notes: tuple[str, ...]) -> dict[str, str]:
    noted = {}
    for text in notes:
        kind, _, note = text.partition("=")
        number, _, hash_ = note.partition(":")
        if kind not in get_args(Kind) or not number.isdigit() or len(hash_) != 64:
            raise CommandFailed(
                f"{text!r} is no head: write it as it was printed, such as operations=1042:9f86d0…",
                ExitCode.USAGE,
            )
        noted[kind] = note
    return noted


async def _every(
    client: FleetClient, kind: Kind, since: float | None, limit: int
) -> AsyncIterator[dict[str, Any]]:
    cursor: str | None = None
    while True:
        page = await client.audit(kind, since=since, cursor=cursor, limit=limit)
        for entry in page.entries:
            yield entry
        if page.cursor is None:
            return
        cursor = page.cursor
