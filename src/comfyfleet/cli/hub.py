"""`comfyfleet hub`: the hub alone, on a store. Workers come over HTTP, or work directly on the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfyfleet.cli import helping
from comfyfleet.cli.options import settings
from comfyfleet.cli.up import ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comfyfleet.cli.settings import Resolved


@helping.command("hub")
@settings(
    "store",
    "assets",
    "pools",
    "host",
    "port",
    "ws_port",
    "open",
    "certificate",
    "certificate_key",
    "data",
    "legacy_websocket",
    "webhook_allow",
    "trusted_proxies",
    "log_level",
    "log_format",
    "config",
)
def command(config: str | None, **flags: Any) -> None:
    """Run a hub without workers of its own, until Ctrl-C or SIGTERM.

    Several hubs may share a Redis or PostgreSQL store.
    """
    from comfyfleet.cli.extras import require
    from comfyfleet.cli.local import keep_private
    from comfyfleet.cli.logs import set_up
    from comfyfleet.cli.settings import read_settings

    require("hub")
    from comfyfleet.cli.house import run_loop

    resolved = read_settings(flags, config=config)
    keep_private()
    set_up(resolved.values.log_level, resolved.values.log_format)
    ended(run_loop(_live(resolved)))


async def _live(resolved: Resolved) -> Sequence[int]:
    from contextlib import AsyncExitStack

    from comfyfleet.cli.house import greet, open_house
    from comfyfleet.cli.signals import Signals

    with Signals() as signals:
        async with AsyncExitStack() as stack:
            entered = await signals.before(stack.enter_async_context(open_house(resolved)), 1)
            if entered is not None:
                greet(entered[0], resolved)
                await signals.wait()
    return signals.came
