"""What the door does not let in: too large, too deep, too many, too often, and what is no JSON at all."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from tests.hub._hub import HubRig, graph, hub_in_process, running_hub, submission

from comfyfleet.hub.limits import Limits, Rate, check_json
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal
from comfyfleet.policy.rules import Rules

SMALL = Limits(max_body_bytes=20_000, max_unpacked_bytes=50_000, max_depth=20)


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
    async with hub_in_process(limits=Limits(max_unpacked_bytes=1_000_000)) as rig:
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
    async with hub_in_process(limits=Limits(requests_per_s=0.5, burst=3)) as rig:
        for _ in range(3):
            assert (await rig.get("/api/stats")).status == 200
        answer = await rig.get("/api/stats")
        assert (answer.status, answer.code) == (429, "rate_limited")
        assert int(answer.headers["retry-after"]) == 2
        assert 0 < answer.body["retry_after_s"] <= 2
        # Another key has patience of its own.
        assert (await rig.get("/api/stats", role=Role.VIEWER)).status == 200


async def test_wrong_keys_cost_patience_and_good_ones_do_not() -> None:
    async with hub_in_process(limits=Limits(refusals_per_s=0.01, refusals_burst=3)) as rig:
        assert (await rig.get("/api/stats")).status == 200
        for _ in range(3):
            assert (await rig.get("/api/stats", key="cfk_0_0")).code == "unauthenticated"
        refused = await rig.get("/api/stats", key="cfk_0_0")
        assert refused.code == "rate_limited"
        assert "wrong keys from one address" in refused.body["detail"]
        # Whoever is known already goes on.
        assert (await rig.get("/api/stats")).status == 200


def test_a_bucket_fills_again_with_time_and_no_further() -> None:
    now = 0.0
    rate = Rate(2.0, 3, lambda: now)
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
    async with hub_in_process(limits=Limits(max_in_flight=0)) as rig:
        answer = await rig.get("/api/stats")
        assert (answer.status, answer.code) == (503, "unavailable")


async def test_a_large_answer_is_packed_for_those_who_take_it(rig: HubRig) -> None:
    for _ in range(60):
        await rig.submit(workflow=graph())
    plain = await rig.get("/api/jobs?limit=60")
    packed = await rig.get("/api/jobs?limit=60", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.content) == plain.content
