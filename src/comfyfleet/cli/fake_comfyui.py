"""`comfyfleet fake-comfyui`: servers that speak ComfyUI's protocol without a GPU, for tests and trials.

This module reads the flags; `testing/fake_comfyui` is the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, Terminated, run
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from comfyfleet.testing.fake_comfyui import FakeComfyUI, FakeSettings, Faults

F = TypeVar("F", bound=Callable[..., Any])


def _option(flag: str, default: object, help_: str, **more: Any) -> Callable[[F], F]:
    return click.option(flag, default=default, show_default=True, help=help_, **more)


def _many(flag: str, name: str, metavar: str, help_: str, **more: Any) -> Callable[[F], F]:
    return click.option(flag, name, multiple=True, metavar=metavar, help=help_, **more)


_MORE_THAN_ZERO = click.FloatRange(0, min_open=True)


@click.command("fake-comfyui")
@_option("--host", "127.0.0.1", "Address to listen on.")
@_option("--port", 8188, "Port of the first server; 0 takes free ports.", type=click.IntRange(0, 65535))
@_option("--count", 1, "Number of servers, on consecutive ports.", type=click.IntRange(1, 256))
@_many(
    "--version",
    "versions",
    "X.Y.Z",
    "The ComfyUI release to behave like. Repeatable: servers take them in turn.",
    default=("0.7.0",),
    show_default=True,
)
@_option("--vram", 24.0, "Memory of the simulated GPU.", type=_MORE_THAN_ZERO, metavar="GB")
@_many(
    "--model",
    "models",
    "FOLDER/NAME=GB",
    "An installed model, such as checkpoints/sdxl.safetensors=6.5. Repeatable; replaces the default models.",
)
@_many("--node-class", "node_classes", "NAME", "Install only this node class. Repeatable.")
@_option("--speed", 1.0, "Speed of the simulated GPU; 2 halves the time of sampling.", type=_MORE_THAN_ZERO)
@_option(
    "--time-scale",
    1.0,
    "Real seconds for each simulated second; 0.1 makes everything ten times faster.",
    type=click.FloatRange(0),
)
@_option(
    "--load-seconds-per-gb",
    0.5,
    "How long a loader node reads a model file, for each GB of its size.",
    type=click.FloatRange(0),
    metavar="SECONDS",
)
@click.option(
    "--cache-lru",
    type=click.IntRange(1),
    metavar="N",
    help="Keep up to N node results of earlier prompts, like ComfyUI with this option. Default: those that the newest "
    "prompt can use.",
)
@click.option("--cache-none", is_flag=True, help="Keep no node results, like ComfyUI with this option.")
@_option("--seed", 0, "Changes what the pictures look like.")
@_many(
    "--fault",
    "faults",
    "NAME=VALUE",
    "A fault that is on from the start, such as slow_answer_s=0.5 or never_start. Repeatable.",
)
def fake_comfyui_command(
    host: str,
    port: int,
    count: int,
    versions: tuple[str, ...],
    vram: float,
    models: tuple[str, ...],
    node_classes: tuple[str, ...],
    speed: float,
    time_scale: float,
    load_seconds_per_gb: float,
    cache_lru: int | None,
    cache_none: bool,
    seed: int,
    faults: tuple[str, ...],
) -> None:
    """Run fake ComfyUI servers until Ctrl-C.

    They answer like real servers, draw small pictures without a GPU, and can be told to fail while they run.
    """
    from comfyfleet.testing.fake_comfyui import FakeSettings
    from comfyfleet.testing.fake_comfyui.settings import behaviour_of, default_models

    if cache_none and cache_lru is not None:
        raise click.UsageError("--cache-lru and --cache-none cannot both be given.")
    if port and port + count - 1 > 65535:
        raise click.BadParameter(
            f"{count} servers from {port} on need ports above 65535", param_hint="--port"
        )
    try:
        for version in versions:
            behaviour_of(version)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--version") from error
    _check_node_classes(node_classes)
    installed = _read_models(models) if models else default_models()
    settings = [
        FakeSettings(
            version=versions[index % len(versions)],
            name=f"fake-{index + 1}",
            vram_gb=vram,
            models=installed,
            node_classes=node_classes or None,
            speed=speed,
            time_scale=time_scale,
            load_seconds_per_gb=load_seconds_per_gb,
            cache_mode="none" if cache_none else "classic" if cache_lru is None else "lru",
            lru_size=cache_lru or FakeSettings().lru_size,
            seed=seed + index,
        )
        for index in range(count)
    ]
    ports = [port + index if port else 0 for index in range(count)]
    switches = [_read_faults(faults) for _ in settings]
    try:
        run(_serve(settings, host, ports, switches))
    except Terminated:
        # SIGTERM is the normal end of a server.
        return


def _read_models(given: Sequence[str]) -> dict[str, dict[str, float]]:
    models: dict[str, dict[str, float]] = {}
    for text in given:
        path, _, size = text.rpartition("=")
        folder, _, name = path.partition("/")
        try:
            size_gb = float(size)
        except ValueError:
            size_gb = -1.0
        if not folder or not name or not 0 <= size_gb < float("inf"):
            raise click.BadParameter(
                f"{text!r} is not FOLDER/NAME=GB, such as checkpoints/sdxl.safetensors=6.5",
                param_hint="--model",
            )
        models.setdefault(folder, {})[name] = size_gb
    return models


def _check_node_classes(names: Sequence[str]) -> None:
    from comfyfleet.testing.fake_comfyui.known_nodes import known_node_classes

    known = {node_class.name for node_class in known_node_classes()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(
            f"unknown node class {', '.join(unknown)}. Known: {', '.join(sorted(known))}.",
            param_hint="--node-class",
        )


def _read_faults(given: Sequence[str]) -> Faults:
    import msgspec

    from comfyfleet.testing.fake_comfyui import Faults
    from comfyfleet.testing.fake_comfyui.faults import ACTIONS

    switches: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name in ACTIONS:
            raise click.BadParameter(
                f"{name} acts on a running server. Post it to /fake/faults.", param_hint="--fault"
            )
        try:
            switches[name] = msgspec.json.decode(value.encode()) if separator else True
        except msgspec.DecodeError:
            switches[name] = value
    faults = Faults()
    try:
        faults.change(switches)
    except msgspec.ValidationError as error:
        known = ", ".join(field for field in Faults.__struct_fields__ if field not in ACTIONS)
        raise click.BadParameter(f"{error}. Known faults: {known}.", param_hint="--fault") from error
    return faults


async def _serve(
    settings: Sequence[FakeSettings], host: str, ports: Sequence[int], faults: Sequence[Faults]
) -> None:
    import asyncio

    ready: list[FakeComfyUI] = []

    def note(server: FakeComfyUI) -> None:
        ready.append(server)
        if len(ready) == len(settings):
            _announce(ready)

    try:
        async with asyncio.TaskGroup() as group:
            for each, port, switches in zip(settings, ports, faults, strict=True):
                group.create_task(_serve_one(each, host, port, switches, note))
    except ExceptionGroup as failed:
        # A server that cannot listen stops them all; its error is the cause.
        raise failed.exceptions[0] from None


async def _serve_one(
    settings: FakeSettings, host: str, port: int, faults: Faults, note: Callable[[FakeComfyUI], None]
) -> None:
    import errno

    from comfyfleet.testing.fake_comfyui.command import serve
    from comfyfleet.testing.fake_comfyui.pictures import PillowMissing

    try:
        await serve(settings, host, port, faults, note)
    except PillowMissing as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} of {host} is in use. Choose another with --port, or --port 0 for a free one."
        else:
            why = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise CommandFailed(why, ExitCode.FAILED) from error


def _announce(servers: Sequence[FakeComfyUI]) -> None:
    for server in sorted(servers, key=lambda each: each.settings.name):
        settings = server.settings
        count = sum(len(names) for names in settings.models.values())
        echo(
            f"{server.url}  fake ComfyUI {settings.version}, {settings.vram_gb:g} GB, {count} models, "
            f"speed {settings.speed:g}"
        )
    url = min(servers, key=lambda each: each.settings.name).url
    echo("\nShow the faults, make it fail, show what it did:")
    echo(f"  curl {url}/fake/faults")
    echo(f"""  curl {url}/fake/faults -d '{{"out_of_memory": 1}}'""")
    echo(f"""  curl {url}/fake/faults -d '{{"restart": true}}'""")
    echo(f"  curl {url}/fake/stats")
    echo("\nCtrl-C stops.")
