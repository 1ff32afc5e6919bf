"""Streams of events are read as the HTML standard says, wherever the network cuts them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.client.connection import EventParser, ServerEvent
from comfyfleet.client.options import update_of

STREAM = (
    "\ufeff: hello\n\n"
    "event: leased\nid: 2\ndata: {}\n\n"
    "data: one\r\ndata: two\r\n\r\n"
    "retry: 1500\rdata:three\r\r"
    "id: 3\nunheard: of\ndata\n\n"
    "event: nothing\n\n"
    "data: naïve – ✓\n\n"
    "data: cut off\n"
).encode()

EVENTS = [
    ServerEvent("{}", "leased", "2"),
    ServerEvent("one\ntwo", id="2"),
    ServerEvent("three", id="2"),
    ServerEvent("", id="3"),
    ServerEvent("naïve – ✓", id="3"),
]


def test_events_are_read_whole() -> None:
    parser = EventParser()
    assert parser.feed(STREAM) == EVENTS
    assert (parser.last_id, parser.retry_s) == ("3", 1.5)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_it_does_not_matter_where_the_network_cuts(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(STREAM)]
    parser = EventParser()
    found = []
    for start, end in itertools.pairwise(cuts):
        found += parser.feed(STREAM[start:end])
    assert found == EVENTS


@pytest.mark.parametrize("kind", ["completed", "failed", "cancelled"])
def test_the_end_of_a_job_is_known_and_carries_what_the_hub_told(kind: str) -> None:
    members = {
        "number": 7,
        "status": kind,
        "data": {"lease": 2},
        "percentage": 100,
        "new": [1],
        "worker_id": 5,
    }
    update = update_of(kind, json.dumps(members))
    assert update.is_end
    assert (update.number, update.status, update.percentage) == (7, kind, 100.0)
    assert update.worker_id is None, "a field of another kind than ours is left to `data`"
    assert update.lease == 2
    assert update.data["new"] == [1]
