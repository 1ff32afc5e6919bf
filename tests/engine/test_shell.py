"""Ids and secrets of a process: in form, never twice, and never those of another process. And its timers."""

from __future__ import annotations

import asyncio
import copy
import os
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from comfyfleet.engine.system import SystemClock, SystemRandom


def test_a_job_id_is_a_uuid_of_version_7_that_grows_with_time() -> None:
    chance = SystemRandom()
    ids = [chance.job_id(1_700_000_000 + number / 1000) for number in range(2000)]
    assert ids == sorted(ids)
    for number, job_id in enumerate(ids):
        parsed = uuid.UUID(job_id)
        assert str(parsed) == job_id
        assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
        assert parsed.int >> 80 == 1_700_000_000_000 + number


def test_ids_of_one_millisecond_grow_with_time_too() -> None:
    """A store that has only seen lower ids need not look whether it knows one."""
    chance = SystemRandom()
    ids = [chance.job_id(1_700_000_000 + number / 1_000_000) for number in range(5000)]
    assert ids == sorted(ids)


def test_no_id_and_no_token_comes_twice() -> None:
    chance = SystemRandom()
    ids = {chance.job_id(1.0) for _ in range(5000)}
    tokens = {chance.token() for _ in range(5000)}
    assert (len(ids), len(tokens)) == (5000, 5000)
    assert {len(token) for token in tokens} == {24}
    assert all(token.isascii() and not set(token) & set("+/=") for token in tokens)
    # Every bit that is left to chance takes both values.
    either = both = uuid.UUID(next(iter(ids))).int
    for job_id in ids:
        either, both = either | uuid.UUID(job_id).int, both & uuid.UUID(job_id).int
    assert (either ^ both).bit_count() == 62


def test_a_process_that_was_forked_off_gives_out_other_secrets_than_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = SystemRandom()
    parent.token()
    child, same = copy.copy(parent), copy.copy(parent)
    expected = parent.token()
    assert same.token() == expected, "a copy in the same process shows what a fork would share"
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert child.token() != expected


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_timer_is_never_early(run: Callable[[Coroutine[Any, Any, list[float]]], list[float]]) -> None:
    async def early() -> list[float]:
        clock, found = SystemClock(), list[float]()
        begun = clock.now()
        for number in range(200):
            when = begun + number * 0.000_37
            clock.call_at(when, lambda when=when: found.append(clock.now() - when))  # type: ignore[misc]
        while len(found) < 200:
            await asyncio.sleep(0.01)
        return [each for each in found if each < 0]

    assert run(early()) == []
