"""The address, the limits and the durations of one LangFlow server's connector, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from comfyfleet.model.worker import ServerLimits
from comfyfleet.worker.connectors.settings import converted_settings

Seconds = Annotated[float, Meta(gt=0)]


class LangFlowSettings(ServerLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All durations are seconds."""

    key: str | None = None
    """An API key of LangFlow. It is sent only in the header `x-api-key`."""
    providers: tuple[str, ...] = ("local",)
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Sent with every request, for servers behind a proxy that requires a key."""
    verify_tls: bool = True

    connect_s: Seconds = 10.0
    request_s: Seconds = 30.0
    """For small requests. A component that blocks LangFlow's process delays every answer."""
    transfer_s: Seconds = 600.0
    inventory_s: Seconds = 60.0
    accept_s: Seconds = 60.0
    """For the answer to a submit, unless the attempt has its own limit. The submit is repeated with the same key."""
    start_s: Seconds = 600.0
    """For the start of a job that the server has queued, unless the attempt has its own limit."""
    queued_s: Seconds = 60.0
    """A job that is queued for so long is submitted anew: LangFlow forgets queued jobs when it restarts."""
    poll_s: Seconds = 5.0
    """How often the status is read beside the events."""
    settle_s: Seconds = 10.0
    """A job that failed without a reason is asked for again for so long: it may turn into a cancelled one."""
    refused_s: Seconds = 5.0
    """A server whose port refuses connections for this long is gone, and its runs with it."""
    unresponsive_s: Seconds = 900.0
    """A server that gives no useful answer for this long has crashed. A blocking component is silent until its end."""
    health_s: Seconds = 30.0
    """The server is healthy if it answers within this time, or while it runs our jobs."""
    health_wait_s: Seconds = 4.0
    """How long one health check waits for the answer; the next check continues to wait for it."""
    stream_silence_s: Seconds = 45.0
    """The event stream is opened again after this silence. LangFlow sends a sign every 15 s."""
    reconnect_s: Seconds = 1.0
    cancel_s: Seconds = 60.0
    """How long a cancel is repeated."""
    cancel_interval_s: Seconds = 0.5
    hang_up_s: Seconds = 0.2
    """On an older server: how long after a hang-up its run counts as stopped."""
    probe_s: Seconds = 2.0
    """How long a job that was found by its key may turn out to be only the probe."""
    close_s: Seconds = 5.0


def read_settings(options: Mapping[str, Any]) -> LangFlowSettings:
    """Raises `ValueError` that names the setting, and never a value."""
    settings = converted_settings(options, LangFlowSettings)
    # A wrong header would raise at the first request, with the key in the message.
    if settings.key is not None and not (
        settings.key and settings.key.isascii() and settings.key.isprintable()
    ):
        raise ValueError("the setting 'key' contains characters that no key has: copy it again from LangFlow")
    return settings


def parse_base(address: str) -> str:
    """The address without a slash at its end. The scheme is optional. Raises `ValueError`."""
    text = address.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"the address of a LangFlow server needs http or https, not {parts.scheme!r}")
    if parts.username is not None:
        raise ValueError(
            "the address of a LangFlow server takes no user or password: set `key` or `key_file` in "
            "[connectors.langflow]"
        )
    if not parts.hostname or parts.query or parts.fragment:
        raise ValueError(
            f"the address of a LangFlow server needs a host, such as http://flows:7860, not {address!r}"
        )
    # Raises `ValueError` for a port out of range.
    parts.port  # noqa: B018
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
