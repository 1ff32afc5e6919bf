"""What somebody reads who does not know a command yet, or has mistyped one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from comfyfleet.cli.main import _Session, comfyfleet, main


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


EVERY = dict(commands(comfyfleet))
GROUPS = {path: command for path, command in EVERY.items() if isinstance(command, click.Group)}


def helped(*path: str, columns: int = 80) -> str:
    before = os.environ.get("COLUMNS")
    ended = CliRunner(env={"COLUMNS": str(columns)}).invoke(
        comfyfleet, [*path, "--help"], prog_name="comfyfleet", terminal_width=columns, obj=_Session()
    )
    assert ended.exit_code == 0, ended.output
    assert os.environ.get("COLUMNS") == before
    return ended.output


@pytest.mark.parametrize("path", [(), *GROUPS], ids=" ".join)
def test_a_list_of_commands_tells_each_summary_whole_and_fits(path: tuple[str, ...]) -> None:
    for columns in (80, 60):
        text = helped(*path, columns=columns)
        assert "..." not in text.replace("[ARGS]...", "").replace("JOB_ID...", "")
        described = text.partition("Examples:")[0] if columns < 80 else text
        assert max(map(len, described.splitlines())) <= columns


def test_the_commands_stand_in_groups_and_each_stands_once() -> None:
    text = helped()
    heads = [
        line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")
    ]
    assert heads == [
        "Options",
        "Run a fleet",
        "Jobs",
        "Look after a fleet",
        "Keys and tenants",
        "Tools",
        "Examples",
    ]
    listed = [line.split()[0] for line in text.splitlines() if line[:2] == "  " and line[2:3].isalpha()]
    for (name, *below), _ in EVERY.items():
        if not below:
            assert listed.count(name) == 1, name


@pytest.mark.parametrize(
    "name", ["up", "hub", "worker", "run", "submit", "jobs", "job", "workers", "key", "tenant"]
)
def test_the_usual_commands_have_examples_that_can_be_parsed(name: str) -> None:
    lines = helped(name).splitlines()
    examples = [line.strip() for line in lines[lines.index("Examples:") + 1 :] if line.strip()]
    assert examples
    for example in examples:
        command, *words = shlex.split(example, comments=True)
        assert command == "comfyfleet" and words[0] == name
        found: click.Command = EVERY[name,]
        words = words[1:]
        while isinstance(found, click.Group) and words and not words[0].startswith("-"):
            below = found.get_command(click.Context(found), words.pop(0))
            assert below is not None, example
            found = below
        known = {option for each in found.params for option in (*each.opts, *each.secondary_opts)}
        used = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert used <= known, example


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["jobz"], "jobs"),
        (["sumbit", "x.json"], "submit"),
        (["tenants"], "tenant"),
        (["job", "cansel", "x"], "cancel"),
        (["workers", "dran", "x"], "drain"),
        (["tenant", "suspnd", "x"], "suspend"),
        (["jobs", "--statsu", "failed"], "--status"),
        (["job", "watch", "x", "--ouput", "y"], "--out"),
    ],
)
def test_who_mistypes_is_told_what_was_meant(
    capsys: pytest.CaptureFixture[str], words: list[str], meant: str
) -> None:
    assert f"'{meant}'" in told(capsys, *words).partition("id you mean")[2]


def test_where_nothing_is_near_nothing_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "xyzzy")
    assert "No such command 'xyzzy'" in text and "id you mean" not in text


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_the_help_of_a_command_fits_with_its_examples(path: tuple[str, ...]) -> None:
    assert max(map(len, helped(*path).splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--fake", "x"], "'x' is neither a number below 1000 nor NAME=NUMBER"),
        (["jobs", "--since", "x"], "'x' is not a length of time. Use 30m, 12h, 7d or a number of hours."),
        (
            ["jobs", "--status", "nope"],
            "Use queued (or waiting), leased (or running), completed (or done), failed",
        ),
    ],
)
def test_a_wrong_value_is_told_in_words(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and words in capsys.readouterr().err
