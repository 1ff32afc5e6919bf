"""Help that can be read: commands with whole summaries, in groups where there are many, examples, and what a mistyped
command may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

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
        "run workflow.json -s http://gpu-a:8188 --set 6.text='a cat' --out cats",
    ),
    "submit": (
        "submit workflow.json --watch --out pictures",
        "submit workflow.json --set 6.text='a cat' --set 3.seed=-1",
        "submit *.json --count 10 --metadata project=autumn",
        "submit upscale.json --attach 10.image=photo.png --watch",
        "submit video.json --vram 24 --region eu --prefer-worker gpu-a --deadline 2026-12-01T08:00",
    ),
    "jobs": ("jobs", "jobs --status failed --since 24", "jobs --tenant acme --json"),
    "job": (
        "job show 9ac945c2",
        "job watch 9ac945c2 --out pictures",
        "job explain 9ac945c2",
        "job cancel 9ac945c2 77ee86bf",
    ),
    "files": ("files list --kind input", "files delete f_…"),
    "workers": ("workers", "workers show gpu-a", "workers drain gpu-a"),
    "key": ("key invite --uses 4", "key create tenant --tenant acme --days 90", "key list"),
    "tenant": ("tenant create acme", "tenant show acme", "tenant suspend acme"),
}
_ALL = 10_000
"""Characters of a summary: all there are."""


class GroupedOption(click.Option):
    """An option that stands under a heading of its own in the help."""

    def __init__(self, *names: Any, group: str, **more: Any) -> None:
        super().__init__(*names, **more)
        self.group = group


class _WithExamples(click.Command):
    """Examples stand below everything else, as they are."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(context, formatter)
        if lines := _EXAMPLES.get(self.name or ""):
            with formatter.section("Examples"):
                for line in lines:
                    formatter.write(f"  comfyfleet {line}\n")


class _Command(_WithExamples):
    """Options with a heading of their own stand below the others."""

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
    """`sections` names the commands of each heading; without it they stand in one list."""

    sections: Mapping[str, Sequence[str]] = {}

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in (self.sections or {"Commands": self.list_commands(context)}).items():
            rows = []
            for name in names:
                command = self.get_command(context, name)
                assert command is not None, f"there is no command {name}"
                if not command.hidden:
                    rows.append((name, command.get_short_help_str(_ALL)))
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
