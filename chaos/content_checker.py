"""Compares what leases carried and what callers downloaded with what those callers submitted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Asked(msgspec.Struct, frozen=True):
    """A job that was acknowledged, and what must be made of it."""

    job: str
    tenant: str
    made: str


class Leased(msgspec.Struct, frozen=True):
    """A lease as its worker got it, and what is made from the graph in it."""

    job: str
    made: str


class Got(msgspec.Struct, frozen=True):
    """What a caller downloaded of its job, by its name: the result, and each file that the run left."""

    job: str
    name: str
    made: str


class Compared(msgspec.Struct, frozen=True):
    jobs: int = 0
    leases: int = 0
    mixed: int = 0
    """Leases with the payload of another job …"""
    across_tenants: int = 0
    """… of another tenant."""
    outputs: int = 0
    """Downloaded."""
    foreign: int = 0
    """Those that were made from something else than their caller submitted."""
    lost: int = 0
    """Jobs of which nothing was downloaded."""
    wrong: tuple[str, ...] = ()

    def __add__(self, other: Compared) -> Compared:
        return Compared(*(getattr(self, name) + getattr(other, name) for name in Compared.__struct_fields__))


def compare(
    asked: Sequence[Asked], leased: Sequence[Leased], got: Sequence[Got], *, wrong_at_most: int = 5
) -> Compared:
    by_job = {each.job: each for each in asked}
    maker = {each.made: each for each in asked}
    wrong: list[str] = []
    mixed = across = foreign = 0
    for lease in leased:
        own, found = by_job.get(lease.job), maker.get(lease.made)
        if own is None:
            # Its submit was never answered, so nobody can say what it should carry; whose payload it has can be said.
            is_mixed, is_across = found is not None, False
        else:
            is_mixed = lease.made != own.made
            is_across = is_mixed and found is not None and found.tenant != own.tenant
        mixed, across = mixed + is_mixed, across + is_across
        if is_mixed:
            whose = "nobody's" if found is None else f"that of {found.job} of {found.tenant}"
            wrong.append(f"the lease of {lease.job} carried another payload: {whose}")
    for each in got:
        own = by_job.get(each.job)
        if own is None or each.made != own.made:
            foreign += 1
            wrong.append(
                f"the {each.name} of {each.job} was not made from what its caller submitted: {each.made}"
            )
    lost = by_job.keys() - {each.job for each in got}
    wrong += [f"nothing could be downloaded of {job}" for job in sorted(lost)]
    return Compared(
        len(asked), len(leased), mixed, across, len(got), foreign, len(lost), tuple(wrong[:wrong_at_most])
    )
