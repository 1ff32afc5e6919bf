"""Whatever stands in the head of a request, a hub answers with a problem of the sender's and never with one of its own.

Every route of the table is asked with it, with and without a key, at a hub that wants keys and at an open one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, ask_app, hub_in_process

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role
from comfyfleet.wire.route import Route
from comfyfleet.wire.routes import ROUTES

LONG = "9" * 5_000
HEADERS = [
    ("host", "[::1"),
    ("host", "["),
    ("host", "127.0.0.1:port"),
    ("host", "a@b:c@[::1]"),
    ("host", ""),
    ("origin", "http://[::1"),
    ("origin", "null"),
    ("origin", "http://127.0.0.1:99999999"),
    ("authorization", "Bearer"),
    ("authorization", "Bearer cfk_\xe9_\xff"),
    ("authorization", f"Bearer cfk_{LONG}_{LONG}"),
    ("authorization", "Basic Og=="),
    ("last-event-id", LONG),
    ("last-event-id", "-1"),
    ("range", f"bytes={LONG}-{LONG}"),
    ("range", "bytes=,,,-"),
    ("if-none-match", '"' * 300),
    ("idempotency-key", "\xff"),
    ("traceparent", "00-" + "f" * 32 + "-0-zz"),
    ("x-request-id", "\xe9\xfe"),
    ("x-forwarded-for", "[::1, ,,"),
    ("accept", "text/html;q=\xff"),
    ("accept-encoding", "gzip;q=x"),
    ("content-encoding", "gzip, \xff"),
    ("content-length", LONG),
    ("content-length", "-1"),
    ("content-type", "application/json; charset=\xff"),
]
NAMES = [
    "%00",
    "%ff%fe",
    "%F0%9F",
    "..",
    "%2e%2e%2f",
    "%0a%0d",
    "a" * 5_000,
    "%",
    "%zz",
    "é",
    "%ED%A0%80",
    "{}",
]
QUERIES = [
    "%00=%00",
    "limit=" + LONG,
    "cursor=%00",
    "cursor=%ED%A0%80",
    "token=%ff",
    "a[" * 50,
    "&&&=",
    "metadata[=1",
]


@pytest_asyncio.fixture(scope="module", params=[False, True], ids=["with keys", "open"])
async def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HubRig]:
    limits = HubLimits(max_wait_s=0.0, requests_per_s=1e6, burst=1_000_000, refusals_burst=1_000_000)
    folder = tmp_path_factory.mktemp("files")
    url = f"sqlite:///{folder}/fleet.db"
    async with hub_in_process(limits=limits, is_open=request.param, store_url=url, folder=folder) as rig:
        yield rig


@pytest.mark.parametrize("route", [each for each in ROUTES if not each.streams], ids=lambda each: each.name)
async def test_no_head_of_a_request_is_the_hubs_own_problem(rig: HubRig, route: Route) -> None:
    path = route.path
    for name in route.parameters:
        path = path.replace(f"{{{name}}}", "x")
    asked = [(path, {name: value}) for name, value in HEADERS]
    asked += [(path.replace("/x", f"/{name}"), {}) for name in NAMES if route.parameters]
    asked += [(f"{path}?{query}", {}) for query in QUERIES]
    for where, headers in asked:
        for key in (None, rig.keys[Role.ADMIN]):
            sent = {"host": "127.0.0.1", **headers}
            if key is not None:
                sent.setdefault("authorization", f"Bearer {key}")
            answer = await ask_app(rig.hub, route.method, where, sent, b"{}")
            assert answer.status < 500, (route.name, where[:80], headers, answer.content[:300])
