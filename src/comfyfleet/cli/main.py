"""The `comfyfleet` command: the group of all commands, and the one place where an error becomes a line and a code.

Each command has a module of its own, imported when it is called; what is heavy is imported inside the command.

`comfyfleet completion`: the script that teaches a shell our commands.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from comfyfleet import __version__
from comfyfleet.cli.command_help import CommandGroup
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, Terminated
from comfyfleet.cli.output import LineFormatter, echo

_SECTIONS = {
    "Run a fleet": ("up", "hub", "worker", "demo"),
    "Jobs": ("submit", "jobs", "job", "files", "queue", "dead"),
    "Look after a fleet": ("top", "workers", "blocks", "store", "encryption", "reconcile", "audit"),
    "Keys and tenants": ("key", "tenant", "credits", "usage", "webhook"),
    "Tools": ("run", "hash", "convert", "config", "completion", "fake-comfyui"),
}
_MODULES = {
    "up": ("up", "hub"),
    "worker": ("worker",),
    "demo": ("demo",),
    "submit": ("submit",),
    "jobs": ("jobs", "job"),
    "fleet": ("queue", "dead", "workers", "blocks"),
    "top": ("top",),
    "store": ("store", "encryption"),
    "keys": ("key", "audit"),
    "tenants": ("tenant",),
    "credits": ("credits", "usage", "reconcile"),
    "webhooks": ("webhook", "files"),
    "run": ("run", "hash", "convert"),
    "config": ("config",),
    "main": ("completion",),
    "fake_comfyui": ("fake-comfyui",),
}
_COMMANDS = {
    name: (f"comfyfleet.cli.{module}", f"{name.replace('-', '_')}_command")
    for module, names in _MODULES.items()
    for name in names
}
"""Where each command is: a module, and the name of its click command."""


class _Group(CommandGroup):
    """A group that imports only the command that is called."""

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
    """What the error handling must know of the flags, however far parsing came."""

    def __init__(self) -> None:
        self.is_debugging = False
        self.wants_json = False


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
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
    _tell_of_unknown_variables(session, context.invoked_subcommand)
    if debug:
        logging.getLogger("asyncio").setLevel(logging.INFO)
    handler = logging.StreamHandler()
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s" if debug else "%(levelname)s: %(message)s"
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, handlers=[handler])


def _tell_of_unknown_variables(session: _Session, command: str | None) -> None:
    """A variable that begins like ours and means nothing is misspelled, most likely. `config check` makes an error of
    it; where a program reads standard error, nothing is told."""
    ours = [name for name, value in os.environ.items() if name.startswith("COMFYFLEET_") and value]
    if not ours or session.wants_json or command in ("config", "completion"):
        return
    from comfyfleet.cli.settings import nearest, variables
    from comfyfleet.cli.settings_schema import ELSEWHERE, PREFIX

    known = variables()
    for name in sorted(set(ours) - ELSEWHERE - set(known)):
        echo(f"Warning: {name} means nothing{nearest(name, known, PREFIX, at_most=0)}", err=True)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    session = _Session()
    given = sys.argv[1:] if arguments is None else list(arguments)
    # Looked for here: a command line that cannot be parsed is an error too.
    session.wants_json = "--json" in given
    try:
        outcome: Any = comfyfleet.main(
            args=given,
            prog_name="comfyfleet",
            standalone_mode=False,
            obj=session,
        )
        # Without its standalone mode click gives back the code of an exit, or what the command returned.
        sys.exit(outcome if isinstance(outcome, int) else ExitCode.OK)
    except click.ClickException as error:
        if session.wants_json:
            _tell_json(error.exit_code, error.format_message())
        else:
            error.show()
        sys.exit(error.exit_code)
    except click.Abort as error:
        if error.__cause__ is None:
            # In the middle of a question; after any other Ctrl-C click has ended the line.
            echo(err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Terminated:
        sys.exit(ExitCode.TERMINATED)
    except Exception as error:
        if session.is_debugging:
            raise
        code, message = _explained(error)
        message = " ".join(message.split())
        if session.wants_json:
            _tell_json(code, message, error)
        else:
            echo(f"Error: {message}", err=True)
        sys.exit(code)


def _tell_json(code: int, message: str, error: Exception | None = None) -> None:
    """One line on standard error, so that what was printed before stays an answer of its own."""
    import msgspec

    from comfyfleet.model.errors import Refusal

    refusal = error if isinstance(error, Refusal) else None
    told = {
        "exit_code": int(code),
        "code": None if refusal is None else refusal.code.value,
        "message": message,
        "details": {} if refusal is None else refusal.details,
    }
    echo(msgspec.json.encode({"error": told}), err=True)


def _explained(error: Exception) -> tuple[ExitCode, str]:
    """The code and the line for an error. One that nobody foresaw says so, and how to see more of it."""
    from comfyfleet.cli.exit_codes import missing_package
    from comfyfleet.model.errors import ComfyFleetError, Fault, Refusal
    from comfyfleet.model.failure import FailureKind
    from comfyfleet.pool.records import JobFailed

    callers_fault = (FailureKind.INVALID_WORKFLOW, FailureKind.MISSING_INPUT)
    match error:
        case CommandFailed():
            return error.code, str(error)
        case JobFailed() if error.record.last_error and error.record.last_error.kind in callers_fault:
            return ExitCode.REFUSED, str(error)
        case Refusal():
            return ExitCode.REFUSED, error.message
        case Fault():
            return ExitCode.UNREACHABLE, str(error)
        case ComfyFleetError():
            return ExitCode.FAILED, str(error)
        case ModuleNotFoundError() if (told := missing_package(error)) is not None:
            return ExitCode.FAILED, told
        case OSError():
            return ExitCode.FAILED, f"the system refused: {error}"
        case _:
            name = type(error).__name__
            return (
                ExitCode.FAILED,
                f"{name}: {error} (a defect of comfyfleet; `comfyfleet --debug …` shows where)",
            )


if __name__ == "__main__":
    main()


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
        raise CommandFailed(f"completion for this {shell} will not do: {error}") from error
