"""`comfyfleet key` and `audit`: who may do what at a hub, and who changed what. A key is printed only once."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from comfyfleet.cli.command import collect_all, group, hub_options, limit_option, report
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.options import DurationParam
from comfyfleet.cli.output import ago, echo, plain, print_json, print_table

if TYPE_CHECKING:
    from comfyfleet.client.client import FleetClient
    from comfyfleet.wire.keys import AuditVerifier, CreatedEnrolment, CreatedKey, EnrolmentView, KeyView

_MAX_NAMED = 5


@group("key")
def key_command() -> None:
    """Make, list, rotate and revoke keys."""


@key_command.command("create")
@click.argument("role", type=click.Choice(["admin", "operator", "tenant", "viewer", "worker"]))
@click.option("--name", "label", default="", metavar="TEXT", help="What the key is for.")
@click.option("--tenant", metavar="NAME", help="The tenant of a tenant's key.")
@click.option("--worker", "worker_id", metavar="ID", help="The only worker that a worker's key is valid for.")
@click.option(
    "--days", type=click.FloatRange(0, min_open=True), help="How long it is valid. Default: for ever."
)
@hub_options
def create(
    role: str, label: str, tenant: str | None, worker_id: str | None, days: float | None, **flags: Any
) -> None:
    """Make a key with this ROLE and print it, once."""
    expires_in_s = None if days is None else days * 86400

    async def make(client: FleetClient) -> CreatedKey:
        tenants = await collect_all(client.tenants, lambda page: page.tenants) if tenant is not None else []
        known = [each.id for each in tenants]
        if tenant is not None and tenant not in known:
            named = ", ".join(known[:_MAX_NAMED]) + (", …" if len(known) > _MAX_NAMED else "")
            echo(
                f"Warning: tenant {tenant!r} was not created, so its jobs have no price and no limits. "
                + (
                    f"Tenants of this hub: {named}."
                    if known
                    else f"To create it: comfyfleet tenant create {tenant}"
                ),
                err=True,
            )
        return await client.create_key(
            role, name=label, tenant=tenant, worker_id=worker_id, expires_in_s=expires_in_s
        )

    report(flags, make, lambda made: echo(made.key))


@key_command.command("list")
@hub_options
def list_keys(**flags: Any) -> None:
    """List every key, without its secret."""
    report(
        flags,
        lambda client: collect_all(client.keys, lambda page: page.keys),
        _print_keys,
    )


def _print_keys(keys: list[KeyView]) -> None:
    now = time.time()

    def state(key: KeyView) -> str:
        if key.revoked_at is not None:
            return "revoked"
        return "expired" if key.expires_at is not None and key.expires_at <= now else "valid"

    rows = [
        [
            key.id,
            key.role.value,
            state(key),
            key.tenant or key.worker_id,
            f"{ago(key.created_at, now)} ago",
            key.name,
        ]
        for key in keys
    ]
    print_table(["key", "role", "state", "for", "made", "name"], rows, empty="There are no keys.")


@key_command.command("revoke")
@click.argument("key_id")
@hub_options
def revoke(key_id: str, **flags: Any) -> None:
    """Make a key invalid at once."""
    report(flags, lambda client: client.revoke_key(key_id), lambda key: echo(f"{key.id} revoked"))


@key_command.command("rotate")
@click.argument("key_id")
@click.option(
    "--overlap",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="How long the old secret stays valid. Default: 0.",
)
@hub_options
def rotate(key_id: str, overlap: float, **flags: Any) -> None:
    """Give a key a new secret and print it, once."""
    report(flags, lambda client: client.rotate_key(key_id, overlap), lambda made: echo(made.key))


@key_command.command("invite")
@click.option(
    "--uses",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many workers can use the token.",
)
@click.option(
    "--hours",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="How long the token is valid.",
)
@click.option("--prefix", default="", metavar="TEXT", help="Only for workers whose ids begin with this.")
@click.option(
    "--replace",
    is_flag=True,
    help="Also accept workers that have a key, and revoke that key. Otherwise they are refused.",
)
@hub_options
def invite(uses: int, hours: float, prefix: str, replace: bool, **flags: Any) -> None:
    """Make an enrolment token for workers, and print the command to run on their machines.

    A terminal gets the whole command. In a pipe, standard output has the token only, and standard error the command
    without the token, because logs often keep it. With --json the object has both.
    """
    import shlex

    from comfyfleet.cli.hub_connection import read_hub
    from comfyfleet.cli.settings import read_settings

    chosen = {name: value for name, value in flags.items() if name not in ("as_json", "config")}
    local = read_hub(read_settings(chosen, config=flags.get("config")).data)

    async def make(client: FleetClient) -> tuple[CreatedEnrolment, str]:
        made = await client.invite(
            uses=uses, expires_in_s=hours * 3600, worker_prefix=prefix, replace=replace
        )
        return made, client.url

    def command_of(found: tuple[CreatedEnrolment, str]) -> str:
        made, url = found
        hub, _ = _from_elsewhere(url)
        words = ["worker", "--hub", hub, "--enrol", made.token, "--server", "http://127.0.0.1:8188"]
        if prefix:
            words += ["--name", f"{prefix}1"]
        return f"comfyfleet {shlex.join(words)}"

    def show(found: tuple[CreatedEnrolment, str]) -> None:
        made, url = found
        is_terminal = sys.stdout.isatty()
        line = command_of(found)
        echo(made.token)
        machines = "On the other machine" if uses == 1 else f"On each of up to {uses} machines"
        echo(f"{machines}, within {hours:g} h, where ComfyUI runs on port 8188:", err=not is_terminal)
        echo(f"  {line if is_terminal else line.replace(made.token, 'TOKEN')}", err=not is_terminal)
        elsewhere, is_here_only = _from_elsewhere(url)
        if is_here_only and local is not None and local.host is not None and local.url == url.rstrip("/"):
            echo(
                f"The hub listens on {local.host}. If the other machine does not know {elsewhere}, use an address of "
                "this machine that it can reach.",
                err=True,
            )
        elif is_here_only:
            echo(
                f"This hub answered at {url}, which other machines cannot reach. Start it with --host 0.0.0.0 and a "
                "--certificate. For a worker on this machine, use that address.",
                err=True,
            )

    report(flags, make, show, json=lambda found: {**plain(found[0]), "command": command_of(found)})


@key_command.command("invites")
@hub_options
def invites(**flags: Any) -> None:
    """List every enrolment token, without its secret."""
    report(
        flags,
        lambda client: collect_all(client.invites, lambda page: page.enrolments),
        _print_invites,
    )


def _print_invites(tokens: list[EnrolmentView]) -> None:
    now = time.time()

    def state(token: EnrolmentView) -> str:
        if token.is_good:
            return "valid"
        return "expired" if token.uses_left else "used up"

    rows = [
        [
            token.id,
            state(token),
            token.uses_left,
            f"{token.worker_prefix}*",
            token.replace,
            f"{ago(token.created_at, now)} ago",
        ]
        for token in tokens
    ]
    headings = ["token", "state", "uses left", "for workers", "replaces keys", "made"]
    print_table(headings, rows, empty="There are no enrolment tokens.")


@key_command.command("uninvite")
@click.argument("token_id")
@hub_options
def uninvite(token_id: str, **flags: Any) -> None:
    """Make an enrolment token invalid at once. Keys made with it stay valid."""
    report(
        flags,
        lambda client: client.uninvite(token_id),
        lambda _: echo(f"{token_id} revoked"),
        json=lambda _: {"revoked": token_id},
    )


def _from_elsewhere(url: str) -> tuple[str, bool]:
    """The hub's address for other machines, and whether `url` is a loopback address."""
    import socket
    from urllib.parse import urlsplit

    from comfyfleet.hub.http.credentials import is_loopback

    parts = urlsplit(url)
    host = parts.hostname or ""
    if not (is_loopback(host) or host == "localhost"):
        return url, False
    return parts._replace(netloc=f"{socket.gethostname()}:{parts.port}").geturl(), True


Kind = Literal["operations", "jobs"]
_PAGE_SIZE = 1000


@group("audit")
def audit_command() -> None:
    """Read the audit log, and verify that nobody changed it."""


@audit_command.command("list")
@click.option(
    "--jobs", "is_of_jobs", is_flag=True, help="What callers did to jobs, instead of what operators did."
)
@click.option(
    "--since",
    "since_s",
    type=DurationParam(),
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Only entries of the last 30m, 12h, 7d … A number is hours.",
)
@click.option("--hours", "old_since_s", type=DurationParam(), hidden=True, help="Use --since.")
@limit_option(100)
@hub_options
def list_audit(is_of_jobs: bool, since_s: float, old_since_s: float | None, limit: int, **flags: Any) -> None:
    """List the newest entries, in order of time."""
    from collections import deque

    async def newest(client: FleetClient) -> list[dict[str, Any]]:
        found: deque[dict[str, Any]] = deque(maxlen=limit)
        kind: Kind = "jobs" if is_of_jobs else "operations"
        async for entry in _entries(client, kind, time.time() - (old_since_s or since_s)):
            found.append(entry)
        return list(found)

    report(flags, newest, _print_audit)


def _print_audit(entries: list[dict[str, Any]]) -> None:
    from datetime import datetime

    rows = [
        [
            entry["number"],
            datetime.fromtimestamp(entry["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            entry.get("role") or None,
            entry.get("key_id") or None,
            entry["action"],
            entry.get("target", ""),
            entry.get("outcome", ""),
        ]
        for entry in entries
    ]
    print_table(["", "at", "role", "key", "action", "target", "outcome"], rows, empty="No entry matches.")


@audit_command.command("verify")
@click.option(
    "--known-head",
    "heads",
    multiple=True,
    metavar="KIND=NUMBER:HASH",
    help="A head that you noted before; the log must still contain it. Repeatable.",
)
@click.option("--since", "old_heads", multiple=True, hidden=True, help="Use --known-head.")
@hub_options
def verify(heads: tuple[str, ...], old_heads: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Verify that no entry was changed, removed, moved or inserted. Exit code 1 means that one was.

    This command computes every hash from the entries that the hub lists. Someone who can write to the store could
    rewrite the end of the log, so keep the printed heads elsewhere and give them with --known-head the next time.
    """
    from comfyfleet.cli.hub_connection import ask

    noted = _read_heads((*heads, *old_heads))

    async def look(client: FleetClient) -> dict[str, AuditVerifier]:
        from comfyfleet.wire.keys import AuditVerifier

        found = {}
        for kind in get_args(Kind):
            found[kind] = verifier = AuditVerifier(noted.get(kind))
            async for entry in _entries(client, kind, None):
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
            state = "not intact" if each.problems else "intact"
            echo(f"{kind}={each.head}  {each.entries} entries, {state}")
            for problem in each.problems:
                echo(f"  {problem}")
    if any(each.problems for each in found.values()):
        raise CommandFailed("someone changed the audit log; the lines above say where")


def _read_heads(notes: tuple[str, ...]) -> dict[str, str]:
    noted = {}
    for text in notes:
        kind, _, note = text.partition("=")
        number, _, hash_ = note.partition(":")
        if kind not in get_args(Kind) or not number.isdigit() or len(hash_) != 64:
            raise CommandFailed(
                f"{text!r} is not a head. Write it as `audit verify` printed it: operations=1042:9f86d0…",
                ExitCode.USAGE,
            )
        noted[kind] = note
    return noted


async def _entries(client: FleetClient, kind: Kind, since: float | None) -> AsyncIterator[dict[str, Any]]:
    """Page by page, because a log may have millions of entries."""
    cursor: str | None = None
    while True:
        page = await client.audit(kind, since=since, cursor=cursor, limit=_PAGE_SIZE)
        for entry in page.entries:
            yield entry
        if page.cursor is None:
            return
        cursor = page.cursor
