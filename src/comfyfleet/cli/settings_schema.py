"""The settings: their names, types and defaults."""

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
"""Variables of other programs that are read too."""
LISTS = frozenset(
    {"servers", "services", "fake", "webhook_allow", "trusted_proxies", "allow_tenants", "deny_tenants"}
    | {"compliance", "encryption.keys", "quality_levels", "providers", "hub"}
)
"""In the environment, commas or spaces separate the items."""
SECRET = frozenset({"key", "enrol", "s3.secret_key", "s3.session_token", "encryption.keys"})
ADDRESSES = frozenset({"store", "hub", "servers", "services", "assets", "s3.endpoint"})
CREDENTIALS = re.compile(r"^((?:\w+=)?(?:\w+://)?)[^/]*@")
"""User and password in a URL, after its scheme and the name of a service."""
PASSWORD = re.compile(r"([?&][^=&]*password=)[^&]*", re.IGNORECASE)
"""A password as a parameter of the URL, as PostgreSQL accepts it."""
CAPS = frozenset({"max_waiting", "max_open_bytes"})
"""Rules of the engine that limit what it accepts. Users expect them in [limits]."""
RETENTION_RULES = frozenset(RULES.values())
"""Rules of the engine about how long something is kept. They are given in days, in [retention]."""
ELSEWHERE = frozenset({f"{PREFIX}CONFIG", f"{PREFIX}DEBUG", f"{PREFIX}COMPLETE"})
"""Our variables that are not settings."""

OTHERS = {
    "access_key": ("AWS_ACCESS_KEY_ID",),
    "secret_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN",),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}
"""Variables of other programs for the storage of files."""
TOGETHER = frozenset({"access_key", "secret_key", "session_token"})

Port = Annotated[int, Meta(ge=0, le=65535)]
FakeCount = Annotated[str, Meta(pattern=r"^([a-z0-9_-]+=)?[0-9]{1,3}$")]


class S3Settings(msgspec.Struct, frozen=True):
    """The S3-compatible storage of the bucket in `assets`."""

    endpoint: str = ""
    """The address for the hub, workers and callers."""
    region: str = "us-east-1"
    path_style: bool = True
    """Whether the bucket is in the path of the URL; otherwise it is in the host name."""
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""


class EncryptionSettings(msgspec.Struct, frozen=True):
    """Master keys that encrypt payloads and results at rest. Without keys, nothing is encrypted."""

    keys: tuple[str, ...] = ()
    """Each as ID=KEY."""
    key_file: str = ""
    """A file with more keys, one on each line. A running hub reads it again."""
    current: str = ""
    """The id of the key for new jobs; by default the first. `none`: new jobs are not encrypted."""
    data_key_days: Annotated[float, Meta(gt=0)] = 365.0
    """A tenant gets a new data key after this time."""


TABLES: dict[str, type[msgspec.Struct]] = {
    "limits": HubLimits,
    "rules": Rules,
    "s3": S3Settings,
    "encryption": EncryptionSettings,
    "retention": Retention,
    "comfyui": ServerLimits,
}
DATABASES = "databases"
"""A table too; the operator chooses the names."""
CONNECTORS = "connectors"
"""Tables by the name of the connector. Its package knows their settings."""
SECRET_FILE = "_file"
"""The end of a connector setting that names a file with the value."""
OLD_DATABASES = "pools"
"""The old name of the table. It is read, but not shown."""
DATABASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
DATABASE_KINDS = ("sqlite", "postgresql", "postgres")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: str = ""
    """The folder for the embedded store and keys. Default: the user's data folder."""
    store: str | None = None
    """The database for jobs. Default: SQLite in the data folder."""
    assets: str | None = None
    """The storage for files: s3://bucket/prefix. Default: the data folder."""
    host: str = "127.0.0.1"
    port: Port = 3001
    ws_port: Port | None = None
    """A second port for clients that expect the WebSocket there."""
    certificate: str | None = None
    certificate_key: str | None = None
    open: bool = False
    """No key is needed on this machine; other machines are refused."""
    servers: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    """Other services of a worker, as NAME=ADDRESS."""
    environment: Literal["cloud", "self_hosted"] | None = None
    tenant_isolation: Isolation | None = None
    """How tenants share a worker: strict serves allowed tenants only, loose serves them first."""
    allow_tenants: tuple[str, ...] = ()
    deny_tenants: tuple[str, ...] = ()
    region: str | None = None
    compliance: tuple[str, ...] = ()
    cost_tier: CostTier | None = None
    rate: Annotated[float, Meta(ge=0)] | None = None
    """What an hour of a worker costs."""
    providers: tuple[str, ...] = ()
    """Who provides the services of a worker. Default: local, from its connectors."""
    quality_levels: tuple[str, ...] = ()
    speed: Annotated[float, Meta(gt=0)] | None = None
    """Relative speed of a worker; 1 is normal."""
    gpu_count: Annotated[int, Meta(ge=1)] | None = None
    gpu_memory_gb: Annotated[float, Meta(gt=0)] | None = None
    gpu_model: str | None = None
    """Instead of what the server reports about its GPUs."""
    cpu_cores: Annotated[int, Meta(ge=1)] | None = None
    cpu_threads: Annotated[int, Meta(ge=1)] | None = None
    memory_gb: Annotated[float, Meta(gt=0)] | None = None
    server_folder: str | None = None
    """The folder of the only server, on this machine's disk. Outputs there are deleted once the hub has them."""
    clear_history: bool = False
    """Whether a worker removes its jobs from the history of its servers."""
    fake: tuple[FakeCount, ...] = ()
    """How many fake servers, of ComfyUI or as NAME=NUMBER of another connector."""
    fake_version: tuple[str, ...] = ()
    """The ComfyUI releases that fake servers behave like, in turn."""
    fake_load_seconds_per_gb: Annotated[float, Meta(ge=0)] = 0.5
    """How long fake servers read a model file, for each gigabyte of its size."""
    slots: Annotated[int, Meta(ge=1, le=1_000)] = 1
    grace_s: Annotated[float, Meta(ge=0)] = 60.0
    name: str | None = None
    hub: tuple[str, ...] = ()
    """The addresses of hubs on one store. The next is tried if one does not answer."""
    key: str | None = None
    enrol: str | None = None
    transport: Literal["http", "websocket"] = "http"
    """How a worker talks to its hub: a request for each call, or one connection for all."""
    trust: str | None = None
    """A file with certificates to trust at the hub, in addition to those of the system."""
    legacy_websocket: Literal["on", "warn", "off"] = "on"
    """Whether old callers and monitors can use the WebSocket. Workers always can."""
    webhook_allow: tuple[str, ...] = ()
    """Networks, addresses and names that webhooks may call, in addition to public addresses."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks and addresses of proxies whose X-Forwarded-For is trusted."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"
    limits: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    s3: dict[str, Any] = {}
    databases: dict[str, str] = {}
    """The tenant databases, by name. Default: one beside an embedded store."""
    encryption: dict[str, Any] = {}
    retention: dict[str, Any] = {}
    comfyui: dict[str, Any] = {}
    connectors: dict[str, dict[str, Any]] = {}
    """Settings of connectors, by their names: [connectors.NAME]."""
