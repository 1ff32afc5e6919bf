"""`comfyfleet key`: who may do what at a hub. A key is shown when it is made, and never again.

`comfyfleet audit`: who changed what at a hub, and whether the log of it is whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from comfyfleet.cli.command_help import group
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.options import TO_REACH, as_json, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.keys import AuditVerifier


@group("key")
def key_command() -> None:
    """Make, list, renew and revoke keys."""


@key_command.command("create")
@click.argument("role", type=click.Choice(["admin", "operator", "tenant", "viewer", "worker"]))
@click.option("--name", "label", default="", metavar="TEXT", help="What it is for.")
@click.option("--tenant", metavar="NAME", help="Whose jobs it is for; a tenant's key needs one.")
@click.option("--worker", "worker_id", metavar="ID", help="The one worker that a worker's key is good for.")
@click.option(
    "--days", type=click.FloatRange(0, min_open=True), help="How long it is good; for ever unless given."
)
@as_json
@settings(*TO_REACH)
def create(
    role: str,
    label: str,
    tenant: str | None,
    worker_id: str | None,
    days: float | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Make a key of a ROLE and print it, this once."""
    from comfyfleet.cli.hub_connection import ask, print_json

    expires_in_s = None if days is None else days * 86400
    made = ask(
        flags,
        lambda client: client.create_key(
            role, name=label, tenant=tenant, worker_id=worker_id, expires_in_s=expires_in_s
        ),
    )
    if as_json:
        print_json(made)
    else:
        echo(made.key)


@key_command.command("list")
@as_json
@settings(*TO_REACH)
def list_keys(as_json: bool, **flags: Any) -> None:
    """Every key, without its secret."""
    import time

    from comfyfleet.cli.hub_connection import ago, ask, print_json, print_table
    from comfyfleet.wire.keys import KeyView

    async def every(client: FleetClient) -> list[KeyView]:
        page = await client.keys()
        found = list(page.keys)
        while page.cursor is not None:
            page = await client.keys(page.cursor)
            found += page.keys
        return found

    found = ask(flags, every)
    if as_json:
        print_json(found)
        return
    now = time.time()

    def state(key: KeyView) -> str:
        if key.revoked_at is not None:
            return "revoked"
        return "expired" if key.expires_at is not None and key.expires_at <= now else "good"

    rows = [
        [
            key.id,
            key.role.value,
            state(key),
            key.tenant or key.worker_id or "–",
            f"{ago(key.created_at, now)} ago",
            key.name,
        ]
        for key in found
    ]
    print_table(["key", "role", "state", "for", "made", "name"], rows, empty="there are no keys")


@key_command.command("revoke")
@click.argument("key_id")
@as_json
@settings(*TO_REACH)
def revoke(key_id: str, as_json: bool, **flags: Any) -> None:
    """End a key at once."""
    from comfyfleet.cli.hub_connection import ask, print_json

    key = ask(flags, lambda client: client.revoke_key(key_id))
    if as_json:
        print_json(key)
    else:
        echo(f"{key.id} revoked")


@key_command.command("rotate")
@click.argument("key_id")
@click.option(
    "--overlap", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="So long the old one is good."
)
@as_json
@settings(*TO_REACH)
def rotate(key_id: str, overlap: float, as_json: bool, **flags: Any) -> None:
    """Give a key a new secret and print it, this once."""
    from comfyfleet.cli.hub_connection import ask, print_json

    made = ask(flags, lambda client: client.rotate_key(key_id, overlap))
    if as_json:
        print_json(made)
    else:
        echo(made.key)


@key_command.command("invite")
@click.option(
    "--uses", type=click.IntRange(1), default=1, show_default=True, help="How many workers it is for."
)
@click.option("--hours", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@click.option("--prefix", default="", metavar="TEXT", help="What the ids of the workers begin with.")
@click.option(
    "--replace",
    is_flag=True,
    help="Also for workers that have a key, which then ends; else they are refused.",
)
@as_json
@settings(*TO_REACH)
def invite(uses: int, hours: float, prefix: str, replace: bool, as_json: bool, **flags: Any) -> None:
    """Make a token with which workers fetch keys of their own, and show the command for their machines.

    At a terminal the whole command is shown. In a pipe standard output has the token alone, and standard error the
    command without it, as that is often kept; with --json both are in the object.
    """
    import shlex
    import sys

    from comfyfleet.cli.hub_connection import ask, plain, print_json
    from comfyfleet.wire.keys import CreatedEnrolment

    async def make(client: FleetClient) -> tuple[CreatedEnrolment, str]:
        made = await client.invite(
            uses=uses, expires_in_s=hours * 3600, worker_prefix=prefix, replace=replace
        )
        return made, client.url

    made, url = ask(flags, make)
    far, is_near = _from_elsewhere(url)
    words = ["worker", "--hub", far, "--enrol", made.token, "--server", "http://127.0.0.1:8188"]
    if prefix:
        words += ["--name", f"{prefix}1"]
    command_ = f"comfyfleet {shlex.join(words)}"
    if as_json:
        print_json({**plain(made), "command": command_})
        return
    is_seen = sys.stdout.isatty()
    echo(made.token)
    machines = "On the other machine" if uses == 1 else f"On each of up to {uses} machines"
    echo(f"{machines}, within {hours:g} h, where ComfyUI runs on port 8188:", err=not is_seen)
    echo(f"  {command_ if is_seen else command_.replace(made.token, 'TOKEN')}", err=not is_seen)
    if is_near:
        echo(
            f"This hub was asked at {url}. It must listen where that machine reaches it: start it with --host 0.0.0.0 "
            "and a --certificate; or run the worker here, with that address",
            err=True,
        )


@key_command.command("invites")
@as_json
@settings(*TO_REACH)
def invites(as_json: bool, **flags: Any) -> None:
    """Every enrolment token, without its secret."""
    import time

    from comfyfleet.cli.hub_connection import ago, ask, print_json, print_table
    from comfyfleet.wire.keys import EnrolmentView

    async def every(client: FleetClient) -> list[EnrolmentView]:
        page = await client.invites()
        found = list(page.enrolments)
        while page.cursor is not None:
            page = await client.invites(page.cursor)
            found += page.enrolments
        return found

    found = ask(flags, every)
    if as_json:
        print_json(found)
        return
    now = time.time()

    def state(token: EnrolmentView) -> str:
        if token.is_good:
            return "good"
        return "expired" if token.uses_left else "used up"

    rows = [
        [
            token.id,
            state(token),
            str(token.uses_left),
            f"{token.worker_prefix}*",
            "yes" if token.replace else "no",
            f"{ago(token.created_at, now)} ago",
        ]
        for token in found
    ]
    heads = ["token", "state", "uses left", "for workers", "replaces keys", "made"]
    print_table(heads, rows, empty="there are no enrolment tokens")


@key_command.command("uninvite")
@click.argument("token_id")
@as_json
@settings(*TO_REACH)
def uninvite(token_id: str, as_json: bool, **flags: Any) -> None:
    """End an enrolment token at once; keys that it gave stay."""
    from comfyfleet.cli.hub_connection import ask, print_json

    ask(flags, lambda client: client.uninvite(token_id))
    if as_json:
        print_json({"revoked": token_id})
    else:
        echo(f"{token_id} revoked")


def _from_elsewhere(url: str) -> tuple[str, bool]:
    """The hub's address for other machines, with its port as it is; and whether it was asked at this machine's own."""
    import socket
    from urllib.parse import urlsplit

    from comfyfleet.hub.http.credentials import is_loopback

    parts = urlsplit(url)
    host = parts.hostname or ""
    if not (is_loopback(host) or host == "localhost"):
        return url, False
    return parts._replace(netloc=f"{socket.gethostname()}:{parts.port}").geturl(), True


Kind = Literal["operations", "jobs"]
_PAGE = 1000


@group("audit")
def audit_command() -> None:
    """Look at the audit log, and check that nobody changed it."""


@audit_command.command("list")
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
def list_audit(is_of_jobs: bool, hours: float, limit: int, as_json: bool, **flags: Any) -> None:
    """The newest entries, in order of time."""
    import time
    from collections import deque
    from datetime import datetime

    from comfyfleet.cli.hub_connection import ask, print_json, print_table

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


@audit_command.command("verify")
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
    from comfyfleet.cli.hub_connection import ask, print_json

    noted = _noted(notes)

    async def look(client: FleetClient) -> dict[str, AuditVerifier]:
        from comfyfleet.wire.keys import AuditVerifier

        found = {}
        for kind in get_args(Kind):
            found[kind] = verifier = AuditVerifier(noted.get(kind))
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
