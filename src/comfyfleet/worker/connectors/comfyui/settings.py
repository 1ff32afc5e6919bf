"""The address, the limits and the durations of one ComfyUI server's connector.

The durations of an attempt come with the attempt and override these.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from comfyfleet.model.worker import ServerLimits

DEFAULT_PORTS = {"http": 80, "https": 443}


class ComfyUISettings(ServerLimits, frozen=True, kw_only=True):
    """All durations are seconds. The defaults suit a server in the same network."""

    providers: tuple[str, ...] = ("local",)
    subfolder: str = "comfyfleet"
    """Each attempt has its own folder below this one for inputs and outputs."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Sent with every request, for servers behind a proxy that requires a key."""
    verify_tls: bool = True
    folder: Path | None = None
    """The server's folder with `input` and `output`, if it is on this machine's disk. The connector
    removes an attempt's files there once the hub has them."""
    clears_history: bool = False
    """Whether to remove an attempt from the server's history once the hub has taken its completion."""

    request_s: float = 15.0
    """For small requests: queue, history, health."""
    transfer_s: float = 600.0
    inventory_s: float = 60.0
    accept_s: float = 60.0
    """For the answer to a submit, unless the attempt has its own limit."""
    poll_s: float = 5.0
    """How often a running attempt is looked up while the WebSocket is silent."""
    settle_s: float = 0.5
    """Pause before an unknown prompt is looked up once more and counts as gone."""
    refused_s: float = 2.0
    """A server whose port refuses connections for this long is gone, and its runs with it."""
    unreachable_s: float = 30.0
    """A server that cannot be connected to for this long has crashed."""
    unresponsive_s: float = 120.0
    """A server that accepts connections and gives no useful answer for this long has crashed."""

    connect_s: float = 10.0
    """For opening a connection, including the WebSocket's handshake."""
    listen_s: float = 5.0
    """How long a submit waits for the WebSocket. Without it the run relies on lookups."""
    heartbeat_s: float | None = 30.0
    reconnect_min_s: float = 0.2
    reconnect_max_s: float = 10.0
    end_news_s: float = 0.5
    """How late the WebSocket may report an end that a lookup has found; later it counts as deaf."""
    quiet_s: float = 30.0
    """A WebSocket that is silent for this long during a run is opened again: it may be deaf."""

    idle_queue_s: float = 30.0
    """If prompts wait and none runs for this long, the server's execution thread is dead."""
    silent_start_s: float = 120.0
    """If a run starts and does not reach its first node in this time, the execution thread is dead."""
    silent_run_s: float = 3600.0
    """The same for a run without any sign, if the attempt has no stall timeout."""

    cancel_s: float = 60.0
    """How long a cancel is repeated."""
    stop_s: float = 3.0
    """How long an attempt that timed out tries to stop its prompt."""
    cancel_interval_s: float = 0.25
    sweep_s: float = 60.0
    """How long a prompt whose submit got no answer is looked for and removed."""
    close_s: float = 5.0

    progress_interval_s: float = 0.05
    """Progress is reported at most this often; the last report is always sent."""


class ServerAddress(msgspec.Struct, frozen=True):
    """The base has no credentials and no slash at its end."""

    base: str
    host: str
    port: int
    user: str | None = None
    password: str = ""

    @property
    def server_id(self) -> str:
        return f"{self.host}:{self.port}"

    def url(self, path: str) -> str:
        return f"{self.base}{path}"

    @property
    def websocket(self) -> str:
        return f"ws{self.base.removeprefix('http')}/ws"


def parse_address(
    url: str, what: str = "a ComfyUI server", example: str = "http://gpu-a:8188"
) -> ServerAddress:
    """Reads `http://user:password@host:port/prefix/`; the scheme is optional. Raises `ValueError`."""
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"the address of {what} needs http or https, not {parts.scheme!r}: {url!r}")
    if not parts.hostname:
        raise ValueError(f"the address of {what} needs a host, such as {example}, not {url!r}")
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    authority = host if parts.port is None else f"{host}:{port}"
    return ServerAddress(
        base=f"{parts.scheme}://{authority}{parts.path.rstrip('/')}",
        host=host,
        port=port,
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password or ""),
    )


def server_id(url: str) -> str:
    """A server's default name: its host and port."""
    return parse_address(url).server_id
