"""The settings of the connector for one server of the A1111 family: access, manners, limits and durations.

The durations of an attempt come with the attempt and override these.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from comfyfleet.model.worker import MEGABYTE, ServerLimits


class A1111Settings(ServerLimits, frozen=True, kw_only=True):
    """All durations are seconds. The defaults suit a server in the same network."""

    user: str = ""
    """For `--api-auth`. The address may have user and password instead."""
    password: str = ""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Sent with every request, for servers behind a proxy that requires a key."""
    verify_tls: bool = True
    providers: tuple[str, ...] = ("local",)
    exclusive: bool = True
    """Nobody else uses the server, so a cancelled run is interrupted. False: a cancelled run ends by itself, because an
    interrupt could hit the run of somebody else."""
    save_images: bool = False
    """The server also saves the pictures in its own output folder."""
    previews: bool = True
    spool: Path | None = None
    """Where pictures are kept until they are fetched. None: the folder for temporary files."""
    max_kept_bytes: int = 4096 * MEGABYTE
    """Of all pictures that were not fetched yet. The oldest go first."""
    max_preview_bytes: int = MEGABYTE

    request_s: float = 15.0
    health_s: float = 10.0
    inventory_s: float = 60.0
    """For each list."""
    connect_s: float = 10.0
    accept_s: float = 60.0
    """How long the server may not know of a run that was sent, unless the attempt has its own limit."""
    load_s: float = 300.0
    """How long a run may be silent before its first step, even if its stall timeout is shorter: a checkpoint may have
    to be loaded."""
    poll_s: float = 1.0
    """How often a run is looked at."""
    settle_s: float = 2.0
    """A task id that waits for this long while nothing runs was left by a request that failed."""
    refused_s: float = 2.0
    """A server whose port refuses connections for this long is gone, and its run with it."""
    unresponsive_s: float = 120.0
    """A run whose server gives no useful answer for this long has crashed."""
    cancel_s: float = 60.0
    """How long a cancel is repeated."""
    stop_s: float = 5.0
    """How long an attempt that timed out tries to stop its run."""
    close_s: float = 5.0
    """How long a closing connector waits for a run that is under way."""
