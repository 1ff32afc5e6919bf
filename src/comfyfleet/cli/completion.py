"""`comfyfleet completion`: the script that teaches a shell our commands."""

from __future__ import annotations

import click

from comfyfleet.cli.endings import CommandFailed
from comfyfleet.cli.printing import echo


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a completion script: `eval "$(comfyfleet completion bash)"`."""
    from click.shell_completion import get_completion_class

    from comfyfleet.cli.main import comfyfleet

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    try:
        echo(kind(comfyfleet, {}, "comfyfleet", "_COMFYFLEET_COMPLETE").source())
    except RuntimeError as error:
        raise CommandFailed(f"completion for this {shell} will not do: {error}") from error
