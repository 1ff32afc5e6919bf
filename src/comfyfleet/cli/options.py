"""The flags that several commands share: each is a setting's, so that environment and file can say the same.

A flag that was not given is None; `settings.py` looks for the value elsewhere then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.types import StringParamType

F = TypeVar("F", bound=Callable[..., Any])


class AddressParam(StringParamType):
    """An address; of several in an environment variable, commas or spaces lie between them."""

    name = "url"

    def split_envvar_value(self, rv: str) -> list[str]:
        return rv.replace(",", " ").split()


def level_of(said: Any) -> Any:
    """A level of the log as it is called here; what is none stays as it is, for whoever refuses it."""
    lower = said.lower() if isinstance(said, str) else said
    return "warning" if lower == "warn" else lower


class Level(click.Choice[str]):
    """Of the log, in capitals too and as `warn`: settings understand what is written so."""

    def __init__(self) -> None:
        super().__init__(["debug", "info", "warning", "error"], case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(level_of(value), param, ctx)


def _option(*names: str, **more: Any) -> Callable[[F], F]:
    return click.option(*names, default=None, **more)


_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "config": _option(
        "--config", metavar="FILE", help="Settings in TOML; comfyfleet.toml here unless given."
    ),
    "data": _option(
        "--data", metavar="FOLDER", help="Folder for the embedded store and keys; the user's unless given."
    ),
    "store": _option(
        "--store",
        metavar="URL",
        help="Where jobs are kept: sqlite:///…, redis://…, rediss://… or postgresql://…",
    ),
    "pools": click.option(
        "--pool",
        "pools",
        multiple=True,
        metavar="NAME=URL",
        help="A database for tenants: sqlite:///… or postgresql://… (better in [pools]). Repeatable.",
    ),
    "assets": _option(
        "--assets",
        metavar="URL",
        help="Where files are kept: s3://BUCKET/PREFIX, the storage itself in [s3]; the data folder unless given.",
    ),
    "host": _option("--host", metavar="ADDRESS", help="Where to listen; 127.0.0.1 unless given."),
    "port": _option(
        "-p", "--port", type=click.IntRange(0, 65535), help="3001 unless given; 0 takes a free one."
    ),
    "ws_port": _option(
        "--ws-port",
        type=click.IntRange(0, 65535),
        help="Also serve the same on this port, for those who expect the WebSocket on one of its own.",
    ),
    "certificate": _option(
        "--certificate", metavar="FILE", help="Serve HTTPS with this certificate chain (PEM)."
    ),
    "certificate_key": _option(
        "--certificate-key", metavar="FILE", help="The certificate's private key (PEM)."
    ),
    "open": click.option(
        "--open",
        "open",
        is_flag=True,
        default=None,
        help="Ask nobody on this machine for a key, and serve nobody else.",
    ),
    "servers": click.option(
        "-s",
        "--server",
        "servers",
        type=AddressParam(),
        multiple=True,
        metavar="URL",
        help="A ComfyUI server, such as http://127.0.0.1:8188. Repeatable.",
    ),
    "services": click.option(
        "--service",
        "services",
        type=AddressParam(),
        multiple=True,
        metavar="NAME=ADDRESS",
        help="A further service that the same worker offers. Repeatable.",
    ),
    "environment": _option(
        "--environment",
        type=click.Choice(["cloud", "self_hosted"]),
        help="Where the worker says it runs; self_hosted unless given.",
    ),
    "tenant_isolation": _option(
        "--tenant-isolation",
        type=click.Choice(["strict", "loose", "none"]),
        help="How tenants share it: strict works for allowed ones alone, loose for them first; none unless given.",
    ),
    "allow_tenants": click.option(
        "--allow-tenant",
        "allow_tenants",
        multiple=True,
        metavar="TENANT",
        help="A tenant that a strict worker works for, or a loose one prefers. Repeatable.",
    ),
    "deny_tenants": click.option(
        "--deny-tenant",
        "deny_tenants",
        multiple=True,
        metavar="TENANT",
        help="A tenant that the worker never works for, allowed or not. Repeatable.",
    ),
    "region": _option("--region", metavar="NAME", help="Where the worker is; jobs can ask for it."),
    "compliance": click.option(
        "--compliance",
        "compliance",
        multiple=True,
        metavar="NAME",
        help="What the worker complies with, such as gdpr; jobs can ask for it. Repeatable.",
    ),
    "cost_tier": _option(
        "--cost-tier",
        type=click.Choice(["economy", "standard", "premium"]),
        help="How dear the worker is; standard unless given. Jobs can say the most that may be paid.",
    ),
    "rate": _option(
        "--rate", type=click.FloatRange(0), metavar="AMOUNT", help="What an hour of the worker costs."
    ),
    "providers": click.option(
        "--provider",
        "providers",
        multiple=True,
        metavar="NAME",
        help="Who provides the worker's services; local unless given. Jobs can ask for it. Repeatable.",
    ),
    "quality_levels": click.option(
        "--quality-level",
        "quality_levels",
        multiple=True,
        metavar="NAME",
        help="A quality level that the worker offers, such as fast; jobs can ask for it. Repeatable.",
    ),
    "speed": _option(
        "--speed",
        type=click.FloatRange(0, min_open=True),
        metavar="FACTOR",
        help="How fast it is; 1 is usual. Counts until enough was measured.",
    ),
    "gpu_count": _option(
        "--gpu-count", type=click.IntRange(1), metavar="N", help="GPUs, in place of what the server tells."
    ),
    "gpu_memory_gb": _option(
        "--gpu-memory-gb",
        type=click.FloatRange(0, min_open=True),
        metavar="GB",
        help="Memory of each, in place of what the server tells.",
    ),
    "gpu_model": _option(
        "--gpu-model", metavar="NAME", help="Their model, in place of what the server tells."
    ),
    "cpu_cores": _option(
        "--cpu-cores", type=click.IntRange(1), metavar="N", help="CPU cores of the server's machine."
    ),
    "cpu_threads": _option(
        "--cpu-threads", type=click.IntRange(1), metavar="N", help="CPU threads of the server's machine."
    ),
    "memory_gb": _option(
        "--memory-gb",
        type=click.FloatRange(0, min_open=True),
        metavar="GB",
        help="Memory of the server's machine, in place of what the server tells.",
    ),
    "server_folder": _option(
        "--server-folder",
        metavar="PATH",
        help="ComfyUI's own folder, where its disk is this machine's: what a job left there is removed once the hub "
        "has it. With one --server.",
    ),
    "clear_history": click.option(
        "--clear-history",
        "clear_history",
        is_flag=True,
        default=None,
        help="Remove what completed from the servers' history.",
    ),
    "fake": _option("--fake", type=click.IntRange(0), metavar="N", help="Also start so many fake servers."),
    "fake_version": click.option(
        "--fake-version",
        "fake_version",
        multiple=True,
        metavar="X.Y.Z",
        help="The ComfyUI release that fake servers behave like; 0.7.0 unless given. Repeatable: in turn.",
    ),
    "slots": _option(
        "--slots", type=click.IntRange(1), metavar="N", help="Jobs a server gets at a time; 1 unless given."
    ),
    "grace_s": _option(
        "--grace",
        "grace_s",
        type=click.FloatRange(0),
        metavar="SECONDS",
        help="How long what runs may take to end after the first signal; 60 unless given. Then it is given back.",
    ),
    "name": _option(
        "--name",
        metavar="NAME",
        help="The worker's name in the fleet (with several servers NAME-1, NAME-2 …). Unless given: the server's host "
        "and port, with this machine's name in place of a loopback address. Every worker of a fleet needs its own.",
    ),
    "hub": click.option(
        "--hub",
        "hub",
        type=AddressParam(),
        multiple=True,
        metavar="URL",
        help="The hub; the one on this machine unless given. Repeatable, for hubs on one store: where one does not "
        "answer, the next is asked.",
    ),
    "key": _option(
        "--key", metavar="KEY", help="The key for it. Better in COMFYFLEET_KEY, or found by itself."
    ),
    "enrol": _option("--enrol", metavar="TOKEN", help="Fetch a key of its own with this token, once."),
    "transport": _option(
        "--transport",
        type=click.Choice(["http", "websocket"]),
        help="How to speak to the hub: requests that wait (http, unless given), or one WebSocket for all slots.",
    ),
    "trust": _option("--trust", metavar="FILE", help="Certificates to trust at the hub (PEM)."),
    "legacy_websocket": _option(
        "--legacy-websocket",
        type=click.Choice(["on", "warn", "off"]),
        help="Whether callers and monitors are served over the WebSocket: on unless given; warn logs who still comes.",
    ),
    "webhook_allow": click.option(
        "--webhook-allow",
        "webhook_allow",
        type=AddressParam(),
        multiple=True,
        metavar="NETWORK|NAME",
        help="What webhooks may call beside public addresses, such as 10.0.0.0/8 or hooks.internal. Repeatable.",
    ),
    "trusted_proxies": click.option(
        "--trusted-proxy",
        "trusted_proxies",
        multiple=True,
        metavar="NETWORK",
        help="A proxy in front of the hub whose X-Forwarded-For is believed, such as 10.0.0.5. Repeatable.",
    ),
    "log_level": _option(
        "--log-level",
        type=Level(),
        help="What is logged to standard error; warning unless given. info has a line for each request.",
    ),
    "log_format": _option("--log-format", type=click.Choice(["text", "json"]), help="text unless given."),
}

OF_A_WORKER = (
    "environment",
    "tenant_isolation",
    "allow_tenants",
    "deny_tenants",
    "region",
    "compliance",
    "cost_tier",
    "rate",
    "providers",
    "quality_levels",
    "speed",
    "gpu_count",
    "gpu_memory_gb",
    "gpu_model",
    "cpu_cores",
    "cpu_threads",
    "memory_gb",
)
"""What a worker says of itself that nobody can find out."""

EVERY = tuple(_OPTIONS)

TO_REACH = ("config", "data", "hub", "key", "trust")
"""What every command needs that asks a hub."""


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
"""No setting: whoever wants it says so each time."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
