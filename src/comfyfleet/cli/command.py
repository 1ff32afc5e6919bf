"""What every command shares: its help, the flags that name a hub, and the way its answer is printed.

A command gives `report` the call of the hub and a function that prints the answer; `--json` prints the same answer as
JSON. Job ids may be shortened to their beginning or end. Every command imports this module, so it imports nothing
heavy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click
from click.core import ParameterSource

from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.options import HUB_SETTINGS, as_json, settings
from comfyfleet.cli.output import echo, print_json

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from comfyfleet.client.client import FleetClient

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_EXAMPLES: Mapping[str, Sequence[str]] = {
    "comfyfleet": (
        "demo --once",
        "up --fake 2",
        "submit workflow.json --watch --out pictures",
        "jobs --status failed",
    ),
    "up": (
        "up",
        "up --server http://127.0.0.1:8188 --server http://gpu-b:8188",
        "up --fake 2",
        "up --host 0.0.0.0 --certificate hub.pem",
    ),
    "hub": (
        "hub --store redis://queue:6379/0",
        "hub --store postgresql://fleet@db/fleet --host 0.0.0.0",
    ),
    "worker": (
        "worker --server http://127.0.0.1:8188",
        "worker --hub https://hub:3001 --enrol cfe_… -s http://gpu:8188",
        "worker --store redis://queue:6379/0 -s http://127.0.0.1:8188",
    ),
    "run": (
        "run workflow.json --server http://gpu-a:8188",
        "run workflow.json -s http://gpu-a:8188 --set 6.text='a cat'",
    ),
    "submit": (
        "submit workflow.json --watch --out pictures",
        "submit workflow.json --set 6.text='a cat' --set 3.seed=-1",
        "submit *.json --count 10 --metadata project=autumn",
        "submit upscale.json --attach 10.image=photo.png --watch",
        "submit video.json --vram 24 --deadline 2026-12-01T08:00",
    ),
    "jobs": ("jobs", "jobs --status failed --since 24h", "jobs --tenant acme --json"),
    "job": (
        "job show 9ac945c2",
        "job watch 9ac945c2 --out pictures",
        "job explain 9ac945c2",
        "job cancel 9ac945c2 77ee86bf",
    ),
    "files": ("files list --kind input", "files delete f_…"),
    "workers": ("workers", "workers show gpu-a", "workers drain gpu-a"),
    "simulate": (
        "simulate --workers 4 --jobs 64",
        "simulate --jobs 300 --load 0.8 --html report.html",
        "simulate --from-hub --add-worker 2x24GB",
        "simulate --from-hub --policy comfyfleet --patience 0 --patience 2",
        "simulate --faults 20",
    ),
    "key": ("key invite --uses 4", "key create tenant --tenant acme --days 90", "key list"),
    "tenant": ("tenant create acme", "tenant show acme", "tenant suspend acme"),
}
"""By the name of a command or group. A subcommand of the same name would show them too."""
_WHOLE_SUMMARY = 10_000
"""Characters of a summary to show: click shortens it to fewer by default."""


class GroupedOption(click.Option):
    """An option that the help lists under its own heading."""

    def __init__(self, *names: Any, group: str, **more: Any) -> None:
        super().__init__(*names, **more)
        self.group = group


class _WithExamples(click.Command):
    """Prints the examples of a command below its help, and says which value an option lacks."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.BadOptionUsage as error:
            option = next((each for each in self.get_params(context) if error.option_name in each.opts), None)
            if option is not None and error.message.endswith("requires an argument."):
                name = error.option_name
                value = option.make_metavar(context).replace("INTEGER RANGE", "N").replace("FLOAT RANGE", "N")
                raise click.BadOptionUsage(
                    name, f"Option '{name}' requires a value: {name} {value}", context
                ) from error
            raise

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(context, formatter)
        if lines := _EXAMPLES.get(self.name or ""):
            with formatter.section("Examples"):
                for line in lines:
                    formatter.write(f"  comfyfleet {line}\n")


class _Command(_WithExamples):
    """Lists the grouped options below the others."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(context):
            row = parameter.get_help_record(context)
            if row is not None and not isinstance(parameter, click.Argument):
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(row)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class CommandGroup(_WithExamples, click.Group):
    """`sections` names the commands of each heading. Without it the help has one list."""

    sections: Mapping[str, Sequence[str]] = {}

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in (self.sections or {"Commands": self.list_commands(context)}).items():
            rows = []
            for name in names:
                command = self.get_command(context, name)
                assert command is not None, f"no command {name}"
                if not command.hidden:
                    rows.append((name, command.get_short_help_str(_WHOLE_SUMMARY)))
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(context, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(context), 3, cutoff=0.6)
            hint = ""
            if near:
                hint = " Did you mean " + " or ".join(f"'{each}'" for each in near) + "?"
            raise click.UsageError(f"No such command '{name}'.{hint}", context)
        return super().resolve_command(context, args)


def group(name: str, **more: Any) -> Callable[[Callable[..., Any]], CommandGroup]:
    return click.group(name, cls=CommandGroup, **more)


def command(name: str, **more: Any) -> Callable[[Callable[..., Any]], click.Command]:
    return click.command(name, cls=_Command, **more)


def hub_options(command: F) -> F:
    """The flags of every command that calls a hub: --json, and the settings that find the hub and its key."""
    return as_json(settings(*HUB_SETTINGS)(command))


def limit_option(default: int, most: int | None = None) -> Callable[[F], F]:
    return click.option(
        "-n",
        "--limit",
        type=click.IntRange(1, most),
        default=default,
        show_default=True,
        help="Show at most this many.",
    )


cursor_option = click.option(
    "--cursor", metavar="ID", help="Continue here: the cursor that the last list printed."
)


def report(
    flags: dict[str, Any],
    work: Callable[[FleetClient], Coroutine[Any, Any, T]],
    show: Callable[[T], object],
    *,
    json: Callable[[T], Any] | None = None,
) -> T:
    """Calls the hub and prints the answer: by `show` or, with --json, as JSON. `json` makes the JSON value where it is
    not the answer itself."""
    from comfyfleet.cli.hub_connection import ask

    wants_json = flags.pop("as_json")
    answer = ask(flags, work)
    if wants_json:
        print_json(answer if json is None else json(answer))
    else:
        show(answer)
    return answer


class _Page(Protocol):
    @property
    def cursor(self) -> str | None: ...


P = TypeVar("P", bound=_Page)


async def collect_all(
    fetch: Callable[[str | None, int], Awaitable[P]], items: Callable[[P], Iterable[T]]
) -> list[T]:
    """Reads every page into a list: for commands that show a whole list, such as keys. `report_list` is for long lists
    that the user continues with --cursor; `every_job` and `every_file` of the client never hold more than a page."""
    return (await collect(fetch, items))[0]


async def collect(
    fetch: Callable[[str | None, int], Awaitable[P]],
    items: Callable[[P], Iterable[T]],
    *,
    cursor: str | None = None,
    limit: int | None = None,
) -> tuple[list[T], str | None]:
    """Reads page after page, up to `limit` items. Returns them and the cursor of what follows."""
    found: list[T] = []
    while True:
        page = await fetch(cursor, _PAGE_SIZE if limit is None else min(_PAGE_SIZE, limit - len(found)))
        found += items(page)
        cursor = page.cursor
        if cursor is None or (limit is not None and len(found) >= limit):
            return found, cursor


def report_list(
    flags: dict[str, Any],
    name: str,
    fetch: Callable[[FleetClient, str | None, int], Awaitable[_Page]],
    show: Callable[[list[Any]], None],
    *,
    limit: int,
    cursor: str | None,
) -> None:
    """Prints at most `limit` items, read page by page, and how to continue. `name` is the field of a page that has the
    items. JSON has the items and the cursor."""

    def print_page(found: tuple[list[Any], str | None]) -> None:
        show(found[0])
        if found[1] is not None:
            echo(f"There are more. To continue, add: --cursor {found[1]}", err=True)

    report(
        flags,
        lambda client: collect(
            lambda after, size: fetch(client, after, size),
            lambda page: getattr(page, name),
            cursor=cursor,
            limit=limit,
        ),
        print_page,
        json=lambda found: {name: found[0], "cursor": found[1]},
    )


def runs_subcommand(context: click.Context) -> bool:
    """Whether a subcommand runs after its group. Raises a usage error if the group got options on the command line: the
    subcommand would ignore them."""
    if context.invoked_subcommand is None:
        return False
    given = map(context.get_parameter_source, context.params)
    if ParameterSource.COMMANDLINE in given:
        raise click.UsageError(f"Put the options after `{context.invoked_subcommand}`.")
    return True


_PAGE_SIZE, _MAX_PAGES = 1_000, 10
_COMPLETIONS = 50
_COMPLETION_TIMEOUT_S = 1.0
"""A user who waits longer for a completion has typed on."""
_WHOLE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ID_PART = re.compile(r"[0-9a-f-]{4,35}")
_SHORT_ID = 8
"""Characters at the end of an id that a table shows. Ids begin with the time, so jobs of one moment begin alike."""
_MAX_NAMED = 5


def complete_job_ids(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    async def find(client: FleetClient) -> Sequence[tuple[str, str]]:
        return [(job.id, job.status) for job in (await client.jobs(limit=_COMPLETIONS)).jobs]

    return _complete(context, begun, find)


def complete_worker_ids(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    async def find(client: FleetClient) -> Sequence[tuple[str, str]]:
        return [(worker.id, worker.status.value) for worker in await client.workers()]

    return _complete(context, begun, find)


def _complete(
    context: click.Context,
    begun: str,
    find: Callable[[FleetClient], Coroutine[Any, Any, Sequence[tuple[str, str]]]],
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from comfyfleet.cli.hub_connection import ask

    flags = {name: context.params.get(name) for name in HUB_SETTINGS}
    try:
        found = ask(flags, find, patience_s=_COMPLETION_TIMEOUT_S)
    except Exception:
        # The user is typing: an error message would land in the middle of the command line.
        return []
    return [CompletionItem(name, help=state) for name, state in found if name.startswith(begun)]


job_argument = click.argument("job_id", shell_complete=complete_job_ids)
jobs_argument = click.argument(
    "job_ids", nargs=-1, required=True, metavar="JOB_ID...", shell_complete=complete_job_ids
)


def short_ids(job_ids: Iterable[str]) -> dict[str, str]:
    """The end of each id, long enough to be unique."""
    every = set(job_ids)
    for length in range(_SHORT_ID, 36):
        if len({job_id[-length:] for job_id in every}) == len(every):
            return {job_id: job_id[-length:] for job_id in every}
    return {job_id: job_id for job_id in every}


async def whole_id(client: FleetClient, given: str) -> str:
    """The whole id of the one job that `given` begins or ends. The hub refuses what is no part of an id, or of no
    job."""
    part = given.lower().removeprefix("…")
    if _WHOLE_ID.fullmatch(part) or not _ID_PART.fullmatch(part):
        return given
    found: dict[str, str] = {}
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.jobs(cursor=cursor, limit=_PAGE_SIZE)
        found |= {job.id: job.status for job in page.jobs if job.id.startswith(part) or job.id.endswith(part)}
        cursor = page.cursor
        if cursor is None:
            break
    if not found:
        if cursor is not None:
            raise CommandFailed(
                f"none of the newest {_PAGE_SIZE * _MAX_PAGES:,} jobs has an id that begins or ends with {given!r}. "
                "Give the whole id.",
                ExitCode.REFUSED,
            )
        return given
    if len(found) > 1:
        named = ", ".join(f"{job_id} ({status})" for job_id, status in list(found.items())[:_MAX_NAMED])
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        raise CommandFailed(
            f"{given!r} matches {len(found)} jobs: {named}{more}. Give more of the id.", ExitCode.USAGE
        )
    return next(iter(found))


def of_job(
    job_id: str, work: Callable[[FleetClient, str], Awaitable[T]]
) -> Callable[[FleetClient], Coroutine[Any, Any, T]]:
    """Calls `work` with the whole id of the job."""

    async def call(client: FleetClient) -> T:
        return await work(client, await whole_id(client, job_id))

    return call


def of_jobs(
    job_ids: Iterable[str], work: Callable[[FleetClient, str], Awaitable[T]]
) -> Callable[[FleetClient], Coroutine[Any, Any, list[T]]]:
    """Calls `work` for each job, after all ids were found."""

    async def call(client: FleetClient) -> list[T]:
        whole = [await whole_id(client, job_id) for job_id in job_ids]
        return [await work(client, job_id) for job_id in whole]

    return call
