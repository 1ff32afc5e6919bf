"""Where a hub's files lie, from its settings: a folder beside its store, or a bucket of S3-compatible storage."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import unquote, urlsplit

from comfyfleet.assets.keeping import CabinetOf
from comfyfleet.assets.local import LocalAssets
from comfyfleet.assets.presigning import Bucket, Credentials
from comfyfleet.assets.s3 import S3Assets
from comfyfleet.assets.storage import StorageRefused
from comfyfleet.cli.endings import CommandFailed
from comfyfleet.cli.settings import Resolved
from comfyfleet.model.errors import Fault
from comfyfleet.policy.retention import DAY_S
from comfyfleet.ports import Assets, Cabinet, Clock

_LOG = logging.getLogger(__name__)


@asynccontextmanager
async def open_assets(
    resolved: Resolved, cabinet: Cabinet, clock: Clock, cabinet_of: CabinetOf | None = None
) -> AsyncIterator[Assets]:
    """`cabinet_of`: where the records of each tenant's files lie; unless said, all in `cabinet`."""
    keep_s = resolved.retention().files_days * DAY_S
    tenant_bytes = resolved.limits().max_tenant_file_bytes
    if resolved.values.assets is None:
        folder = resolved.data / "files"
        yield LocalAssets(
            folder, cabinet, clock, keep_s=keep_s, cabinet_of=cabinet_of, tenant_bytes=tenant_bytes
        )
        return
    bucket, prefix, credentials = storage(resolved)
    async with S3Assets(
        bucket,
        credentials,
        cabinet,
        clock,
        prefix=prefix,
        keep_s=keep_s,
        cabinet_of=cabinet_of,
        tenant_bytes=tenant_bytes,
    ) as assets:
        try:
            await assets.look()
        except StorageRefused as refused:
            # Nothing but other settings will help; told now, nobody finds out by the first picture.
            if refused.status < 500 and refused.status != 429:
                raise resolved.wrong("assets", str(refused)) from refused
            _LOG.warning("files cannot be kept for now: %s", refused)
        except Fault as fault:
            # It may come back, and jobs without files need none of it.
            _LOG.warning("files cannot be kept for now: %s", fault)
        yield assets


def storage(resolved: Resolved) -> tuple[Bucket, str, Credentials]:
    """Bucket, prefix and credentials. Raises `CommandFailed` with the name of the setting that will not do."""
    for mistake in storage_mistakes(resolved):
        raise mistake
    parts, chosen = urlsplit(resolved.values.assets or ""), resolved.s3()
    bucket = Bucket(chosen.endpoint.rstrip("/"), chosen.region, parts.netloc, chosen.path_style)
    credentials = Credentials(chosen.access_key, chosen.secret_key, chosen.session_token or None)
    return bucket, unquote(parts.path).strip("/"), credentials


def storage_mistakes(resolved: Resolved) -> Iterator[CommandFailed]:
    parts, chosen = urlsplit(resolved.values.assets or ""), resolved.s3()
    if parts.scheme != "s3" or not parts.hostname or parts.query or "@" in parts.netloc:
        yield resolved.wrong("assets", "write s3://BUCKET or s3://BUCKET/PREFIX; all else is said in [s3]")
    endpoint = urlsplit(chosen.endpoint)
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname or endpoint.query:
        yield resolved.wrong("s3.endpoint", "write the storage's address, such as https://storage.example")
    for name in ("access_key", "secret_key", "region"):
        if not getattr(chosen, name):
            yield resolved.wrong(f"s3.{name}", "it is needed beside 'assets'")
