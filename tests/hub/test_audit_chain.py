"""The audit log as a chain: right under several hubs at once; who changes, removes, swaps or cuts is found out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.system import SystemClock, SystemRandom
from comfyfleet.hub.audit.log import BEGUN, COLLECTIONS, KEEP_S, AuditLog, Kind
from comfyfleet.model.access import AuditEntry, Role
from comfyfleet.model.errors import Fault
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.stores.factory import open_store
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.testing.time import ManualClock
from comfyfleet.wire import keys as wire
from comfyfleet.wire.keys import BEGINNING, FORGET, AuditVerifier, note

ENTRY = AuditEntry(0.0, "key", Role.ADMIN, "pause_queue")
JOBS: Kind = "jobs"


async def nothing() -> None:
    """Done without a trace."""


async def change(audit: AuditLog, target: str) -> None:
    await audit.job_change(ENTRY, nothing, lambda _: target)


async def listed(audit: AuditLog, kind: Kind = JOBS) -> list[dict[str, Any]]:
    """As a client gets it: JSON, page by page."""
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page, cursor = await audit.page(kind, cursor, 7)
        views = [wire.entry_view(e.entry, e.id, e.number, e.previous, e.hash) for e in page]
        found += msgspec.json.decode(msgspec.json.encode(views))
    return found


async def verified(audit: AuditLog, kind: Kind = JOBS, noted: str | None = None) -> AuditVerifier:
    verifier = AuditVerifier(noted)
    for entry in await listed(audit, kind):
        verifier.take(entry)
    verifier.end()
    return verifier


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis", "postgres"])
async def test_hubs_that_write_at_once_make_one_chain_and_lose_nothing(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    clock = SystemClock()
    match kind:
        case "postgres":
            stores: list[Any] = [PostgresStore(emptied_database(request.config)) for _ in range(3)]
        case "redis":
            url = with_prefix(request.getfixturevalue("redis_url"))
            stores = [open_store(url, clock) for _ in range(3)]
        case _:
            # One process owns such a store; its hubs would be several on one cabinet.
            stores = [open_store("memory:" if kind == "memory" else f"sqlite:///{tmp_path}/f.db", clock)]
    for store in stores:
        await store.open()
    audits = [AuditLog(stores[number % len(stores)].documents, clock, SystemRandom()) for number in range(3)]
    try:
        await asyncio.gather(
            *(change(audits[number % 3], f"job-{number}") for number in range(150)),
        )
        for number in range(6):
            await change(audits[number % 3], f"late-{number}")
        found = await listed(audits[0])
        assert [each["number"] for each in found] == list(range(1, 157))
        assert {each["target"] for each in found[:150]} == {f"job-{number}" for number in range(150)}
        assert [each["target"] for each in found[150:]] == [f"late-{number}" for number in range(6)]
        assert (await verified(audits[1])).problems == []
        later = AuditLog(stores[0].documents, clock, SystemRandom())
        await change(later, "after a restart")
        whole = await verified(later)
        assert (whole.problems, whole.entries) == ([], 157)
    finally:
        for store in stores:
            await store.close()


class Log:
    """A log of 24 entries in groups of one, and hands that may spoil it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.documents = MemoryDocumentStore()
        self.audit = AuditLog(self.documents, self.clock, SystemRandom())

    async def fill(self, number: int = 24) -> str:
        for each in range(number):
            await self.clock.advance(60)
            await change(self.audit, f"job-{each}")
        return (await verified(self.audit)).head

    async def names(self) -> list[str]:
        return [each.name for each in await self.documents.listing(COLLECTIONS[JOBS], limit=1000)]

    async def body(self, name: str) -> bytes:
        document = await self.documents.get(COLLECTIONS[JOBS], name)
        assert document is not None
        return document.body

    async def put(self, name: str, body: bytes) -> None:
        await self.documents.put(COLLECTIONS[JOBS], name, body, version=None)

    async def remove(self, name: str) -> None:
        assert await self.documents.remove(COLLECTIONS[JOBS], name)


async def test_a_whole_log_is_whole_and_tells_its_head() -> None:
    log = Log()
    head = await log.fill()
    whole = await verified(log.audit, noted=head)
    assert (whole.problems, whole.entries) == ([], 24)
    assert head.startswith("24:")
    assert (await verified(log.audit, noted=note(0, BEGINNING))).problems == []
    empty = await verified(log.audit, "operations")
    assert (empty.problems, empty.head) == ([], note(0, BEGINNING))


@pytest.mark.parametrize("place", [0, 11, 23])
async def test_an_entry_that_was_changed_is_found(place: int) -> None:
    log = Log()
    await log.fill()
    name = (await log.names())[place]
    await log.put(name, (await log.body(name)).replace(b"pause_queue", b"pause_quere"))
    problems = (await verified(log.audit)).problems
    assert any(f"entry {place + 1} " in each and "was changed" in each for each in problems)


@pytest.mark.parametrize("place", [0, 11, 22])
async def test_an_entry_that_was_removed_is_missed(place: int) -> None:
    log = Log()
    await log.fill()
    await log.remove((await log.names())[place])
    (problem,) = (await verified(log.audit)).problems
    assert (
        "is missing entries up to 1," if place == 0 else f"entries {place + 1} to {place + 1} of"
    ) in problem


async def test_entries_that_were_swapped_are_found() -> None:
    log = Log()
    await log.fill()
    one, two = (await log.names())[10:12]
    first, second = await log.body(one), await log.body(two)
    await log.put(one, second)
    await log.put(two, first)
    assert len((await verified(log.audit)).problems) >= 2


async def test_an_end_that_was_cut_off_is_found_by_who_noted_it_also_after_the_log_went_on() -> None:
    log = Log()
    head = await log.fill()
    for name in (await log.names())[-3:]:
        await log.remove(name)
    assert (await verified(log.audit)).problems == [], "nothing in the log itself can tell"
    (problem,) = (await verified(log.audit, noted=head)).problems
    assert "does not contain the noted entry 24" in problem
    # A hub that was there goes on where it was, and leaves the gap to be seen; one that is new does not know.
    await change(log.audit, "later")
    assert "entries 22 to 24 of" in (await verified(log.audit)).problems[0]
    await log.remove((await log.names())[-1])
    log.audit = AuditLog(log.documents, log.clock, SystemRandom())
    for number in range(5):
        await change(log.audit, f"other-{number}")
    assert (await verified(log.audit)).problems == []
    assert len((await verified(log.audit, noted=head)).problems) == 1


async def test_a_log_that_was_written_anew_from_some_entry_on_is_found_by_an_older_note() -> None:
    log = Log()
    early = await log.fill(10)
    head = await log.fill(5)
    for name in (await log.names())[8:]:
        await log.remove(name)
    log.audit = AuditLog(log.documents, log.clock, SystemRandom())
    await log.fill(7)
    assert (await verified(log.audit)).problems == []
    for noted in (early, head):
        assert len((await verified(log.audit, noted=noted)).problems) == 1


async def test_what_is_forgotten_in_time_leaves_a_log_that_still_holds() -> None:
    log = Log()
    early = await log.fill(10)
    await log.clock.advance(KEEP_S[JOBS] / 2)
    middle = await log.fill(10)
    await log.clock.advance(KEEP_S[JOBS] / 2 + 13 * 3600)
    await log.audit.clean_up()
    found = await listed(log.audit)
    assert [each["number"] for each in found] == list(range(11, 22))
    assert (found[-1]["action"], found[-1]["target"]) == (FORGET, early)
    for noted in (early, middle):
        assert (await verified(log.audit, noted=noted)).problems == []
    # The entry that tells of it is part of the chain: without it, a beginning that is missing has no excuse.
    names = await log.names()
    await log.remove(names[-1])
    assert "is missing entries up to 10," in (await verified(log.audit)).problems[0]


async def test_a_forgetting_that_was_interrupted_is_no_tampering() -> None:
    log = Log()
    await log.fill(10)
    await log.clock.advance(KEEP_S[JOBS] + 13 * 3600)
    remove, calls = log.documents.remove, 0

    async def dies(collection: str, name: str) -> bool:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise Fault("the disk is gone")
        return await remove(collection, name)

    log.documents.remove = dies  # type: ignore[method-assign]
    with pytest.raises(Fault):
        await log.audit.clean_up()
    log.documents.remove = remove  # type: ignore[method-assign]
    assert [each["number"] for each in await listed(log.audit)] == list(range(5, 12))
    assert (await verified(log.audit)).problems == []
    await log.audit.clean_up()
    assert [each["action"] for each in await listed(log.audit)] == [FORGET, FORGET]
    assert (await verified(log.audit)).problems == []


async def test_a_hub_that_was_idle_while_others_wrote_and_forgot_does_not_fork_the_log() -> None:
    log = Log()
    await log.fill(3)
    idle, log.audit = log.audit, AuditLog(log.documents, log.clock, SystemRandom())
    await log.fill(5)
    await log.clock.advance(KEEP_S[JOBS] + 13 * 3600)
    await log.audit.clean_up()
    await change(idle, "back again")
    assert [each["number"] for each in await listed(log.audit)] == [9, 10]
    assert (await verified(log.audit)).problems == []


async def test_an_operation_whose_hub_died_gets_an_entry_without_an_outcome_once() -> None:
    clock, documents = ManualClock(), MemoryDocumentStore()

    def audit() -> AuditLog:
        return AuditLog(documents, clock, SystemRandom())

    dead, alive, other = audit(), audit(), audit()
    hangs = asyncio.ensure_future(dead.operation(ENTRY, asyncio.Event().wait, lambda _: None))
    await clock.advance(1)
    await alive.operation(ENTRY, nothing, lambda _: "mine")
    await clock.advance(60)
    await alive.clean_up()
    assert [each["outcome"] for each in await listed(alive, "operations")] == ["done"]
    await clock.advance(61)
    await asyncio.gather(alive.clean_up(), other.clean_up())
    found = await listed(alive, "operations")
    assert [each.get("outcome", "") for each in found] == ["done", ""]
    assert await documents.listing(BEGUN) == []
    assert (await verified(alive, "operations")).problems == []
    hangs.cancel()
    await asyncio.gather(hangs, return_exceptions=True)


async def test_an_end_that_was_noted_is_not_noted_again_when_its_beginning_stayed() -> None:
    clock, documents = ManualClock(), MemoryDocumentStore()
    audit = AuditLog(documents, clock, SystemRandom())
    remove = documents.remove

    async def away(collection: str, name: str) -> bool:
        raise Fault("not now")

    documents.remove = away  # type: ignore[method-assign]
    await audit.operation(ENTRY, nothing, lambda _: "made")
    await clock.settle()
    documents.remove = remove  # type: ignore[method-assign]
    assert len(await documents.listing(BEGUN)) == 1
    await clock.advance(121)
    await audit.clean_up()
    assert await documents.listing(BEGUN) == []
    assert [each["target"] for each in await listed(audit, "operations")] == ["made"]


@pytest.mark.parametrize("number", [1, 2, 3, 10, 33, 64, 100])
async def test_the_place_of_a_time_and_the_end_are_found_however_long_the_log_is(number: int) -> None:
    log = Log()
    times = []
    for each in range(number):
        await log.clock.advance(60)
        times.append(log.clock.now())
        # Groups of several sizes.
        await asyncio.gather(*(change(log.audit, f"job-{each}-{n}") for n in range(1 + each % 4)))
    for each, at in enumerate(times):
        page, _ = await log.audit.page(JOBS, "", 1, since=at)
        assert page[0].entry.target == f"job-{each}-0"
    assert (await log.audit.page(JOBS, "", 9, since=times[-1] + 1))[0] == []
    fresh = AuditLog(log.documents, log.clock, SystemRandom())
    await change(fresh, "next")
    assert (await verified(fresh)).problems == []


def moved(clock: Clock, documents: DocumentStore) -> Callable[[], AuditLog]:
    return lambda: AuditLog(documents, clock, SystemRandom())


async def test_the_log_of_another_store_lies_beside_the_own_one_after_a_move() -> None:
    one, two = Log(), Log()
    await one.fill(5)
    await two.fill(4)
    # As a move does it: what has the name at the target stays.
    for collection in await one.documents.collections():
        for document in await one.documents.listing(collection):
            await two.documents.put(collection, document.name, document.body, version=0)
    await change(two.audit, "goes on")
    whole = await verified(moved(two.clock, two.documents)())
    assert (whole.problems, whole.entries) == ([], 10)
