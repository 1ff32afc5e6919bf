"""Hubs are killed while tenants submit, pay, download, are moved from database to database, and are deleted.

Jobs are encrypted, files lie in an S3 storage, tenants' jobs and credits in databases of their own. When all is quiet,
every job of a tenant that was not deleted has been downloaded as its caller submitted it, every account is what was
granted less what completed, and nothing of any job can be read in store and databases.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from tests.servers.postgres_server import PostgresServer
from tests.servers.redis_server import RedisServer
from tests.servers.s3_server import CREDENTIALS, S3Server
from tests.stores._at_rest import in_files, in_postgres, in_redis

from chaos.content import Cast, Painter, Teller, Witness, graph_of
from chaos.content_checker import Asked, Compared, Got, compare
from chaos.hub_loop import HUB_RULES
from chaos.made import file_made_from, made_from
from chaos.programs import HubProgram, settings_of
from chaos.watchers import FINAL
from comfyfleet.client.client import FleetClient
from comfyfleet.model.errors import ComfyFleetError, Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.ledger import FlatPrice
from comfyfleet.worker.agent import Agent, AgentSettings

PRICE, GRANTED = 3, 1_000_000
_PATIENCE_S = 120.0
_QUIET_WITHIN_S = 60.0
_FILED_EVERY = 5
_POLL_S = 1.0
_AGENT = AgentSettings(slots=4, poll_wait_s=5.0, command_wait_s=5.0, backoff_base_s=0.05, backoff_cap_s=0.5)
_GONE = frozenset(
    {RefusalCode.UNAUTHENTICATED, RefusalCode.NOT_ALLOWED, RefusalCode.NOT_FOUND, RefusalCode.WRONG_PHASE}
)


class Size(msgspec.Struct, frozen=True):
    jobs: int
    kills: int
    moves: int
    deletions: int
    tenants: int = 12
    callers: int = 2
    """Of each tenant."""
    agents: int = 2
    """At each of two hubs."""


class Settled(msgspec.Struct, frozen=True):
    compared: Compared
    kills: int
    moves: int
    deletions: int
    wrong: tuple[str, ...] = ()


def run(size: Size, seed: int, tell: Teller) -> Settled:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        redis, postgres = RedisServer(), PostgresServer()
        for server in (redis, postgres):
            stack.callback(server.stop)
            server.start()
        databases = _databases(postgres, folder)
        env = {
            **settings_of("rules", HUB_RULES),
            **stack.enter_context(_storage()),
            "COMFYFLEET_DATABASES": " ".join(f"{name}={url}" for name, url in databases.items()),
            "COMFYFLEET_ENCRYPTION_KEYS": f"k1={base64.b64encode(os.urandom(32)).decode()}",
        }
        hubs = [HubProgram(folder / f"hub-{number}", env, redis.url) for number in range(2)]
        for hub in hubs:
            stack.callback(hub.kill)
            hub.start()
        play = _Play(size, hubs, list(databases), random.Random(seed), tell)
        settled = asyncio.run(play.run())
        readable = asyncio.run(_readable(play, redis.url, databases, folder / "databases"))
        return msgspec.structs.replace(settled, wrong=settled.wrong + readable)


def _databases(server: PostgresServer, folder: Path) -> dict[str, str]:
    (folder / "databases").mkdir()
    urls = {"file": f"sqlite:///{folder / 'databases' / 'tenants.db'}"}
    with psycopg.connect(server.url, autocommit=True) as connection:
        for name in ("one", "two"):
            connection.execute(f"CREATE DATABASE {name}".encode())
            urls[name] = f"{server.url.rpartition('/')[0]}/{name}"
    return urls


@contextmanager
def _storage() -> Iterator[dict[str, str]]:
    server = S3Server().start()
    try:
        yield {
            "COMFYFLEET_ASSETS": f"s3://{server.bucket.name}/chaos",
            "COMFYFLEET_S3_ENDPOINT": server.bucket.endpoint,
            "COMFYFLEET_S3_REGION": server.bucket.region,
            "COMFYFLEET_S3_ACCESS_KEY": CREDENTIALS.access_key,
            "COMFYFLEET_S3_SECRET_KEY": CREDENTIALS.secret_key,
        }
    finally:
        server.stop()


class _Play:
    def __init__(
        self, size: Size, hubs: list[HubProgram], databases: list[str], rng: random.Random, tell: Teller
    ) -> None:
        self.cast = Cast()
        self.nonces: list[str] = []
        self._size = size
        self._hubs = hubs
        self._databases = databases
        self._chance = rng
        self._tell = tell
        self._finished = 0
        self._submitted = 0
        self._tenants = [f"tenant-{number}" for number in range(size.tenants)]
        self._doomed = set(self._tenants[: size.deletions])
        self._gone: set[str] = set()
        """Deleted, or about to be."""
        self._completed: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._done = Counter[str]()

    async def run(self) -> Settled:
        async with AsyncExitStack() as stack:
            owners = [
                await stack.enter_async_context(FleetClient(hub.url, hub.key, patience_s=_PATIENCE_S))
                for hub in self._hubs
            ]
            clients: dict[str, list[FleetClient]] = {}
            for number, tenant in enumerate(self._tenants):
                database = self._databases[number % len(self._databases)]
                await owners[0].create_tenant(tenant, database=database, price=FlatPrice(PRICE))
                await owners[0].grant_credits(tenant, GRANTED, grant_id="first")
                key = (await owners[0].create_key("tenant", tenant=tenant)).key
                clients[tenant] = [
                    await stack.enter_async_context(FleetClient(hub.url, key, patience_s=_PATIENCE_S))
                    for hub in self._hubs
                ]
            for number, hub in enumerate(self._hubs):
                for place in range(self._size.agents):
                    api = await stack.enter_async_context(Witness(hub, number, self.cast))
                    name = WorkerId(f"gpu-{number}-{place}")
                    await stack.enter_async_context(Agent(api, name, [Painter()], _AGENT))
            callers = asyncio.ensure_future(self._call_all(clients))
            stack.callback(callers.cancel)
            await self._disturb(callers, owners[0])
            await callers
            await self._audit(owners[0])
        asked = [each for each in self.cast.asked if each.tenant not in self._doomed]
        theirs = {each.job for each in self.cast.asked if each.tenant in self._doomed}
        whole = compare(self.cast.asked, self.cast.leased, self.cast.got)
        living = compare(
            asked,
            [each for each in self.cast.leased if each.job not in theirs],
            [each for each in self.cast.got if each.job not in theirs],
        )
        # A deleted tenant's jobs may be gone; what was downloaded of them was still its own.
        compared = msgspec.structs.replace(
            living, mixed=whole.mixed, across_tenants=whole.across_tenants, foreign=whole.foreign
        )
        wrong = (*living.wrong, *self._wrong)
        return Settled(compared, self._done["kill"], self._done["move"], self._done["deletion"], wrong[:20])

    # callers

    async def _call_all(self, clients: Mapping[str, list[FleetClient]]) -> None:
        async with asyncio.TaskGroup() as group:
            for tenant, at in clients.items():
                for _ in range(self._size.callers):
                    group.create_task(self._call(tenant, at))

    async def _call(self, tenant: str, at: list[FleetClient]) -> None:
        while self._submitted < self._size.jobs:
            self._submitted += 1
            graph = graph_of(self._submitted, _FILED_EVERY)
            self.nonces.append(graph["1"]["inputs"]["nonce"])
            try:
                job = (await self._chance.choice(at).submit(graph)).id
                self.cast.asked.append(Asked(job, tenant, made_from(graph)))
                await self._download(tenant, at, job, graph)
            except Refusal as refusal:
                if tenant in self._gone and refusal.code in _GONE:
                    return
                self._wrong.append(f"{tenant} was refused: {refusal}")
                return
            except (ComfyFleetError, TimeoutError) as error:
                if tenant in self._gone:
                    return
                self._wrong.append(f"{tenant} was not served: {error!r}")
                return

    async def _download(self, tenant: str, at: list[FleetClient], job: str, graph: dict[str, Any]) -> None:
        if not await self._has_ended(tenant, at, job):
            return
        answer = await self._chance.choice(at).result(job)
        result = answer.result
        made = f"nothing, it is {answer.status}"
        if result is not None:
            made = str(result.outputs.get("1", {}).get("made", [made])[0])
        if graph["1"]["inputs"]["leaves_file"]:
            client = self._chance.choice(at)
            content = [await client.fetch(file) for file in (() if result is None else result.files)]
            is_own = content == [file_made_from(graph)]
            self.cast.got.append(
                Got(job, "file", made_from(graph) if is_own else f"something else: {content!r:.80}")
            )
        self.cast.got.append(Got(job, "result", made))
        self._completed[tenant] += 1
        self._finished += 1

    async def _has_ended(self, tenant: str, at: list[FleetClient], job: str) -> bool:
        """False: its tenant goes, and the job with it."""
        ended = asyncio.ensure_future(self.cast.end_of(job))
        try:
            while tenant not in self._gone:
                await asyncio.wait({ended}, timeout=_POLL_S)
                if ended.done():
                    return True
                # Its worker may have been told nothing: the hub was killed between the end and the answer.
                if (await self._chance.choice(at).result(job)).status in FINAL:
                    return True
            return False
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    # what happens to them

    async def _disturb(self, callers: asyncio.Future[None], owner: FleetClient) -> None:
        """The moments are places in the row of finished jobs; the last tenth runs in peace."""
        size = self._size
        acts = ["kill"] * size.kills + ["move"] * size.moves + ["deletion"] * size.deletions
        self._chance.shuffle(acts)
        places = sorted(self._chance.uniform(0.05, 0.85) * size.jobs for _ in acts)
        doomed = sorted(self._doomed)
        async with asyncio.TaskGroup() as group:
            for act, place in zip(acts, places, strict=True):
                while self._finished < place and not callers.done():
                    await asyncio.wait({callers}, timeout=0.05)
                self._tell(f"{self._finished} of {size.jobs} jobs: {act}")
                match act:
                    case "kill":
                        await self._kill(self._chance.choice(self._hubs))
                    case "move":
                        living = [each for each in self._tenants if each not in self._doomed]
                        group.create_task(self._move(owner, self._chance.choice(living)))
                    case "deletion":
                        group.create_task(self._delete(owner, doomed.pop()))

    async def _kill(self, hub: HubProgram) -> None:
        await asyncio.to_thread(hub.kill)
        await asyncio.sleep(self._chance.uniform(0.0, 1.0))
        await asyncio.to_thread(hub.start)
        self._done["kill"] += 1

    async def _move(self, owner: FleetClient, tenant: str) -> None:
        database = self._chance.choice(self._databases)
        try:
            await owner.move_tenant(tenant, database)
        except Refusal as refusal:
            # Another move of it goes on, or it lies there already.
            if refusal.code not in (RefusalCode.WRONG_PHASE, RefusalCode.INVALID_REQUEST):
                self._wrong.append(f"{tenant} could not be moved: {refusal}")
                return
        self._done["move"] += 1

    async def _delete(self, owner: FleetClient, tenant: str) -> None:
        self._gone.add(tenant)
        with contextlib.suppress(Refusal):
            # Asked again after a lost answer, it may be gone by then.
            await owner.delete_tenant(tenant, confirm=tenant)
        self._done["deletion"] += 1

    # when all is quiet

    async def _audit(self, owner: FleetClient) -> None:
        self._tell("all is quiet: the books are read")
        deadline = asyncio.get_running_loop().time() + _QUIET_WITHIN_S
        while True:
            wrong = await self._unsettled(owner)
            if not wrong or asyncio.get_running_loop().time() > deadline:
                self._wrong += wrong
                return
            await asyncio.sleep(0.5)

    async def _unsettled(self, owner: FleetClient) -> list[str]:
        wrong: list[str] = []
        living = [each for each in self._tenants if each not in self._doomed]
        known = {each.id: each.state.value for each in (await owner.tenants()).tenants}
        for tenant in sorted(self._doomed & known.keys()):
            if known[tenant] != "deleted":
                wrong.append(f"{tenant} was deleted and is {known[tenant]}")
        for tenant in living:
            account = await owner.balance(tenant)
            wrong += account_problems(tenant, account.balance, account.held, self._completed[tenant])
        wrong += [f"the reconciler finds {each}" for each in (await owner.differences()).findings]
        return wrong


async def _readable(play: _Play, store: str, databases: Mapping[str, str], files: Path) -> tuple[str, ...]:
    """What of the jobs can be read by whoever has store and databases, but no key."""
    lies_there = {"the store": await in_redis(store), "the database in a file": in_files(files)}
    lies_there |= {f"database {name}": in_postgres(url) for name, url in databases.items() if name != "file"}
    return shown(lies_there, [*play.nonces, *(each.made for each in play.cast.asked)])


def shown(lies_there: Mapping[str, bytes], texts: Sequence[str], most: int = 5) -> tuple[str, ...]:
    wrong = [
        f"{where} shows {text} of a job"
        for where, content in lies_there.items()
        for text in texts
        if text.encode() in content
    ]
    return tuple(wrong[:most])


def account_problems(tenant: str, balance: int, held: int, completed: int) -> list[str]:
    expected = GRANTED - PRICE * completed
    if (balance, held) == (expected, 0):
        return []
    return [f"{tenant} has {balance} and {held} held, not {expected}"]
