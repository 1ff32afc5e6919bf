"""How one ComfyUI server is reached and how patient its connector is.

Owns the address of a server (with prefix, credentials and id) and every duration of the connector. Durations of a
single attempt come with the attempt and override what stands here.
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
    """Inputs and outputs of an attempt lie in a folder of their own below this one."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Sent with every request, for servers behind a gate that wants a key."""
    verify_tls: bool = True
    folder: Path | None = None
    """The server's own, with `input` and `output`, where its disk is this machine's: what an attempt left there is then
    removed once it is kept elsewhere."""
    clears_history: bool = False
    """Whether the entry of an attempt is removed from the server's history once its completion was taken."""

    request_s: float = 15.0
    """For small questions: queue, history, health."""
    transfer_s: float = 600.0
    """For uploads and downloads."""
    inventory_s: float = 60.0
    accept_s: float = 60.0
    """For the answer to a submitted prompt, where the attempt does not say."""
    poll_s: float = 5.0
    """How often a running attempt is looked up although the websocket says nothing."""
    settle_s: float = 0.5
    """Pause before a prompt that is not known (any more) is looked up once more and believed to be gone."""
    refused_s: float = 2.0
    """A server whose port refuses connections for so long is gone, and with it what ran there: a restart forgets it."""
    unreachable_s: float = 30.0
    """A server that cannot be connected to for so long, for whatever other reason, has crashed."""
    unresponsive_s: float = 120.0
    """A server that takes connections and gives no useful answer for so long has crashed."""

    connect_s: float = 10.0
    """For opening a connection, the websocket's handshake included."""
    listen_s: float = 5.0
    """How long a submit waits for the websocket; the run then goes on without news, by looking it up."""
    heartbeat_s: float | None = 30.0
    reconnect_min_s: float = 0.2
    reconnect_max_s: float = 10.0
    end_news_s: float = 0.5
    """How late the websocket may tell of an end that was already looked up; after that it counts as deaf."""
    quiet_s: float = 30.0
    """A websocket silent for so long during a run is opened anew: it may be deaf."""

    idle_queue_s: float = 30.0
    """Prompts wait and none runs for so long: the server's execution thread is dead."""
    silent_start_s: float = 120.0
    """A run that began and never came to its first node: the server's execution thread died on it."""
    silent_run_s: float = 3600.0
    """A run without any sign for so long, where the attempt sets no stall timeout: dead as well."""

    cancel_s: float = 60.0
    """How long a cancel insists."""
    stop_s: float = 3.0
    """How long an attempt that timed out tries to take its prompt back."""
    cancel_interval_s: float = 0.25
    sweep_s: float = 60.0
    """How long a prompt whose submit got no answer is looked for, to be removed when it turns up late."""
    close_s: float = 5.0

    progress_interval_s: float = 0.05
    """Progress is reported no more often; the last one is always reported."""


class ServerAddress(msgspec.Struct, frozen=True):
    """Where a server is. The base has no credentials and no slash at its end."""

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


def parse_address(url: str) -> ServerAddress:
    """Read `http://user:password@host:port/prefix/`; the scheme may be left out. Raises `ValueError`."""
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"a ComfyUI server is reached by http or https, not by {parts.scheme!r}: {url!r}")
    if not parts.hostname:
        raise ValueError(
            f"the address of a ComfyUI server needs a host, such as http://gpu-a:8188, not {url!r}"
        )
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
    """The name a server has unless it is given one: its host and port."""
    return parse_address(url).server_id
