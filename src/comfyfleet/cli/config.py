"""`comfyfleet config`: what the settings are, and where each of them was said."""

from __future__ import annotations

from typing import Any

import click

from comfyfleet.cli.command_help import group
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.options import EVERY, as_json, settings
from comfyfleet.cli.output import echo


@group("config")
def config_command() -> None:
    """Look at the settings: flags, environment, comfyfleet.toml."""


@config_command.command("show")
@click.option("--said", "is_said", is_flag=True, help="Only what was said somewhere.")
@as_json
@settings(*EVERY)
def show(config: str | None, is_said: bool, as_json: bool, **flags: Any) -> None:
    """Every setting, the value it has, and where that comes from: a flag, the environment, the file, the default.

    Secrets are not shown. With flags of `up`, `hub` or `worker` it shows what they would have.
    """
    from comfyfleet.cli.hub_connection import find_hub, print_json, print_table, read_hub
    from comfyfleet.cli.settings import DEFAULT, masked, read_settings

    resolved = read_settings(flags, config=config)
    found = {name: (value, place) for name, value, place in resolved.shown()}
    # What they are unless said depends on the machine.
    if not resolved.values.hub:
        local = read_hub(resolved.data)
        place = DEFAULT.place if local is None else f"the hub that was started in {resolved.data}"
        found["hub"] = ([*find_hub(resolved).urls], place)
    if resolved.values.store is None:
        found["store"] = (
            masked("store", f"sqlite:///{(resolved.data / 'fleet.db').absolute()}"),
            DEFAULT.place,
        )
    if as_json:
        print_json({name: {"value": value, "from": place} for name, (value, place) in found.items()})
        return
    rows = [
        [name, _text(value), place]
        for name, (value, place) in found.items()
        if not is_said or place != DEFAULT.place
    ]
    told = "nothing was said: every setting has its default"
    print_table(["setting", "value", "from"], rows, empty=told, wraps=2)


@config_command.command("check")
@as_json
@settings("config")
def check(config: str | None, as_json: bool) -> None:
    """Whether the settings can be understood: 0 if so, 2 if not. Every mistake is told, one a line.

    Variables that begin like ours and mean nothing are told too: mostly they are misspelled.
    """
    from comfyfleet.cli.encryption_keys import key_mistakes
    from comfyfleet.cli.hub_connection import print_json
    from comfyfleet.cli.settings import nearest, read_settings, variables
    from comfyfleet.cli.settings_schema import PREFIX

    mistakes: list[CommandFailed] = []
    resolved = read_settings(config=config, mistakes=mistakes)
    if resolved.values.assets is not None:
        from comfyfleet.cli.bootstrap import storage_mistakes

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
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
