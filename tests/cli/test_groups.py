"""A group that does something without a subcommand, such as `workers`: whose options are whose."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from comfyfleet.cli.command import group, runs_subcommand


@group("things", invoke_without_command=True)
@click.option("--limit", default=50)
@click.option("--name", envvar="THINGS_NAME")
@click.pass_context
def things(context: click.Context, limit: int, name: str | None) -> None:
    if not runs_subcommand(context):
        click.echo(f"{limit} things of {name}")


@things.command("show")
def show() -> None:
    click.echo("shown")


def test_defaults_and_variables_of_a_group_do_not_keep_a_subcommand_from_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THINGS_NAME", "a")
    assert CliRunner().invoke(things, ["show"]).output == "shown\n"
    assert CliRunner().invoke(things, []).output == "50 things of a\n"


def test_an_option_before_a_subcommand_is_refused_even_if_it_has_its_default() -> None:
    ended = CliRunner().invoke(things, ["--limit", "50", "show"])
    assert ended.exit_code == 2
    assert "Put the options after `show`." in ended.output
