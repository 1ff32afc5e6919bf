"""A text is judged from its bytes alone, and alike however it is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.hub.http.body import JsonScanner, check_json
from comfyfleet.model.errors import Refusal, RefusalCode

MIB = 1024 * 1024
TEXTS = st.text(st.sampled_from('ab[]{}",\\0:😀é'), max_size=12) | st.just("1" * 30)
JSON = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda within: st.lists(within, max_size=4) | st.dictionaries(TEXTS, within, max_size=4),
    max_leaves=30,
)


def judged(body: bytes, cuts: list[int], max_depth: int = 80) -> str:
    scanner = JsonScanner(max_depth, MIB)
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    try:
        for start, end in pairwise(places):
            scanner.feed(body[start:end])
        scanner.end()
    except Refusal as refusal:
        return refusal.message
    return ""


def depth(value: object) -> int:
    match value:
        case list():
            return 1 + max(map(depth, value), default=0)
        case dict():
            return 1 + max(map(depth, value.values()), default=0)
        case _:
            return 0


@given(JSON, st.lists(st.integers(0, 10_000), max_size=8), st.integers(0, 5))
def test_depth_is_found_however_the_text_is_cut(value: object, cuts: list[int], most: int) -> None:
    said = judged(msgspec.json.encode(value), cuts, most)
    assert ("nested deeper" in said) == (depth(value) > most), said


@given(
    st.lists(st.integers(0, 200), max_size=8), st.integers(2**64, 2**70) | st.integers(-(2**70), -(2**63) - 1)
)
def test_an_integer_that_is_too_large_is_found_however_the_text_is_cut(cuts: list[int], number: int) -> None:
    body = b'{"1234567890123456789012": "98765432109876543210987", "a\\"": [1, %d]}' % number
    assert "64 bits" in judged(body, cuts)
    assert "64 bits" in judged(b"%d" % number, cuts)
    assert judged(body.replace(b"%d" % number, b"%d" % (2**64 - 1)), cuts) == ""


def test_a_number_has_an_end() -> None:
    assert "1024 characters" in judged(b"[0." + b"1" * 2_000 + b"]", [1_000])
    assert judged(b"[0." + b"1" * 1_000 + b"]", [500]) == ""


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        (b'"' + b"a" * (MIB - 2) + b'"', True),
        (b'"' + "字".encode() * (MIB // 3 - 2) + b'"', True),
        (b'"' + "😀".encode() + b"a" * (MIB - 6) + b'"', False),
        (b'"' + b"a" * (MIB - 8) + "😀".encode() + b'"', False),
        (b'["' + b"a" * (MIB - 200_000) + b'","' + "😀".encode() + b'"]', True),
        (b'"' + b"\\n" * (MIB // 2 - 1) + b'"', False),
        (b'"' + b'line of text\\n"'.replace(b'"', b"") * (MIB // 16) + b'"', True),
        (b"[" + b"[]," * 40_000 + b"1]", False),
        (b"[" + b"1," * 40_000 + b"1]", False),
        (b"[" + b'"some words",' * 20_000 + b"1]", True),
    ],
    ids=[
        "ascii",
        "chinese",
        "a wide character first",
        "a wide character last",
        "a wide string beside a long one",
        "escapes alone",
        "lines",
        "small arrays",
        "small numbers",
        "words",
    ],
)
def test_what_would_take_twice_its_bound_is_too_large(body: bytes, is_taken: bool) -> None:
    assert len(body) <= MIB
    if is_taken:
        check_json(body, 80, MIB)
        return
    with pytest.raises(Refusal) as caught:
        check_json(body, 80, MIB)
    assert caught.value.code is RefusalCode.TOO_LARGE
