"""Goals 1 and 2: a lease costs the same whatever waits, and what fits is found behind whatever does not.

Each axis is varied alone. The goal is on a look at the first job and its lease; what an engine does for one idle slot
(a look at a window of lanes, then a lease) is reported beside it.
"""

from __future__ import annotations

import itertools
from typing import Any

from bench._measure import (
    Case,
    Entry,
    Plan,
    clear_memory,
    entry,
    in_microseconds,
    in_turn,
    ratio,
    ratio_range,
    rounded,
    settle_memory,
)
from bench._places import Place
from bench._releases import GROUPS, WORKERS, fleet_of, workflow_of
from bench._store import PROFILE, StoreRig, lane
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkflowHash
from comfyfleet.model.job import Submission


async def flat_leases(plan: Plan, kind: str) -> list[Entry]:
    entries = []
    for part in (_backlog, _classes, _misfits, _blocked, _lanes_of_a_tenant, releases_in_a_fleet):
        async with Place(kind) as place:
            entries.append(await part(plan, place))
    return entries


async def _backlog(plan: Plan, place: Place) -> Entry:
    async def rig(jobs: int) -> StoreRig:
        made = await place.rig()
        await made.add_profiles(PROFILE)
        await made.fill([lane(await made.add_class(f"class {number}")) for number in range(10)], jobs)
        return made

    waiting = 1_000_000 if place.kind in ("memory", "sqlite") else 300_000
    few, many = await rig(100), await rig(plan.size(waiting))
    name = f"lease at {waiting:,} waiting / at 100"
    return await _compare(plan, place, "1a", name, "<= 1.3", few, many, waiting=[100, plan.size(waiting)])


async def _classes(plan: Plan, place: Place) -> Entry:
    async def rig(classes: int) -> StoreRig:
        made = await place.rig()
        await made.add_profiles(PROFILE)
        lanes = []
        for number in range(classes):
            lanes.append(lane(await made.add_class(f"class {number}")))
            # At once: of the classes without a job only the newest are kept.
            await made.enqueue(lanes[-1])
        await made.fill(lanes, plan.size(50_000) - classes)
        return made

    few, many = await rig(10), await rig(plan.size(10_000))
    return await _compare(plan, place, "1b", "lease at 10,000 classes / at 10", "<= 1.5", few, many)


async def _misfits(plan: Plan, place: Place) -> Entry:
    async def rig(misfits: int) -> StoreRig:
        made = await place.rig()
        await made.add_profiles(PROFILE)
        if misfits:
            await made.fill([lane(await made.add_class(f"misfit {n}", ())) for n in range(100)], misfits)
        await made.fill([lane(await made.add_class(f"class {number}")) for number in range(10)], 1000)
        return made

    none, many = await rig(0), await rig(plan.size(10_000))
    return await _compare(
        plan, place, "1c", "lease behind 10,000 misfits / behind none", "<= 1.5", none, many
    )


async def _blocked(plan: Plan, place: Place) -> Entry:
    """Against a worker that has no block at all."""

    async def rig(blocked: int) -> StoreRig:
        made = await place.rig()
        await made.add_profiles(PROFILE)
        classes = [await made.add_class(f"class {number}") for number in range(10)]
        if blocked:
            await made.block(WorkflowHash("blocked"))
            await made.fill([lane(classes[0], "blocked")], blocked)
        await made.fill([lane(key) for key in classes], 1000)
        return made

    none, many = await rig(0), await rig(plan.size(10_000))
    return await _compare(
        plan, place, "1d", "lease behind 10,000 blocked jobs of one hash / behind none", "<= 1.5", none, many
    )


async def _lanes_of_a_tenant(plan: Plan, place: Place) -> Entry:
    """Every lease moves its tenant's virtual time. The tenant with many lanes is charged so little that about half of
    all leases are its own: charged like the others it would be seen in one of fifty."""

    async def rig(lanes: int) -> StoreRig:
        made = await place.rig()
        await made.add_profiles(PROFILE)
        first = await made.add_class("class 0")
        await made.fill([lane(first, f"workflow {number}") for number in range(lanes)], plan.size(10_000))
        for number in range(1, 50):
            key = await made.add_class(f"class {number}")
            await made.fill([lane(key, tenant=TenantId(f"tenant {number}"))], 200)
        return made

    one, many = await rig(1), await rig(plan.size(10_000))
    return await _compare(
        plan,
        place,
        "1e",
        "lease with 10,000 lanes of one tenant among 50 / with one lane",
        "<= 1.5",
        one,
        many,
        charges={DEFAULT_TENANT: 1 / 50},
    )


async def releases_in_a_fleet(plan: Plan, place: Place) -> Entry:
    """Workers take turns, so that every group leases; each finds jobs for all releases and for its own alone."""
    batches = plan.repeats(place.batches(150))

    async def case(groups: int) -> Case:
        rig = await place.rig()
        engine = await fleet_of(rig.store, groups)
        for number in range(plan.size(1_000)):
            release = None if number % 2 else number // 2 % groups
            await engine.submit(Submission(workflow_of(release, number)))
        workers = [(worker.worker_id, worker.profile) for worker in await engine.workers()]
        turns = itertools.cycle(workers)

        async def measure() -> float:
            return (await rig.seconds_a_lease(batches=batches, takers=turns))[0]

        return measure

    cases = {"one": await case(1), "many": await case(GROUPS)}
    settle_memory()
    await in_turn(cases, 1)
    times = await in_turn(cases, plan.rounds)
    clear_memory()
    return entry(
        "1f",
        place.kind,
        f"lease with {WORKERS} workers in {GROUPS} signature groups / in one",
        ratio(times["many"], times["one"]),
        None if place.kind == "postgres" else "<= 1.5",
        "ratio",
        time=place.time,
        range=ratio_range(times["many"], times["one"]),
        lease_next_us=[in_microseconds(times["one"]), in_microseconds(times["many"])],
    )


async def _compare(
    plan: Plan,
    place: Place,
    goal: str,
    name: str,
    bound: str,
    base: StoreRig,
    loaded: StoreRig,
    charges: dict[TenantId, float] | None = None,
    **details: Any,
) -> Entry:
    settle_memory()
    batches = plan.repeats(place.batches(150))
    walls: dict[str, list[float]] = {}

    def case(label: str, rig: StoreRig, as_engine: bool) -> Case:
        async def measure() -> float:
            spent, on_the_wall = await rig.seconds_a_lease(
                as_engine=as_engine, batches=batches, charges=charges
            )
            walls.setdefault(label, []).append(on_the_wall)
            return spent

        return measure

    cases = {
        label: case(label, rig, label.startswith("engine"))
        for label, rig in (
            ("base", base),
            ("loaded", loaded),
            ("engine base", base),
            ("engine loaded", loaded),
        )
    }
    await in_turn(cases, 1)
    walls.clear()
    times = await in_turn(cases, plan.rounds)
    clear_memory()
    # Of PostgreSQL only the backlog part is asked; the rest is reported.
    is_asked = place.kind != "postgres" or goal == "1a"
    return entry(
        goal,
        place.kind,
        name,
        ratio(times["loaded"], times["base"]),
        bound if is_asked else None,
        "ratio",
        time=place.time,
        range=ratio_range(times["loaded"], times["base"]),
        lease_next_us=[in_microseconds(times["base"]), in_microseconds(times["loaded"])],
        lease_next_wall_us=[in_microseconds(walls["base"]), in_microseconds(walls["loaded"])],
        peek_and_lease_ratio=rounded(ratio(times["engine loaded"], times["engine base"])),
        peek_and_lease_us=[in_microseconds(times["engine base"]), in_microseconds(times["engine loaded"])],
        **details,
    )


async def behind_misfits(plan: Plan, kind: str) -> list[Entry]:
    misfits = plan.size(100_000)
    async with Place(kind) as place:
        rig = await place.rig()
        await rig.add_profiles(PROFILE)
        await rig.fill([lane(await rig.add_class(f"misfit {number}", ())) for number in range(100)], misfits)
        fitting = lane(await rig.add_class("fitting"))
        settle_memory()
        tries, times = [], []
        for _ in range(plan.repeats(100)):
            arrived = await rig.enqueue(fitting)
            offer, started, number = rig.offer(), rig.spent_s(), 1
            while (leased := await rig.lease_next(offer)) is None and number < 10:
                number += 1
            times.append(rig.spent_s() - started)
            is_right = leased is not None and leased.dispatch.job_id == arrived.dispatch.job_id
            tries.append(number if is_right else 10)
            if leased is not None:
                await rig.finish(leased)
        clear_memory()
    return [
        entry(
            "2",
            kind,
            "tries until a fitting job behind 100,000 misfits is leased",
            max(tries),
            "<= 1",
            "tries",
            time=place.time,
            misfits=misfits,
            lease_us=in_microseconds(times),
        )
    ]
