"""Data keys: one for each tenant, wrapped, renewed without downtime, destroyed for good; wrong master keys are told."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.stores.crypto.keyring import KEEP_S, Keyring, MasterKeys, WrappedKey
from comfyfleet.stores.crypto.value_cipher import (
    DecryptionFailed,
    ValueContext,
    encrypt,
    key_id_of,
    open_value,
)
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.stores.factory import DATA_KEYS, MASTER_KEYS, refuse_if_encrypted
from comfyfleet.testing.time import ManualClock

ACME, BORG = TenantId("acme"), TenantId("borg")
PLACE = ValueContext(ACME, JobId("job"), "payload")
ONE, TWO = b"1" * 32, b"2" * 32


class Desk:
    """A cabinet, a clock, and keyrings of several processes on them."""

    def __init__(self) -> None:
        self.documents = MemoryDocumentStore()
        self.clock = ManualClock()
        self.masters = MasterKeys({"k1": ONE}, "k1")

    def keyring(self, masters: MasterKeys | None = None) -> Keyring:
        return Keyring(self.documents, self.clock, lambda: masters or self.masters)

    async def encrypted(self, keyring: Keyring) -> bytes:
        key = await keyring.to_encrypt(ACME)
        assert key is not None
        return encrypt(key, PLACE, b"a fox")

    async def opened(self, keyring: Keyring, encrypted: bytes) -> bytes:
        return open_value(await keyring.to_decrypt(ACME, key_id_of(encrypted)), PLACE, encrypted)


async def test_a_tenant_has_a_key_of_its_own_which_every_process_finds() -> None:
    desk = Desk()
    one, two = desk.keyring(), desk.keyring()
    key = await one.to_encrypt(ACME)
    assert key is not None and key == await two.to_encrypt(ACME) == await one.to_encrypt(ACME)
    other = await two.to_encrypt(BORG)
    assert other is not None and other.secret != key.secret
    nested = await two.to_encrypt(TenantId("acme/x"))
    assert nested is not None and nested.secret != key.secret
    fresh = await desk.keyring().to_encrypt(ACME)
    assert fresh == key, "a tenant whose name begins like it is another"
    documents = await desk.documents.listing(DATA_KEYS)
    assert all(key.secret not in each.body for each in documents) and len(documents) == 3


async def test_two_processes_that_make_a_key_at_once_read_each_other() -> None:
    desk = Desk()
    one, two = desk.keyring(), desk.keyring()
    values = await asyncio.gather(desk.encrypted(one), desk.encrypted(two))
    for keyring in (one, two, desk.keyring()):
        assert [await desk.opened(keyring, each) for each in values] == [b"a fox"] * 2


async def test_a_new_master_key_wraps_anew_and_the_old_one_may_go() -> None:
    desk = Desk()
    serving = desk.keyring()
    old = await desk.encrypted(serving)
    desk.masters = MasterKeys({"k2": TWO, "k1": ONE}, "k2")
    assert await serving.refresh() == 1 and await serving.refresh() == 0
    assert await desk.opened(serving, old) == b"a fox", "and it goes on all the while"
    assert [each.name for each in await desk.documents.listing(MASTER_KEYS)] == ["k2"]
    later = desk.keyring(MasterKeys({"k2": TWO}, "k2"))
    await later.open()
    assert await desk.opened(later, old) == b"a fox"
    tally = await later.count_keys()
    assert (tally.masters, tally.tenants, tally.destroyed) == ({"k2": 1}, 1, 0)


async def test_an_old_master_key_is_kept_on_the_list_while_something_needs_it() -> None:
    desk = Desk()
    behind = desk.keyring()
    await behind.to_encrypt(ACME)
    desk.masters = MasterKeys({"k2": TWO, "k1": ONE}, "k2")
    await desk.keyring().rewrap()
    await behind.renew(BORG)
    assert [each.name for each in await desk.documents.listing(MASTER_KEYS)] == ["k1", "k2"]
    with pytest.raises(Refusal, match="'k1', which is not among"):
        await desk.keyring(MasterKeys({"k2": TWO}, "k2")).open()


async def test_a_data_key_that_does_not_open_keeps_no_other_from_being_wrapped_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    keyring = desk.keyring()
    for tenant in (ACME, BORG):
        await keyring.to_encrypt(tenant)
    first = (await desk.documents.listing(DATA_KEYS))[0]
    broken = msgspec.json.encode(WrappedKey(1.0, "k1", b"x" * 60))
    await desk.documents.put(DATA_KEYS, first.name, broken, version=None)
    desk.masters = MasterKeys({"k2": TWO, "k1": ONE}, "k2")
    assert await desk.keyring().rewrap() == 1
    assert "'acme' does not open" in caplog.text
    assert (await desk.keyring().count_keys()).masters == {"k1": 1, "k2": 1}
    assert [each.name for each in await desk.documents.listing(MASTER_KEYS)] == ["k1", "k2"]


async def test_a_key_file_that_cannot_be_read_again_leaves_the_keys_that_are_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    broken = False

    def read() -> MasterKeys:
        if broken:
            raise ValueError("there is no key")
        return desk.masters

    keyring = Keyring(desk.documents, desk.clock, read)
    encrypted = await desk.encrypted(keyring)
    broken = True
    await keyring.refresh()
    assert "cannot be read again" in caplog.text
    await desk.clock.advance(2 * KEEP_S)
    assert await desk.opened(keyring, encrypted) == b"a fox"


async def test_a_wrong_master_key_is_told_at_the_start() -> None:
    desk = Desk()
    await desk.encrypted(desk.keyring())
    await desk.keyring().open()
    with pytest.raises(Refusal, match="another key has its id"):
        await desk.keyring(MasterKeys({"k1": TWO}, "k1")).open()
    with pytest.raises(Refusal, match=r"'k1', which is not among the keys of \[encryption\] \(k2\)"):
        await desk.keyring(MasterKeys({"k2": TWO}, "k2")).open()
    with pytest.raises(Refusal, match=r"encrypted, and this process has no key.*'k1'"):
        await refuse_if_encrypted(desk.documents)
    await refuse_if_encrypted(MemoryDocumentStore())


async def test_a_master_key_that_is_missed_later_is_a_fault_and_not_the_end_of_a_job() -> None:
    desk = Desk()
    without = desk.keyring(MasterKeys({"k2": TWO}, "k2"))
    encrypted = await desk.encrypted(desk.keyring())
    with pytest.raises(Fault, match="'k1', which this process does not have"):
        await desk.opened(without, encrypted)


async def test_a_data_key_grows_old_and_a_new_one_follows_while_the_old_still_opens() -> None:
    desk = Desk()
    keyring = desk.keyring()
    old = await desk.encrypted(keyring)
    await desk.clock.advance(364 * 86400)
    assert key_id_of(await desk.encrypted(keyring)) == key_id_of(old)
    await desk.clock.advance(2 * 86400)
    new = await desk.encrypted(keyring)
    assert key_id_of(new) > key_id_of(old)
    assert [await desk.opened(keyring, each) for each in (old, new)] == [b"a fox"] * 2
    await desk.clock.advance(0.001)
    await keyring.renew(ACME)
    assert key_id_of(await desk.encrypted(desk.keyring())) > key_id_of(new)


async def test_what_was_shredded_opens_nowhere_and_the_tenant_may_begin_anew() -> None:
    desk = Desk()
    keyring, elsewhere = desk.keyring(), desk.keyring()
    encrypted = await desk.encrypted(keyring)
    other = await keyring.to_encrypt(BORG)
    assert await desk.opened(elsewhere, encrypted) == b"a fox"
    assert await keyring.crypto_shred(ACME) == 1 and await keyring.crypto_shred(ACME) == 0
    with pytest.raises(DecryptionFailed, match="'acme' that encrypts it was destroyed"):
        await desk.opened(keyring, encrypted)
    await desk.clock.advance(KEEP_S)
    with pytest.raises(DecryptionFailed, match="destroyed"):
        await desk.opened(elsewhere, encrypted)
    assert await desk.keyring().to_encrypt(BORG) == other
    again = await desk.encrypted(elsewhere)
    assert key_id_of(again) != key_id_of(encrypted) and await desk.opened(keyring, again) == b"a fox"
    tally = await keyring.count_keys()
    assert (tally.tenants, tally.destroyed) == (2, 1)
    assert await keyring.rewrap() == 0, "what is destroyed is not looked for"
    await keyring.crypto_shred(ACME)
    assert await keyring.tenants() == [BORG], "nobody makes a key for who is gone"


async def test_a_rewrap_never_brings_back_what_was_shredded_meanwhile() -> None:
    desk = Desk()
    keyring = desk.keyring()
    encrypted = await desk.encrypted(keyring)
    desk.masters = MasterKeys({"k2": TWO, "k1": ONE}, "k2")
    rewrapping = desk.keyring()
    put = desk.documents.put

    async def shredded_first(collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        desk.documents.put = put  # type: ignore[method-assign]
        await keyring.crypto_shred(ACME)
        return await put(collection, name, body, version=version)

    desk.documents.put = shredded_first  # type: ignore[method-assign]
    assert await rewrapping.rewrap() == 0
    with pytest.raises(DecryptionFailed, match="destroyed"):
        await desk.opened(desk.keyring(), encrypted)


async def test_without_a_current_key_nothing_more_is_sealed() -> None:
    desk = Desk()
    encrypted = await desk.encrypted(desk.keyring())
    keyring = desk.keyring(MasterKeys({"k1": ONE}))
    await keyring.open()
    assert not keyring.encrypts and await keyring.to_encrypt(ACME) is None
    assert await desk.opened(keyring, encrypted) == b"a fox"
    with pytest.raises(Refusal, match="no current master key"):
        await keyring.renew(ACME)
