"""The settings and the address of a Comfy Cloud account's connector.

The settings print without the key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from comfyfleet.model.worker import MEGABYTE, Seconds, ServerLimits
from comfyfleet.net.url_guard import AllowedHosts
from comfyfleet.worker.connectors.settings import converted_settings

DEFAULT_ADDRESS = "https://cloud.comfy.org"
_MAX_KEY = 4_096


class ComfyCloudSettings(ServerLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All durations are seconds."""

    key: str = ""
    slots: Annotated[int, Meta(ge=1)] | None = None
    """Runs at a time. It never exceeds what the plan allows. None: what the plan allows."""
    partner_nodes: bool = False
    """Pass the key on to partner nodes. They cost extra credits."""
    allow: tuple[str, ...] = ()
    """Networks, addresses and host names that may be used although they are not public, also without TLS."""
    subfolder: str = "comfyfleet"
    """Each attempt saves its outputs under a prefix below this one, which is also its mark."""

    poll_s: Annotated[float, Meta(gt=0)] = 2.0
    """The shortest pause between two looks at a job."""
    poll_max_s: Annotated[float, Meta(gt=0)] = 60.0
    """The longest pause: while events arrive, and after errors."""
    request_s: Seconds = 30.0
    transfer_s: Seconds = 600.0
    inventory_s: Seconds = 60.0
    connect_s: Seconds = 10.0
    accept_s: Seconds = 60.0
    """How long a full queue or a rate limit is waited for, unless the attempt has its own limit."""
    doubt_s: Seconds = 600.0
    """How long a submission without an answer is cleared up before the job fails as `outcome_unknown`."""
    find_s: Seconds = 60.0
    """How long a job that exists is looked for in the account's list."""
    find_jobs: Annotated[int, Meta(ge=1, le=1000)] = 200
    """How many of the newest jobs of the account are looked through."""
    lost_s: Seconds = 30.0
    """How long a job that was accepted may be unknown."""
    unreachable_s: Seconds = 3600.0
    """How long a run is waited for while Comfy Cloud does not answer."""
    run_cap_s: Seconds = 1800.0
    """The plan's limit for one run. A run that Comfy Cloud cancels after so long has hit it."""
    longest_s: Annotated[float, Meta(gt=0, le=72_000)] = 43_200.0
    """The longest time from the acceptance to the end of a run. Idempotency keys live for 24 hours."""
    pause_s: Seconds = 60.0
    """After a refusal for money or rights the account is not used for so long, then twice as long …"""
    pause_max_s: Seconds = 900.0
    """… up to this."""
    health_s: Seconds = 60.0
    """How long an answer about the account counts."""
    cancel_s: Seconds = 60.0
    stop_s: Seconds = 10.0
    """How long a run that timed out is waited for after its cancel."""
    close_s: Seconds = 5.0
    quiet_s: Seconds = 120.0
    """An event stream that is silent for so long is opened again."""
    max_event_bytes: Annotated[int, Meta(ge=1024)] = 8 * MEGABYTE
    max_upload_bytes: Annotated[int, Meta(ge=1)] = 100 * MEGABYTE
    """For one input file. The plan's own limit applies too."""

    def __repr__(self) -> str:
        return "ComfyCloudSettings(…)"


class CloudAddress(msgspec.Struct, frozen=True):
    """The base has no credentials and no slash at its end."""

    base: str
    origin: str

    def url(self, path: str) -> str:
        return f"{self.base}{path}"


def parse_address(text: str, allowed: AllowedHosts) -> CloudAddress:
    """Raises `ValueError`."""
    # The address may contain a password, so no message shows it.
    given = text.strip() or DEFAULT_ADDRESS
    try:
        parts = urlsplit(given if "://" in given else f"https://{given}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"the address of Comfy Cloud is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"the address of Comfy Cloud needs https and a host, such as {DEFAULT_ADDRESS}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "the address of Comfy Cloud contains neither a user nor a query: give the key as `key` or `key_file`"
        )
    if parts.scheme == "http" and not is_allowed_host(host, allowed):
        raise ValueError(
            f"the address of Comfy Cloud must start with https, because the key is sent there. To use {host!r} "
            "without TLS, name it in `allow`"
        )
    shown = f"[{host}]" if ":" in host else host
    origin = f"{parts.scheme}://{shown}" + (f":{port}" if port is not None else "")
    return CloudAddress(f"{origin}{parts.path.rstrip('/')}", origin)


def is_allowed_host(host: str, allowed: AllowedHosts) -> bool:
    try:
        return allowed.has_address(ipaddress.ip_address(host))
    except ValueError:
        return allowed.has_name(host)


def read_settings(given: Mapping[str, Any]) -> ComfyCloudSettings:
    """Raises `ValueError`, without the key."""
    settings = converted_settings(given, ComfyCloudSettings)
    key = settings.key.strip()
    if not key:
        raise ValueError(
            "comfy_cloud needs the setting 'key' or 'key_file': create a key at https://platform.comfy.org and put it "
            "in a file that only the worker's user can read"
        )
    if len(key) > _MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            "the setting 'key' is not valid: it has characters that a key does not have. Copy it again"
        )
    AllowedHosts(settings.allow)
    return msgspec.structs.replace(settings, key=key)
