"""`comfyfleet config`: what the settings are, and where each of them was said."""

from __future__ import annotations

from typing import Any

import click

from comfyfleet.cli.endings import CommandFailed, ExitCode
from comfyfleet.cli.helping import group
from comfyfleet.cli.options import as_json, settings
from comfyfleet.cli.printing import echo


@group("config")
def command() -> None:
    """Look at the settings: flags, environment, comfyfleet.toml."""


@command.command("show")
@click.option("--all", "show_all", is_flag=True, help="Also what is as it is unless said.")
@as_json
@settings("config")
def show(config: str | None, show_all: bool, as_json: bool) -> None:
    """Every setting that was said, and where. Secrets are not shown."""
    from comfyfleet.cli.reach import print_json, print_table
    from comfyfleet.cli.settings import DEFAULT, read_settings

    found = list(read_settings(config=config).shown())
    if as_json:
        print_json({name: {"value": value, "from": place} for name, value, place in found})
        return
    rows = [[name, _text(value), place] for name, value, place in found if show_all or place != DEFAULT.place]
    print_table(["setting", "value", "from"], rows, empty="everything is as it is unless said: try --all")


@command.command("check")
@as_json
@settings("config")
def check(config: str | None, as_json: bool) -> None:
    """Whether the settings can be understood: 0 if so, 2 if not. Every mistake is told, one a line.

    Variables that begin like ours and mean nothing are told too: mostly they are misspelled.
    """
    from comfyfleet.cli.encrypting import key_mistakes
    from comfyfleet.cli.reach import print_json
    from comfyfleet.cli.settings import PREFIX, nearest, read_settings, variables

    mistakes: list[CommandFailed] = []
    resolved = read_settings(config=config, mistakes=mistakes)
    if resolved.values.assets is not None:
        from comfyfleet.cli.assets import storage_mistakes

        # What a hub would find wrong about where its files lie; those who only ask a hub need not know it.
        mistakes += storage_mistakes(resolved)
    mistakes += key_mistakes(resolved)
    problems = [str(mistake) for mistake in mistakes]
    for name in resolved.unheard:
        problems.append(f"{name} means nothing{nearest(name, variables(), PREFIX)}")
    if as_json:
        print_json({"holds": not problems, "problems": problems})
    else:
        for problem in problems:
            echo(problem, err=True)
        if not problems:
            echo("the settings can be understood")
    if problems:
        raise SystemExit(ExitCode.USAGE)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
