"""A sealed value opens in its own place with its own key, and nothing else opens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.encrypted import encrypted_payload, found_in, in_payload
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Submission
from comfyfleet.stores.crypto.keyring import read_master_keys
from comfyfleet.stores.crypto.value_cipher import (
    DataKey,
    DecryptionFailed,
    ValueContext,
    encrypt,
    key_id_of,
    new_key_id,
    open_value,
    unwrap,
    wrap,
)

KEY = DataKey(new_key_id(1.0), bytes(range(32)), 1.0)
PLACE = ValueContext(TenantId("acme"), JobId("job-1"), "payload")
LINE = "k1=" + "ab" * 32


@given(st.binary(max_size=200))
def test_what_was_sealed_comes_back_and_is_never_sealed_alike(plain: bytes) -> None:
    one, two = encrypt(KEY, PLACE, plain), encrypt(KEY, PLACE, plain)
    assert one != two
    assert open_value(KEY, PLACE, one) == open_value(KEY, PLACE, two) == plain
    assert key_id_of(one) == KEY.key_id


def test_a_change_of_any_bit_is_noticed() -> None:
    encrypted = encrypt(KEY, PLACE, b"a fox in the snow")
    for place in range(len(encrypted)):
        for bit in range(8):
            changed = bytearray(encrypted)
            changed[place] ^= 1 << bit
            with pytest.raises(DecryptionFailed):
                key_id_of(bytes(changed))
                open_value(KEY, PLACE, bytes(changed))


@pytest.mark.parametrize("cut", [0, 3, 20, 40, -1])
def test_a_value_that_was_cut_is_noticed(cut: int) -> None:
    with pytest.raises(DecryptionFailed):
        cut_short = encrypt(KEY, PLACE, b"a fox in the snow")[:cut]
        key_id_of(cut_short)
        open_value(KEY, PLACE, cut_short)


@pytest.mark.parametrize(
    "place",
    [
        PLACE._replace(tenant=TenantId("borg")),
        PLACE._replace(job_id=JobId("job-2")),
        PLACE._replace(kind="result"),
        # Joined without a border they would be the same.
        PLACE._replace(tenant=TenantId("acmej"), job_id=JobId("ob-1")),
    ],
)
def test_a_value_in_another_place_does_not_open(place: ValueContext) -> None:
    with pytest.raises(DecryptionFailed, match="so it cannot be decrypted"):
        open_value(KEY, place, encrypt(KEY, PLACE, b"a fox"))


def test_another_key_of_the_same_id_does_not_open_it() -> None:
    with pytest.raises(DecryptionFailed):
        open_value(DataKey(KEY.key_id, bytes(32), 1.0), PLACE, encrypt(KEY, PLACE, b"a fox"))


def test_a_wrapped_key_opens_with_its_master_key_and_for_its_name_alone() -> None:
    master = bytes(32)
    wrapped = wrap(master, KEY.secret, "acme/1", "k1")
    assert unwrap(master, wrapped, "acme/1", "k1") == KEY.secret
    assert unwrap(bytes(31) + b"x", wrapped, "acme/1", "k1") is None
    assert unwrap(master, wrapped, "borg/1", "k1") is None
    assert unwrap(master, wrapped[:10], "acme/1", "k1") is None
    assert unwrap(master, b"", "acme/1", "k1") is None


def test_what_stands_in_for_a_payload_is_found_and_nothing_else_is_taken_for_it() -> None:
    assert in_payload(encrypted_payload(b"bytes")) == b"bytes"
    assert in_payload(Submission({"1": {"class_type": "X", "inputs": {}}})) is None
    name = "comfyfleet:sealed"
    for other in (
        {name: {"value": "no base64!"}},
        {name: {"value": 7}},
        {name: "text"},
        {name: {"class_type": "X"}},
        {name: {"value": b"x"}, "1": {}},
    ):
        assert found_in(other) is None
    assert found_in({name: {"value": "Ynl0ZXM="}}) == b"bytes"


def test_master_keys_are_read_in_either_form_and_the_first_is_current() -> None:
    keys = read_master_keys(["# of November", "", LINE, "k2 = " + "A" * 43 + "="])
    assert list(keys.keys) == ["k1", "k2"] and keys.current == "k1"
    assert read_master_keys([LINE, "k2=" + "cd" * 32], "k2").current == "k2"
    assert read_master_keys([LINE], "none").current is None


@pytest.mark.parametrize(
    ("lines", "current", "said"),
    [
        ([], "", "there is no key"),
        (["ab" * 32], "", "ID=KEY"),
        (["k 1=" + "ab" * 32], "", "ID=KEY"),
        (["k1=" + "ab" * 31], "", "is not 32 bytes"),
        (["k1=" + "xy" * 32], "", "is not 32 bytes"),
        ([LINE, LINE], "", "two keys"),
        ([LINE], "k2", "the keys are k1"),
    ],
)
def test_a_master_key_that_will_not_do_is_told_without_repeating_it(
    lines: list[str], current: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as error:
        read_master_keys(lines, current)
    assert "abab" not in str(error.value) and "xyxy" not in str(error.value)


def test_no_key_shows_itself_when_it_is_printed() -> None:
    for text in (repr(KEY), repr(read_master_keys([LINE])), str(read_master_keys([LINE]))):
        assert "abab" not in text and "\\xab" not in text and "\\x01\\x02" not in text
