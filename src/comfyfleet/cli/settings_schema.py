"""Which settings there are: their names, their kinds, and what each is unless said."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.requirement import CostTier, Isolation
from comfyfleet.model.worker import ServerLimits
from comfyfleet.policy.rules import RULES, Retention, Rules

PREFIX = "COMFYFLEET_"
FILE_NAME = "comfyfleet.toml"

OLD_NAMES = {"port": ("HUB_PORT",), "ws_port": ("WS_PORT",), "store": ("HUB_REDIS_URL", "REDIS_URL")}
"""What others called them in the environment."""
LISTS = frozenset(
    {"servers", "services", "webhook_allow", "trusted_proxies", "allow_tenants", "deny_tenants"}
    | {"compliance", "encryption.keys", "quality_levels", "providers", "hub"}
)
"""In the environment with commas or spaces between."""
SECRET = frozenset({"key", "enrol", "s3.secret_key", "s3.session_token", "encryption.keys"})
ADDRESSES = frozenset({"store", "hub", "servers", "services", "assets", "s3.endpoint"})
CREDENTIALS = re.compile(r"^((?:\w+=)?(?:\w+://)?)[^/]*@")
"""A user and a password in an address, behind its scheme and the name of a service."""
PASSWORD = re.compile(r"([?&][^=&]*password=)[^&]*", re.IGNORECASE)
"""The same as a parameter, which PostgreSQL takes."""
CAPS = frozenset({"max_waiting", "max_open_bytes"})
"""Rules of the engine that bound what it takes in: whoever looks for them looks among the limits."""
KEPT = frozenset(RULES.values())
"""Rules of the engine that say how long something is kept: they are said in days, with all others of the kind."""
ELSEWHERE = frozenset({f"{PREFIX}CONFIG", f"{PREFIX}DEBUG", f"{PREFIX}COMPLETE"})
"""Variables of ours that are no settings."""

OTHERS = {
    "access_key": ("AWS_ACCESS_KEY_ID",),
    "secret_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN",),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
"""What other programs call the settings of a storage in the environment."""
TOGETHER = frozenset({"access_key", "secret_key", "session_token"})

FLAGS = {
    "servers": "--server",
    "services": "--service",
    "grace_s": "--grace",
    "pools": "--pool",
    "allow_tenants": "--allow-tenant",
    "deny_tenants": "--deny-tenant",
    "trusted_proxies": "--trusted-proxy",
    "quality_levels": "--quality-level",
    "providers": "--provider",
}

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0, le=1_000)]


class S3Settings(msgspec.Struct, frozen=True):
    """The storage that `assets` names a bucket of."""

    endpoint: str = ""
    """Its address, as hub, workers and callers reach it."""
    region: str = "us-east-1"
    path_style: bool = True
    """Whether the bucket stands in the path; else it stands before the host's name."""
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""


class EncryptionSettings(msgspec.Struct, frozen=True):
    """Master keys, with which payloads and results are sealed at rest. None: they are not."""

    keys: tuple[str, ...] = ()
    """Each as ID=KEY."""
    key_file: str = ""
    """More of them, one a line. It is read again while a hub runs."""
    current: str = ""
    """The id of the one that is used for what is new; the first unless said. `none`: nothing more is sealed."""
    data_key_days: Annotated[float, Meta(gt=0)] = 365.0
    """After so long a tenant gets a new data key."""


TABLES: dict[str, type[msgspec.Struct]] = {
    "limits": HubLimits,
    "rules": Rules,
    "s3": S3Settings,
    "encryption": EncryptionSettings,
    "retention": Retention,
    "comfyui": ServerLimits,
}
POOLS = "pools"
"""A table too, whose names are the operator's own."""
POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
POOL_KINDS = ("sqlite", "postgresql", "postgres")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: str = ""
    """The folder of what a program keeps: the embedded store, keys. Unless said, the user's folder for data."""
    store: str | None = None
    """Where jobs are kept. Unless said, SQLite in the data folder."""
    assets: str | None = None
    """Where files are kept: s3://bucket/prefix. Unless said, in the data folder."""
    host: str = "127.0.0.1"
    port: Port = 3001
    ws_port: Port | None = None
    """A second port with the same on it, for callers and workers that expect a WebSocket on one of its own."""
    certificate: str | None = None
    certificate_key: str | None = None
    open: bool = False
    """Whoever asks from this machine needs no key; then nobody else is served."""
    servers: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    """Further services of a worker, as NAME=ADDRESS."""
    environment: Literal["cloud", "self_hosted"] | None = None
    tenant_isolation: Isolation | None = None
    """How tenants share a worker: strict works for those it allows alone, loose for those first."""
    allow_tenants: tuple[str, ...] = ()
    deny_tenants: tuple[str, ...] = ()
    region: str | None = None
    compliance: tuple[str, ...] = ()
    cost_tier: CostTier | None = None
    rate: Annotated[float, Meta(ge=0)] | None = None
    """What an hour of a worker costs."""
    providers: tuple[str, ...] = ()
    """Who provides the services of a worker. Unless said, what its connectors say: local."""
    quality_levels: tuple[str, ...] = ()
    speed: Annotated[float, Meta(gt=0)] | None = None
    """How fast a worker is; 1 is usual."""
    gpu_count: Annotated[int, Meta(ge=1)] | None = None
    gpu_memory_gb: Annotated[float, Meta(gt=0)] | None = None
    gpu_model: str | None = None
    """In place of what the server tells of its cards."""
    cpu_cores: Annotated[int, Meta(ge=1)] | None = None
    cpu_threads: Annotated[int, Meta(ge=1)] | None = None
    memory_gb: Annotated[float, Meta(gt=0)] | None = None
    server_folder: str | None = None
    """The folder of the one server there is, on this machine's disk: what jobs left there goes once it is kept."""
    clear_history: bool = False
    """Whether a worker removes its entries from its servers' history."""
    fake: Count = 0
    fake_version: tuple[str, ...] = ()
    """The ComfyUI releases that fake servers behave like, in turn."""
    slots: Annotated[int, Meta(ge=1, le=1_000)] = 1
    grace_s: Annotated[float, Meta(ge=0)] = 60.0
    name: str | None = None
    hub: tuple[str, ...] = ()
    """Where a hub answers; of several, which share a store, the next is asked where one does not."""
    key: str | None = None
    enrol: str | None = None
    transport: Literal["http", "websocket"] = "http"
    """How a worker speaks to its hub: a request for each call, or one connection for all."""
    trust: str | None = None
    """A file with the certificates to trust at the hub, beside those that the system trusts."""
    legacy_websocket: Literal["on", "warn", "off"] = "on"
    """Whether callers and monitors are still served over the WebSocket; workers always are."""
    webhook_allow: tuple[str, ...] = ()
    """Networks, addresses and names that webhooks may call beside public addresses."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks and addresses of proxies whose X-Forwarded-For is believed."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"
    limits: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    s3: dict[str, Any] = {}
    pools: dict[str, str] = {}
    """The databases that tenants are assigned to, by name. Unless said, one beside an embedded store."""
    encryption: dict[str, Any] = {}
    retention: dict[str, Any] = {}
    comfyui: dict[str, Any] = {}
