"""No secret is written where it was not asked for: logs at every level, settings as shown, problems, the audit log."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import secrets
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis
from tests.acceptance._process import (
    CLI,
    fake_servers,
    picture_workflow,
    read_until,
    run_cli,
    started,
    written,
)
from tests.servers.redis_fixtures import own_server
from tests.servers.s3_server import CREDENTIALS, S3Server, s3_server
from tests.tenancy._databases import tenant_schema

from comfyfleet.cli.bootstrap import run_hub
from comfyfleet.cli.settings import read_settings

STORE, DATABASE, SERVER, HOOK = (
    "pw-of-the-store",
    "pw-of-the-database",
    "pw-of-the-server",
    "token-of-the-hook",
)
MASTER = base64.b64encode(secrets.token_bytes(32)).decode()


@pytest.fixture(scope="module")
def storage() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with own_server(is_durable=False) as server:
        with Redis.from_url(server.url) as redis:
            redis.config_set("requirepass", STORE)
        yield server.url.replace("redis://", f"redis://:{STORE}@")


def with_password(url: str, password: str) -> str:
    scheme, _, rest = url.partition("://")
    user, _, place = rest.partition("@") if "@" in rest else ("me", "", rest)
    return f"{scheme}://{user}:{password}@{place}"


def problem(url: str, key: str) -> str:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as answer:
        return answer.read().decode() + str(answer.headers)


def test_a_hub_with_every_kind_of_secret_at_the_most_talkative_level_tells_none(
    store: str, storage: S3Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    env = {
        "COMFYFLEET_DATA": str(tmp_path / "data"),
        "COMFYFLEET_PORT": "0",
        "COMFYFLEET_STORE": store,
        "COMFYFLEET_ASSETS": f"s3://{storage.bucket.name}/secrets",
        "COMFYFLEET_S3_ENDPOINT": storage.bucket.endpoint,
        "COMFYFLEET_S3_REGION": storage.bucket.region,
        "COMFYFLEET_S3_ACCESS_KEY": CREDENTIALS.access_key,
        "COMFYFLEET_S3_SECRET_KEY": CREDENTIALS.secret_key,
        "COMFYFLEET_ENCRYPTION_KEYS": f"k1={MASTER}",
        "COMFYFLEET_CONFIG": str(tmp_path / "comfyfleet.toml"),
        "COMFYFLEET_WEBHOOK_ALLOW": "127.0.0.1",
        "COMFYFLEET_LOG_LEVEL": "debug",
        "COMFYFLEET_LOG_FORMAT": "json",
    }
    database = with_password(tenant_schema(request.config), DATABASE)
    (tmp_path / "comfyfleet.toml").write_text(f'[databases]\neast = "{database}"\n')
    workflow = written(tmp_path / "workflow.json", picture_workflow())
    said: list[str] = []

    def run(*arguments: str | Path, **more: str) -> str:
        ended = run_cli(*arguments, cwd=tmp_path, env={**env, **more})
        said.append(ended.stderr)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    with fake_servers("--time-scale", "0.02") as (server,), ExitStack() as stack:
        near = with_password(server, SERVER)
        hub = stack.enter_context(started(*CLI, "--debug", "up", "--server", near, "--name", "gpu", env=env))
        greeting = read_until(hub, lambda line: line.endswith(": online"))
        url = greeting[0].split()[-1]
        # Told once, to whoever starts it, makes it or asks for it: these are no leaks.
        owner = json.loads((tmp_path / "data" / "hub.json").read_text())["key"]
        run("tenant", "create", "acme", "--database", "east")
        tenant = run("key", "create", "tenant", "--tenant", "acme")
        enrolment = run("key", "invite")
        signing = run("webhook", "secret")
        wrong = owner[:-8] + "deadbeef"
        said += [problem(f"{url}/api/jobs", wrong), problem(f"{url}/api/keys", tenant)]
        said.append(problem(f"{url}/?token={wrong}", wrong))
        hook = f"http://127.0.0.1:1/told?token={HOOK}"
        run("submit", workflow, "--watch", "--webhook", hook, COMFYFLEET_KEY=tenant)
        run("webhook", "add", hook)
        said += [run("config", "show"), run("config", "show", "--json"), run("config", "check")]
        said += [run("audit", "list", "--json"), run("audit", "list", "--jobs", "--json")]
        said += [run("jobs", "--json"), run("tenant", "list", "--json"), run("webhook", "list", "--json")]
        said.append(run("webhook", "deliveries", "--json", COMFYFLEET_KEY=tenant))
        hub.terminate()
        output, errors = hub.communicate(timeout=60)
    told = "\n".join([*greeting, *said, output, errors])
    hidden = {
        "store": STORE,
        "database": DATABASE,
        "server": SERVER,
        "hook": HOOK,
        "storage": CREDENTIALS.secret_key,
        "master key": MASTER,
        "admin key": owner.rpartition("_")[2],
        "tenant's key": tenant.rpartition("_")[2],
        "enrolment": enrolment.rpartition("_")[2],
        "signing": signing.removeprefix("whsec_"),
        "guess": wrong,
        "signature": "X-Amz-Signature",
    }
    assert {name for name, secret in hidden.items() if secret in told} == set()
    assert all(len(secret) > 8 for secret in hidden.values())
    # They did say a lot, and whose key it was.
    assert len(errors.splitlines()) > 15
    for word in (owner.split("_")[1], tenant.split("_")[1], "/api/webhook-secret", "gpu", "401"):
        assert word in errors


@pytest.mark.parametrize(
    "store",
    [
        "redis://:{}@127.0.0.1:1/0",
        "redis://user:{}@127.0.0.1:no-port/0",
        "rediss://:{}@127.0.0.1:1",
        "postgresql://me:{}@127.0.0.1:1/fleet",
        "postgresql://127.0.0.1:1/fleet?user=me&password={}",
        "postgresql://me:{}@127.0.0.1:no-port/fleet",
        "postgresql://me:{}@127.0.0.1:1/fleet?no_such_option=1",
        "mysql://me:{}@127.0.0.1/fleet",
        "sqlite://me:{}@host/fleet.db",
    ],
)
async def test_a_store_that_cannot_be_had_is_told_without_its_password(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "pw-" + secrets.token_hex(8)
    environment = {
        "COMFYFLEET_DATA": str(tmp_path),
        "COMFYFLEET_STORE": store.format(secret),
        "COMFYFLEET_PORT": "0",
    }
    told = ""
    with caplog.at_level(logging.DEBUG):
        try:
            # Some go on trying; what they have said by then is enough.
            async with asyncio.timeout(1.5):
                async with run_hub(read_settings(config=os.devnull, environment=environment)):
                    pass
        except Exception as error:
            # As `--debug` shows it.
            told = "".join(traceback.format_exception(error))
    assert told, "there is no such store"
    printed = capfd.readouterr()
    assert secret not in told + caplog.text + printed.out + printed.err
