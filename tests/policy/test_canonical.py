"""The canonical text: one for each value, exact, and refused where JSON has none."""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.canonical_json import NotCanonicalError, canonical_json, check_canonical

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def double(bits: int) -> float:
    (number,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    return float(number)


@given(values)
def test_the_text_is_json_of_an_equal_value(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


@given(values)
def test_the_text_of_the_text_is_itself(value: Any) -> None:
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text


anything = st.recursive(
    values | st.floats() | st.integers(-(2**1100), 2**1100) | st.sampled_from(["\ud800", b"x", IntEnum]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(anything, st.integers(0, 4))
def test_the_check_says_whether_there_is_a_text(value: Any, max_nesting: int) -> None:
    try:
        canonical_json(value, max_nesting=max_nesting)
    except NotCanonicalError:
        with pytest.raises(NotCanonicalError):
            check_canonical(value, max_nesting=max_nesting)
    else:
        check_canonical(value, max_nesting=max_nesting)


@given(st.dictionaries(texts, st.integers(), max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(value: dict[str, int], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_equal_numbers_have_one_text(number: float) -> None:
    if number.is_integer():
        assert canonical_json(number) == canonical_json(int(number)) == str(int(number)).encode()
    else:
        assert float(canonical_json(number)) == number


# The non-integral and the smaller integral samples of RFC 8785, appendix B.
@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (0x0000000000000000, "0"),
        (0x8000000000000000, "0"),
        (0x0000000000000001, "5e-324"),
        (0x8000000000000001, "-5e-324"),
        (0x4340000000000000, "9007199254740992"),
        (0xC340000000000000, "-9007199254740992"),
        (0x3EB0C6F7A0B5ED8C, "9.999999999999997e-7"),
        (0x3EB0C6F7A0B5ED8D, "0.000001"),
        (0x41B3DE4355555553, "333333333.3333332"),
        (0x41B3DE4355555554, "333333333.33333325"),
        (0x41B3DE4355555555, "333333333.3333333"),
        (0x41B3DE4355555556, "333333333.3333334"),
        (0x41B3DE4355555557, "333333333.33333343"),
        (0xBECBF647612F3696, "-0.0000033333333333333333"),
        (0x43143FF3C1CB0959, "1424953923781206.2"),
    ],
)
def test_fractions_are_written_as_ecmascript_does(bits: int, text: str) -> None:
    assert canonical_json(double(bits)) == text.encode()


def test_integral_numbers_keep_every_digit_however_they_arrive() -> None:
    assert (
        canonical_json([18446744073709551615, 9007199254740993]) == b"[18446744073709551615,9007199254740993]"
    )
    assert canonical_json(1e21) == canonical_json(10**21) == b"1000000000000000000000"
    assert canonical_json(1e23) == b"99999999999999991611392"
    assert canonical_json([1.0, -0.0, True]) == b"[1,0,true]"


def test_keys_are_sorted_by_code_point_and_not_by_utf16_unit() -> None:
    assert (
        canonical_json({"\U0001f600": 1, "\ufb01": 2, "a": 3}) == '{"a":3,"\ufb01":2,"\U0001f600":1}'.encode()
    )


def test_only_what_must_be_escaped_is_escaped() -> None:
    assert canonical_json('"\\/\b\f\n\r\t\x00\x1f\x7f\u2028é') == (
        '"\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f\x7f\u2028é"'.encode()
    )


def test_relatives_of_the_plain_types_are_written_like_them() -> None:
    class Colour(IntEnum):
        RED = 3

    class Name(str):
        __slots__ = ()

    assert canonical_json(MappingProxyType({"b": (1, 2), "a": [Colour.RED, Name("x")]})) == (
        b'{"a":[3,"x"],"b":[1,2]}'
    )
    assert canonical_json([[], {}, ()]) == b"[[],{},[]]"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "nan is not a JSON number"),
        ([float("inf")], "inf is not a JSON number"),
        ({"a": -float("inf")}, "-inf is not a JSON number"),
        ("\ud800", "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        ({1: "a"}, "a key is int"),
        ({1: "a", "b": 2}, "a key is int"),
        ({1, 2}, "set is not a JSON type"),
        (b"bytes", "bytes is not a JSON type"),
        ([10**5000], "more than 1024 bits"),
    ],
)
def test_what_json_cannot_carry_is_refused(value: Any, message: str) -> None:
    with pytest.raises(NotCanonicalError, match=message):
        canonical_json(value)


def test_nesting_is_bounded_even_when_a_value_contains_itself() -> None:
    nested: Any = 1
    for _ in range(64):
        nested = [nested]
    assert canonical_json(nested) == b"[" * 64 + b"1" + b"]" * 64
    endless: list[Any] = []
    endless.append({"again": endless})
    for value in ([nested], {"a": nested}, endless):
        with pytest.raises(NotCanonicalError, match="nested too deeply"):
            canonical_json(value)


def test_a_refusal_of_the_canonical_form_is_a_value_error() -> None:
    assert issubclass(NotCanonicalError, ValueError)
