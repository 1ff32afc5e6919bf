"""Flags that several commands share. Most belong to a setting, which the environment and the file can give too.

A flag that was not given is None or empty; then `settings.py` reads the value elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from click.types import StringParamType

F = TypeVar("F", bound=Callable[..., Any])


class AddressParam(StringParamType):
    """A URL. An environment variable with several has commas or spaces between them."""

    name = "url"

    def split_envvar_value(self, rv: str) -> list[str]:
        return rv.replace(",", " ").split()


def level_of(given: Any) -> Any:
    """The name of a log level in its usual spelling. Any other value is returned as it is and refused later."""
    lower = given.lower() if isinstance(given, str) else given
    return "warning" if lower == "warn" else lower


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(rf"([0-9]+(?:\.[0-9]*)?)([{''.join(_UNITS_S)}]?)")


class DurationParam(StringParamType):
    """A time in seconds, written as 30m, 12h, 7d or as a number of hours."""

    name = "time"
    examples = "30m, 12h, 7d or a number of hours"

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = _DURATION.fullmatch(str(value).strip().lower())
        seconds = -1.0 if found is None else float(found[1]) * _UNITS_S[found[2] or "h"]
        if not 0 <= seconds < float("inf") or (seconds == 0 and not self._may_be_zero):
            self.fail(f"{value!r} is not a length of time. Use {self.examples}.", param, ctx)
        return seconds


class DurationOrDateParam(DurationParam):
    """A time in seconds, or a date (UTC) as a `datetime`."""

    examples = "30m, 12h, 7d, a number of hours, or a date such as 2026-05-01"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return DATE.convert(value, param, ctx)
        except click.BadParameter:
            return super().convert(value, param, ctx)


DATE = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])


class Level(click.Choice[str]):
    """A log level, in any case and also as `warn`, as in the settings."""

    def __init__(self) -> None:
        super().__init__(["debug", "info", "warning", "error"], case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(level_of(value), param, ctx)


FLAG_NAMES = {
    "servers": "--server",
    "services": "--service",
    "grace_s": "--grace",
    "databases": "--database",
    "allow_tenants": "--allow-tenant",
    "deny_tenants": "--deny-tenant",
    "trusted_proxies": "--trusted-proxy",
    "quality_levels": "--quality-level",
    "providers": "--provider",
}
"""The flags that are not named like their setting."""
_SHORT_FLAGS = {"servers": "-s", "port": "-p"}

_Flag = Callable[[str], Callable[[Any], Any]]
"""Makes the click option of a setting from the name of the setting."""


def flag_of(name: str) -> str:
    name = name.partition(".")[0]
    return FLAG_NAMES.get(name, "--" + name.replace("_", "-"))


def _flag(help_: str, **more: Any) -> _Flag:
    def make(name: str) -> Callable[[Any], Any]:
        short = _SHORT_FLAGS.get(name)
        return click.option(*filter(None, (short, flag_of(name), name)), help=help_, **more)

    return make


def _text(metavar: str, help_: str) -> _Flag:
    return _flag(help_, metavar=metavar)


def _many(metavar: str, help_: str, **more: Any) -> _Flag:
    return _flag(f"{help_} Repeatable.", metavar=metavar, multiple=True, **more)


def _choice(choices: str, help_: str) -> _Flag:
    return _flag(help_, type=click.Choice(choices.split()))


def _switch(help_: str) -> _Flag:
    return _flag(help_, is_flag=True, default=None)


def _count(help_: str, least: int = 1) -> _Flag:
    return _flag(help_, type=click.IntRange(least), metavar="N")


def _amount(metavar: str, help_: str, *, may_be_zero: bool = False) -> _Flag:
    return _flag(help_, type=click.FloatRange(0, min_open=not may_be_zero), metavar=metavar)


def _port(help_: str) -> _Flag:
    return _flag(help_, type=click.IntRange(0, 65535))


_ADDRESS = AddressParam()

_COMMON: dict[str, _Flag] = {
    "config": _text("FILE", "Settings in TOML. Default: ./comfyfleet.toml."),
    "data": _text("FOLDER", "Folder for the embedded store and keys. Default: your user data folder."),
    "store": _text("URL", "Database for jobs: sqlite:///…, redis://…, rediss://… or postgresql://…"),
    "log_level": _flag(
        "What to log to standard error; info logs each request. Default: warning.", type=Level()
    ),
    "log_format": _choice("text json", "Format of the log. Default: text."),
}
_SERVING: dict[str, _Flag] = {
    "host": _text("ADDRESS", "Address to listen on. Default: 127.0.0.1."),
    "port": _port("Port to listen on. Default: 3001; 0 takes a free one."),
    "ws_port": _port("Also serve on this port, for clients that expect the WebSocket on a second port."),
    "open": _switch("Need no key on this machine, and refuse all other machines."),
    "certificate": _text("FILE", "Serve HTTPS with this certificate chain (PEM)."),
    "certificate_key": _text("FILE", "The certificate's private key (PEM)."),
    "assets": _text(
        "URL", "Storage for files: s3://BUCKET/PREFIX, with its details in [s3]. Default: the data folder."
    ),
    "databases": _many(
        "NAME=URL", "A database for tenants: sqlite:///… or postgresql://… (better in [databases])."
    ),
    "legacy_websocket": _choice(
        "on warn off",
        "Serve old callers and monitors over the WebSocket; warn logs who uses it. Default: on.",
    ),
    "webhook_allow": _many(
        "NETWORK|NAME",
        "A private target that webhooks may call, such as 10.0.0.0/8 or hooks.internal.",
        type=_ADDRESS,
    ),
    "trusted_proxies": _many(
        "NETWORK", "A proxy in front of the hub whose X-Forwarded-For is trusted, such as 10.0.0.5."
    ),
}
_DECLARED: dict[str, _Flag] = {
    "environment": _choice("cloud self_hosted", "Where the worker runs. Default: self_hosted."),
    "tenant_isolation": _choice(
        "strict loose none",
        "How tenants share the worker: strict serves allowed tenants only, loose serves them first. Default: none.",
    ),
    "allow_tenants": _many("TENANT", "A tenant that a strict worker serves, or a loose one prefers."),
    "deny_tenants": _many("TENANT", "A tenant that the worker never serves, even if allowed."),
    "region": _text("NAME", "Region of the worker. Jobs can require it."),
    "compliance": _many("NAME", "What the worker complies with, such as gdpr. Jobs can require it."),
    "cost_tier": _choice(
        "economy standard premium", "Cost tier of the worker. Default: standard. Jobs can set a maximum."
    ),
    "rate": _amount("AMOUNT", "What an hour of the worker costs.", may_be_zero=True),
    "providers": _many("NAME", "Who provides the worker's services. Default: local. Jobs can require it."),
    "quality_levels": _many(
        "NAME", "A quality level that the worker offers, such as fast. Jobs can require it."
    ),
    "speed": _amount("FACTOR", "Relative speed. Default: 1. Counts until enough jobs were measured."),
    "gpu_count": _count("Number of GPUs, instead of what the server reports."),
    "gpu_memory_gb": _amount("GB", "Memory of each GPU, instead of what the server reports."),
    "gpu_model": _text("NAME", "Model of the GPUs, instead of what the server reports."),
    "cpu_cores": _count("CPU cores of the server's machine."),
    "cpu_threads": _count("CPU threads of the server's machine."),
    "memory_gb": _amount("GB", "Memory of the server's machine, instead of what the server reports."),
}
_WORKER: dict[str, _Flag] = {
    "servers": _many("URL", "A ComfyUI server, such as http://127.0.0.1:8188.", type=_ADDRESS),
    "services": _many("NAME=ADDRESS", "Another service that the same worker offers.", type=_ADDRESS),
    "server_folder": _text(
        "PATH",
        "ComfyUI's folder on this machine's disk. The worker deletes outputs there once the hub has them. Needs "
        "exactly one --server.",
    ),
    "clear_history": _switch("Remove completed jobs from the servers' history."),
    "fake": _many(
        "[NAME=]N", "Also start this many fake servers: of ComfyUI, or of a connector, such as a1111=1."
    ),
    "fake_version": _many(
        "X.Y.Z", "The ComfyUI release that fake servers behave like, in turn. Default: 0.7.0."
    ),
    "fake_load_seconds_per_gb": _amount(
        "SECONDS",
        "How long a fake server reads a model file, for each GB of its size. Default: 0.5.",
        may_be_zero=True,
    ),
    "slots": _count("Jobs that a server gets at a time. Default: 1."),
    "grace_s": _amount(
        "SECONDS",
        "How long running jobs may take to finish after the first signal. Then they go back to the queue. Default: 60.",
        may_be_zero=True,
    ),
    "name": _text(
        "NAME",
        "The worker's name, unique in the fleet (several servers: NAME-1, NAME-2 …). Default: the server's host and "
        "port, with this machine's name instead of a loopback address.",
    ),
    "enrol": _text("TOKEN", "Get the worker's own key with this token, once."),
    "transport": _choice(
        "http websocket",
        "How to talk to the hub: long polling (http, the default), or one WebSocket for all slots.",
    ),
}
_HUB: dict[str, _Flag] = {
    "hub": _many(
        "URL",
        "The hub. Default: the one on this machine. With several hubs on one store, the next is tried if one does "
        "not answer.",
        type=_ADDRESS,
    ),
    "key": _text("KEY", "The key for the hub. Better in COMFYFLEET_KEY."),
    "trust": _text("FILE", "Certificates to trust at the hub (PEM)."),
}

_OPTIONS = {name: flag(name) for name, flag in (_COMMON | _HUB | _SERVING | _WORKER | _DECLARED).items()}

EVERY_SETTING = tuple(_OPTIONS)
WORKER_SETTINGS = tuple(_DECLARED)
"""What a worker declares about itself."""
SERVING_SETTINGS = (*_SERVING, "data", "store", "log_level", "log_format", "config")
"""What a hub needs to serve."""
HUB_SETTINGS = ("config", "data", *_HUB)
"""What a command needs to call a hub."""


def settings(*names: str) -> Callable[[F], F]:
    """The flags of these settings, in this order in the help."""

    def add(command: F) -> F:
        for name in reversed(names):
            command = _OPTIONS[name](command)
        return command

    return add


fake_beside_real = click.option(
    "--fake-beside-real",
    is_flag=True,
    help="Let fake servers take jobs although the fleet has real workers.",
)
"""Not a setting: give it each time."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

set_option = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NODE.INPUT=VALUE",
    help="Change an input, such as 6.text='a cat' or 3.seed=-1 (a random seed). Repeatable.",
)
attach_option = click.option(
    "--attach",
    "attachments",
    multiple=True,
    metavar="NODE.INPUT=FILE",
    help="Upload a file and use it as an input, such as 10.image=photo.png. Repeatable.",
)

OUT_HELP = (
    "Folder for the outputs, or a pattern such as out/{job}_{node}_{index}{ext} (also {name}). Default: the current "
    "folder. No file is overwritten."
)


class OutputParam(StringParamType):
    """A folder for outputs, or a pattern for their names."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from comfyfleet.pool.output_files import OutputNames

        if isinstance(value, OutputNames):
            return value
        try:
            place = OutputNames.read(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if place.folder.exists() and not place.folder.is_dir():
            self.fail(f"{place.folder} is a file, not a folder", param, ctx)
        return place


@contextmanager
def output_folder(folder: Path | None) -> Iterator[None]:
    """Creates the folder of `--out` before the work starts. Removes it again if nothing was saved there."""
    is_new = folder is not None and not folder.exists()
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"cannot create {folder}: {error.strerror}", param_hint="--out") from error
    try:
        yield
    finally:
        if folder is not None and is_new:
            with suppress(OSError):  # It holds outputs.
                folder.rmdir()
