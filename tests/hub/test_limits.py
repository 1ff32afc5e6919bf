"""What the door does not let in: too large, too deep, too many, too often, and what is no JSON at all."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from tests.hub._hub import HubRig, graph, hub_in_process, running_hub, submission

from comfyfleet.hub.http.body import check_json
from comfyfleet.hub.http.limits import HubLimits, RequestRate
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal
from comfyfleet.policy.rules import Rules

SMALL = HubLimits(max_body_bytes=20_000, max_unpacked_bytes=50_000, max_depth=20)


@pytest_asyncio.fixture(scope="module")
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process(limits=SMALL, rules=Rules(max_nodes=100)) as rig:
        yield rig


def with_metadata(text: str) -> bytes:
    body = msgspec.json.encode(submission(metadata={"x": "@"}))
    return body.replace(b'"@"', text.encode())


# size


async def test_a_body_has_a_bound_packed_and_unpacked(rig: HubRig) -> None:
    assert (await rig.post("/api/jobs", raw=b" " * 20_001)).code == "too_large"
    body = msgspec.json.encode(submission())
    fits = body + b" " * (50_000 - len(body))
    for name, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        headers = {"content-encoding": name}
        assert (await rig.post("/api/jobs", raw=pack(fits), headers=headers)).status == 201
        answer = await rig.post("/api/jobs", raw=pack(fits + b" "), headers=headers)
        assert (answer.status, answer.code) == (413, "too_large")


async def test_a_deflate_stream_without_its_header_is_understood_too(rig: HubRig) -> None:
    packer = zlib.compressobj(wbits=-15)
    raw = packer.compress(msgspec.json.encode(submission())) + packer.flush()
    assert (await rig.post("/api/jobs", raw=raw, headers={"content-encoding": "deflate"})).status == 201


async def test_a_bomb_costs_no_more_than_the_bound() -> None:
    async with hub_in_process(limits=HubLimits(max_unpacked_bytes=1_000_000)) as rig:
        bomb = gzip.compress(b" " * 20_000_000)
        answer = await rig.post("/api/jobs", raw=bomb, headers={"content-encoding": "gzip"})
        assert answer.code == "too_large"


@pytest.mark.parametrize(
    ("encoding", "raw"),
    [
        ("br", b"{}"),
        ("gzip", b"{}"),
        ("gzip", gzip.compress(b"{}")[:-4]),
        ("gzip", gzip.compress(b"{}") + b"more"),
        ("deflate", b"\x00\x01"),
        ("gzip, gzip", b""),
    ],
    ids=["unknown", "not packed", "cut short", "something behind", "not packed at all", "packed twice"],
)
async def test_a_body_that_does_not_unpack_is_refused(rig: HubRig, encoding: str, raw: bytes) -> None:
    answer = await rig.post("/api/jobs", raw=raw, headers={"content-encoding": encoding})
    assert (answer.status, answer.code) == (400, "invalid_request")


async def test_a_body_in_pieces_is_stopped_where_it_is_too_much() -> None:
    async with running_hub(limits=SMALL) as rig:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 1_000

        headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}
        async with rig.session.post(f"{rig.url}/api/jobs", data=pieces(), headers=headers) as response:
            assert response.status == 413
        assert (await rig.get("/api/stats")).status == 200


async def never() -> MutableMapping[str, Any]:
    raise AssertionError("nothing of the body is read")


async def answer_without_reading(rig: HubRig, path: str, **headers: str) -> int:
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
    }
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await rig.hub(scope, never, send)
    return int(sent[0]["status"])


async def test_nothing_is_read_of_a_body_that_will_be_refused_whatever_it_is(rig: HubRig) -> None:
    worker = {"authorization": f"Bearer {rig.keys[Role.WORKER]}"}
    assert await answer_without_reading(rig, "/api/jobs") == 401
    assert await answer_without_reading(rig, "/api/jobs", authorization="Bearer cfk_wrong") == 401
    assert await answer_without_reading(rig, "/api/jobs", **worker) == 403
    tenant = {"authorization": f"Bearer {rig.keys[Role.TENANT]}"}
    assert await answer_without_reading(rig, "/api/jobs", **tenant, **{"content-length": "20001"}) == 413
    assert await answer_without_reading(rig, "/api/worker/enrol", **{"content-length": "4097"}) == 413


async def test_each_route_has_a_bound_of_its_own(rig: HubRig) -> None:
    assert (await rig.post("/api/worker/enrol", raw=b" " * 4_097, role=None)).code == "too_large"
    bomb = gzip.compress(b" " * 4_097)
    packed = await rig.post("/api/worker/enrol", raw=bomb, role=None, headers={"content-encoding": "gzip"})
    assert packed.code == "too_large" and packed.body["max_bytes"] == 4_096
    async with hub_in_process() as usual:
        assert (await usual.post("/api/keys", raw=b" " * 65_537)).code == "too_large"
        assert (await usual.post("/api/tenants", raw=b" " * 65_537)).code == "invalid_request"


async def test_all_large_bodies_together_have_a_bound_and_one_key_has_half_of_it() -> None:
    body = msgspec.json.encode(
        submission(workflow={"1": {"class_type": "A", "inputs": {"x": "x" * 300_000}}})
    )
    async with hub_in_process(limits=HubLimits(max_bodies_bytes=1_000_000)) as rig:
        at_once = [rig.post("/api/jobs", raw=body, role=Role.TENANT) for _ in range(4)]
        answers = await asyncio.gather(*at_once)
        assert sorted({answer.status for answer in answers}) == [201, 503]
        assert all(answer.code == "unavailable" for answer in answers if answer.status == 503)
        # Whatever was held has been given back, after refusals too.
        assert (await rig.post("/api/jobs", raw=body, role=Role.TENANT)).status == 201
        assert (await rig.post("/api/jobs", raw=body[:-5], role=Role.TENANT)).status == 400
        assert (await rig.post("/api/jobs", raw=body, role=Role.TENANT)).status == 201


async def test_a_large_workflow_is_the_same_job_as_a_small_one_with_its_shape() -> None:
    async with hub_in_process() as rig:
        made = []
        for length in (10, 200_000):
            workflow = {"1": {"class_type": "A", "inputs": {"x": "x" * length}}}
            made.append((await rig.post("/api/jobs", submission(workflow=workflow))).body)
        assert made[0]["workflow_hash"] == made[1]["workflow_hash"]
        job = await rig.engine.get(made[1]["id"])
        assert len(job.job.payload.workflow["1"]["inputs"]["x"]) == 200_000


@pytest.mark.parametrize("size", [10, 65_536, 131_072, 200_001])
@pytest.mark.parametrize("name", ["gzip", "deflate"])
async def test_what_is_unpacked_in_pieces_arrives_whole(size: int, name: str) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if name == "gzip" else zlib.compress
    workflow = {"1": {"class_type": "A", "inputs": {"x": "xyz" * size}}}
    async with hub_in_process() as rig:
        raw = pack(msgspec.json.encode(submission(workflow=workflow)))
        answer = await rig.post("/api/jobs", raw=raw, headers={"content-encoding": name})
        assert answer.status == 201, answer.content
        kept = (await rig.engine.get(answer.body["id"])).job.payload.workflow
        assert kept == workflow


# content


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "-1e400",
        "1" * 30,
        "-" + "9" * 19,
        "9" * 5000,
        "1e99999999999999999999",
        "[" * 21 + "]" * 21,
        '{"a":' * 1_000 + "1" + "}" * 1_000,
        "[" * 5_000,
        '"\\ud800"',
        "'x'",
        "tru",
        "",
    ],
    ids=lambda text: text[:12],
)
async def test_what_is_not_plain_json_is_the_senders_fault(rig: HubRig, text: str) -> None:
    for raw in (with_metadata(text), with_metadata(f'["a\\"[", {text}]')):
        answer = await rig.post("/api/jobs", raw=raw)
        assert (answer.status, answer.code) == (400, "invalid_request"), answer.content


@pytest.mark.parametrize(
    "text",
    [str(2**64 - 1), str(-(2**63)), "1" * 18, '"' + "[" * 500 + '"', '"' + "9" * 500 + '"', "0." + "1" * 40],
)
async def test_what_only_looks_wrong_is_taken(rig: HubRig, text: str) -> None:
    answer = await rig.post("/api/jobs", raw=with_metadata(text))
    assert answer.status == 201, answer.content
    kept = (await rig.get(f"/api/jobs/{answer.body['id']}")).body["metadata"]["x"]
    assert kept == msgspec.json.decode(text)


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xfe", b"\x00", b"null", b"[]", b'"x"', b"7", b"{", b"{}", b'{"payload"']
)
async def test_a_body_that_is_no_submission_is_refused(rig: HubRig, raw: bytes) -> None:
    answer = await rig.post("/api/jobs", raw=raw)
    assert (answer.status, answer.code) == (400, "invalid_request")


async def test_a_workflow_has_a_bound_of_nodes(rig: HubRig) -> None:
    many = {str(number): {"class_type": "A", "inputs": {}} for number in range(101)}
    answer = await rig.post("/api/jobs", submission(workflow=many))
    assert 400 <= answer.status < 500
    del many["0"]
    assert (await rig.post("/api/jobs", submission(workflow=many))).status == 201


@pytest.mark.parametrize(
    "query", ["limit=%ff", "metadata[a]=%00%ff", "&".join(f"a{n}=1" for n in range(200)), "%"]
)
async def test_a_query_that_cannot_be_read_is_refused(rig: HubRig, query: str) -> None:
    assert (await rig.get(f"/api/jobs?{query}")).status == 400


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=30,
)


def depth(value: object) -> int:
    match value:
        case list():
            return 1 + max(map(depth, value), default=0)
        case dict():
            return 1 + max(map(depth, value.values()), default=0)
        case _:
            return 0


@given(JSON, st.integers(0, 6))
def test_depth_is_seen_from_the_bytes_as_it_is(value: object, bound: int) -> None:
    body = msgspec.json.encode(value)
    if depth(value) > bound:
        with pytest.raises(Refusal, match="nested deeper"):
            check_json(body, bound)
    else:
        check_json(body, bound)


# often


async def test_a_key_that_asks_too_often_is_told_when_to_come_back() -> None:
    async with hub_in_process(limits=HubLimits(requests_per_s=0.5, burst=3)) as rig:
        for _ in range(3):
            assert (await rig.get("/api/stats")).status == 200
        answer = await rig.get("/api/stats")
        assert (answer.status, answer.code) == (429, "rate_limited")
        assert int(answer.headers["retry-after"]) == 2
        assert 0 < answer.body["retry_after_s"] <= 2
        # Another key has patience of its own.
        assert (await rig.get("/api/stats", role=Role.VIEWER)).status == 200


async def test_wrong_keys_cost_patience_and_good_ones_do_not() -> None:
    async with hub_in_process(limits=HubLimits(refusals_per_s=0.01, refusals_burst=3)) as rig:
        assert (await rig.get("/api/stats")).status == 200
        for _ in range(3):
            assert (await rig.get("/api/stats", key="cfk_0_0")).code == "unauthenticated"
        refused = await rig.get("/api/stats", key="cfk_0_0")
        assert refused.code == "rate_limited"
        assert "wrong keys from one address" in refused.body["detail"]
        # Whoever is known already goes on, and so does whoever comes now.
        assert (await rig.get("/api/stats")).status == 200
        assert (await rig.get("/api/stats", role=Role.TENANT)).status == 200


async def test_a_good_key_is_served_however_many_wrong_ones_come_from_its_address() -> None:
    async with hub_in_process(limits=HubLimits(refusals_per_s=0.01, refusals_burst=3)) as rig:
        statuses = []
        for number in range(30):
            wrong = await rig.get("/api/stats", key=f"cfk_{number:04d}_0")
            assert wrong.status in (401, 429)
            # One that nobody has seen before, so that nothing is remembered of it.
            _, good = await rig.hub.keys.create(Role.VIEWER)
            statuses.append((await rig.get("/api/stats", key=good)).status)
        assert statuses == [200] * 30


async def test_a_wrong_key_is_looked_up_once_in_a_while_however_often_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hub_in_process() as rig:
        looked = []
        check = rig.hub.keys.check

        async def counted(text: str) -> Any:
            looked.append(text)
            return await check(text)

        monkeypatch.setattr(rig.hub.keys, "check", counted)
        for _ in range(20):
            assert (await rig.get("/api/stats", key="cfk_0_0")).status == 401
        assert looked == ["cfk_0_0"]


def test_a_bucket_fills_again_with_time_and_no_further() -> None:
    now = 0.0
    rate = RequestRate(2.0, 3, lambda: now)
    for _ in range(3):
        rate.take("a")
    with pytest.raises(Refusal):
        rate.take("a")
    now = 0.5
    rate.take("a")
    with pytest.raises(Refusal):
        rate.take("a")
    now = 1000.0
    for _ in range(3):
        rate.take("a")
    with pytest.raises(Refusal):
        rate.take("a")


async def test_a_hub_answers_only_so_many_at_once() -> None:
    async with hub_in_process(limits=HubLimits(max_in_flight=0)) as rig:
        answer = await rig.get("/api/stats")
        assert (answer.status, answer.code) == (503, "unavailable")


async def test_a_large_answer_is_packed_for_those_who_take_it(rig: HubRig) -> None:
    for _ in range(60):
        await rig.submit(workflow=graph())
    plain = await rig.get("/api/jobs?limit=60")
    packed = await rig.get("/api/jobs?limit=60", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.content) == plain.content
