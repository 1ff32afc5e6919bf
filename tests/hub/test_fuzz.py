"""Whatever is sent to whichever route, the hub has an answer that is not its own failure."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests._examples import examples
from tests.hub._hub import HubRig, graph, hub_in_process

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role
from comfyfleet.wire.route import Route
from comfyfleet.wire.routes import ROUTES

LEASE = {"job_id": "j", "round": 1, "number": 1, "epoch": 1, "token": "t"}
WORDS: dict[str, Any] = {
    "payload": {"workflow": graph()},
    "jobs": [{"payload": graph()}],
    "worker_id": "gpu-a",
    "poll_id": "1",
    "wait_s": 0,
    "capabilities": {"services": ["comfyui"]},
    "lease": LEASE,
    "leases": [LEASE],
    "failure": {"kind": "transient", "message": "x"},
    "reports": [{"lease": LEASE, "kind": "progress"}],
    "role": "viewer",
    "token": "cfe_0_0",
    "priority": 3,
    "id": "acme",
    "amount": 5,
    "note": "why",
    "price": {"by": "flat", "credits": 5},
}
"""What a route may ask for, so that bodies get past the first look."""

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(list(WORDS.values())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def names(route: Route) -> list[str]:
    return [] if route.decodes is None else list(route.decodes.__struct_fields__)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Route, str, bytes]:
    # The fleet's stream has no end to wait for.
    route = draw(st.sampled_from([route for route in ROUTES if route.name != "events"]))
    made_up = st.text(min_size=1, max_size=10) | st.just("acme")
    path = re.sub(r"\{\w+\}", lambda _: quote(draw(made_up), safe=""), route.path)
    if draw(st.booleans()):
        query = draw(st.dictionaries(st.text(max_size=8) | st.just("limit"), st.text(max_size=8), max_size=3))
        path += "?" + "&".join(f"{quote(name)}={quote(value)}" for name, value in query.items())
    known = names(route)
    body = {name: WORDS[name] for name in known if name in WORDS}
    if known:
        body |= draw(st.dictionaries(st.sampled_from(known), values, max_size=3))
    try:
        raw = msgspec.json.encode(body)
    except OverflowError:
        raw = repr(body).replace("'", '"').encode("utf-8", "replace")
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=6)) + raw[at + draw(st.integers(0, 3)) :]
    return route, path, raw


@pytest_asyncio.fixture(scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HubRig]:
    databases = {"default": f"sqlite:///{tmp_path_factory.mktemp('databases')}/tenants.db"}
    limits = HubLimits(max_wait_s=0.0, requests_per_s=1e6, burst=1_000_000, refusals_burst=1_000_000)
    async with hub_in_process(limits=limits, databases=databases) as rig:
        yield rig


@settings(
    max_examples=examples(1_000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(requests())
async def test_no_request_is_the_hubs_own_failure(rig: HubRig, request_: tuple[Route, str, bytes]) -> None:
    route, path, raw = request_
    answer = await rig.ask(route.method, path, role=Role.ADMIN, raw=raw)
    documented = {*route.answers, 405, *(400, 401, 402, 403, 404, 409, 413, 422, 429)}
    assert answer.status in documented, (route.name, path, raw, answer.content)
    if answer.status >= 400:
        assert answer.code
