"""The `comfyfleet` command: all commands, the only place that prints errors, and `completion` and `config`.

The module of a command is imported when the command is called. A command imports heavy packages inside its function.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from comfyfleet import __version__
from comfyfleet.cli.command import CommandGroup, group
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, Terminated
from comfyfleet.cli.options import EVERY_SETTING, as_json, settings
from comfyfleet.cli.output import LineFormatter, echo, print_json, print_table

_SECTIONS = {
    "Run a fleet": ("up", "hub", "worker", "demo"),
    "Jobs": ("submit", "jobs", "job", "files", "queue", "dead"),
    "Look after a fleet": (
        "top",
        "workers",
        "services",
        "blocks",
        "store",
        "encryption",
        "reconcile",
        "audit",
    ),
    "Keys and tenants": ("key", "tenant", "credits", "usage", "webhook"),
    "Tools": ("run", "hash", "convert", "config", "completion", "fake-comfyui", "simulate"),
}
_MODULES = {
    "up": ("up", "hub"),
    "worker": ("worker",),
    "demo": ("demo",),
    "submit": ("submit",),
    "jobs": ("jobs", "job", "dead", "files"),
    "fleet": ("queue", "workers", "blocks", "top"),
    "services": ("services",),
    "store": ("store",),
    "encryption": ("encryption",),
    "keys": ("key", "audit"),
    "tenants": ("tenant",),
    "credits": ("credits", "usage", "reconcile"),
    "webhooks": ("webhook",),
    "run": ("run", "hash", "convert"),
    "main": ("config", "completion"),
    "fake_comfyui": ("fake-comfyui",),
    "simulate": ("simulate",),
}
"""The commands of each module of `comfyfleet.cli`."""
_COMMANDS = {
    name: (f"comfyfleet.cli.{module}", f"{name.replace('-', '_')}_command")
    for module, names in _MODULES.items()
    for name in names
}
"""By command: its module, and the name of the click command there."""


class _Group(CommandGroup):
    """Imports only the command that is called."""

    sections = _SECTIONS

    def list_commands(self, context: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in _COMMANDS:
            return None
        module, variable = _COMMANDS[name]
        command = getattr(importlib.import_module(module), variable)
        assert isinstance(command, click.Command)
        return command


class _Session:
    """The flags that error handling needs, even if the command line cannot be parsed."""

    def __init__(self) -> None:
        self.is_debugging = False
        self.wants_json = False


_OLD_FLAGS = {"pool": "database"}
"""By old name of a flag: its present name. Accepted, but not shown in the help."""


@click.group(
    cls=_Group,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda flag: _OLD_FLAGS.get(flag, flag),
    },
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option(
    "--debug", is_flag=True, envvar="COMFYFLEET_DEBUG", help="Show logs, and the traceback of an error."
)
@click.pass_context
def comfyfleet(context: click.Context, debug: bool) -> None:
    """One address for a fleet of ComfyUI servers."""
    import logging

    session: _Session = context.obj
    session.is_debugging = debug
    _warn_about_unknown_variables(session, context.invoked_subcommand)
    if debug:
        logging.getLogger("asyncio").setLevel(logging.INFO)
    handler = logging.StreamHandler()
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s" if debug else "%(levelname)s: %(message)s"
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, handlers=[handler])


def _warn_about_unknown_variables(session: _Session, command: str | None) -> None:
    """An unknown variable that begins with COMFYFLEET_ is probably misspelled. `config check` reports it as an error;
    with --json, standard error is left to programs."""
    ours = [name for name, value in os.environ.items() if name.startswith("COMFYFLEET_") and value]
    if not ours or session.wants_json or command in ("config", "completion"):
        return
    from comfyfleet.cli.settings import CONNECTOR_PREFIX, nearest, variable_of, variables
    from comfyfleet.cli.settings_schema import ELSEWHERE, OLD_DATABASES, PREFIX

    known = variables()
    for name in sorted(set(ours) - ELSEWHERE - {*known, variable_of(OLD_DATABASES)}):
        if name.startswith(CONNECTOR_PREFIX):
            continue
        echo(f"Warning: {name} is not a setting{nearest(name, known, PREFIX, lists_all=False)}", err=True)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    session = _Session()
    given = sys.argv[1:] if arguments is None else list(arguments)
    # Read here, because a command line that cannot be parsed is an error too.
    session.wants_json = "--json" in given
    try:
        outcome: Any = comfyfleet.main(
            args=given,
            prog_name="comfyfleet",
            standalone_mode=False,
            obj=session,
        )
        # Without standalone mode, click returns the exit code, or what the command returned.
        sys.exit(outcome if isinstance(outcome, int) else ExitCode.OK)
    except click.ClickException as error:
        if type(error) is click.BadParameter:
            # click's names of its types are not words for people.
            words = error.message.replace("integer range", "whole number").replace("float range", "number")
            error = click.BadParameter(words, error.ctx, error.param, error.param_hint)
        if session.wants_json:
            _print_json_error(error.exit_code, error.format_message())
        else:
            error.show()
        sys.exit(error.exit_code)
    except click.Abort as error:
        if error.__cause__ is None:
            # Ctrl-C at a question leaves the line open; after any other Ctrl-C click has ended it.
            echo(err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Terminated:
        sys.exit(ExitCode.TERMINATED)
    except Exception as error:
        if session.is_debugging:
            raise
        code, message = _explain(error)
        message = " ".join(message.split())
        if session.wants_json:
            _print_json_error(code, message, error)
        else:
            echo(f"Error: {message}", err=True)
        sys.exit(code)


def _print_json_error(code: int, message: str, error: Exception | None = None) -> None:
    """One line on standard error, so that standard output stays valid JSON."""
    import msgspec

    from comfyfleet.model.errors import Refusal

    refusal = error if isinstance(error, Refusal) else None
    body = {
        "exit_code": int(code),
        "code": None if refusal is None else refusal.code.value,
        "message": message,
        "details": {} if refusal is None else refusal.details,
    }
    echo(msgspec.json.encode({"error": body}), err=True, wraps=False)


def _explain(error: Exception) -> tuple[ExitCode, str]:
    """The exit code and the message for an error. An unexpected error says how to see its traceback."""
    from comfyfleet.cli.exit_codes import end_of_failure, missing_package
    from comfyfleet.model.errors import ComfyFleetError, Fault, Refusal
    from comfyfleet.pool.records import JobFailed

    match error:
        case CommandFailed():
            return error.code, str(error)
        case JobFailed():
            return end_of_failure(error.record.last_error, str(error))
        case Refusal():
            return ExitCode.REFUSED, error.message
        case Fault():
            return ExitCode.UNREACHABLE, str(error)
        case ComfyFleetError():
            return ExitCode.FAILED, str(error)
        case ModuleNotFoundError() if (message := missing_package(error)) is not None:
            return ExitCode.FAILED, message
        case OSError():
            return ExitCode.FAILED, f"the operating system refused: {error}"
        case _:
            name = type(error).__name__
            return (
                ExitCode.FAILED,
                f"{name}: {error} (a bug in comfyfleet; `comfyfleet --debug …` shows the traceback)",
            )


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a completion script: `eval "$(comfyfleet completion bash)"`."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    try:
        echo(kind(comfyfleet, {}, "comfyfleet", "_COMFYFLEET_COMPLETE").source())
    except RuntimeError as error:
        raise CommandFailed(f"cannot make a completion script for this {shell}: {error}") from error


@group("config")
def config_command() -> None:
    """Show and check the settings: flags, environment, comfyfleet.toml."""


@config_command.command("show")
@click.option(
    "--changed", "is_changed", is_flag=True, help="Only settings that a flag, a variable or the file sets."
)
@as_json
@settings(*EVERY_SETTING)
def show(config: str | None, is_changed: bool, as_json: bool, **flags: Any) -> None:
    """Show every setting, its value and its source: a flag, the environment, the file or the default.

    Secrets are not shown. With the flags of `up`, `hub` or `worker` it shows what that program would use.
    """
    from comfyfleet.cli.hub_connection import find_hub, read_hub
    from comfyfleet.cli.settings import DEFAULT, masked, read_settings

    resolved = read_settings(flags, config=config)
    found = {name: (value, place) for name, value, place in resolved.shown()}
    # Two defaults depend on the machine.
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
        [name, value, place]
        for name, (value, place) in found.items()
        if not is_changed or place != DEFAULT.place
    ]
    print_table(["setting", "value", "from"], rows, empty="Every setting has its default.", wraps=2)


@config_command.command("check")
@as_json
@settings("config")
def check(config: str | None, as_json: bool) -> None:
    """Check the settings and print every mistake, one on each line. Exit code 0 means valid, 2 not valid.

    Unknown variables that begin with COMFYFLEET_ are mistakes too: most are misspelled.
    """
    from comfyfleet.cli.encryption import key_mistakes
    from comfyfleet.cli.settings import nearest, read_settings, variables
    from comfyfleet.cli.settings_schema import PREFIX

    mistakes: list[CommandFailed] = []
    resolved = read_settings(config=config, mistakes=mistakes)
    if resolved.values.assets is not None:
        from comfyfleet.cli.bootstrap import storage_mistakes

        # Only a hub needs the storage of files, so `read_settings` does not check it.
        mistakes += storage_mistakes(resolved)
    mistakes += key_mistakes(resolved)
    try:
        resolved.check_connectors()
    except CommandFailed as mistake:
        mistakes.append(mistake)
    problems = [str(mistake) for mistake in mistakes]
    for name in resolved.unknown_variables:
        problems.append(f"{name} is not a setting{nearest(name, variables(), PREFIX)}")
    if as_json:
        print_json({"holds": not problems, "problems": problems})
    else:
        for problem in problems:
            echo(problem, err=True)
        if not problems:
            echo("The settings are valid.")
    if problems:
        raise SystemExit(ExitCode.USAGE)


if __name__ == "__main__":
    main()
