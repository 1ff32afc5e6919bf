"""Whose address counts, where a proxy stands in front of a hub: what a trusted one says, and nobody else."""

from __future__ import annotations

import pytest
from tests.hub._hub import ask_app, hub_in_process

from comfyfleet.engine.system import SystemClock
from comfyfleet.hub.app import Hub
from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.hub.http.proxies import TrustedProxies

TRUSTED = TrustedProxies(["10.0.0.0/8", "::1"])


def seen(client: str, *said: str) -> str:
    scope = {"client": (client, 5), "headers": [(b"x-forwarded-for", each.encode()) for each in said]}
    return str(TRUSTED.with_sender(scope)["client"][0])


@pytest.mark.parametrize(
    ("client", "said", "sender"),
    [
        ("10.0.0.5", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("198.51.100.7", ["203.0.113.9"], "198.51.100.7"),
        ("10.0.0.5", ["1.2.3.4, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.5", ["1.2.3.4, 203.0.113.9, 10.1.1.1"], "203.0.113.9"),
        ("10.0.0.5", ["1.2.3.4", "203.0.113.9"], "203.0.113.9"),
        ("10.0.0.5", ["10.2.2.2, 10.1.1.1"], "10.2.2.2"),
        ("10.0.0.5", ["203.0.113.9:4711"], "203.0.113.9"),
        ("::1", ["[2001:db8::7]:4711"], "2001:db8::7"),
        ("::ffff:10.0.0.5", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.5", ["nonsense"], "10.0.0.5"),
        ("10.0.0.5", ["203.0.113.9, nonsense, 10.1.1.1"], "10.1.1.1"),
        ("10.0.0.5", [""], "10.0.0.5"),
        ("somewhere", ["203.0.113.9"], "somewhere"),
    ],
)
def test_the_sender_is_the_last_hop_that_is_no_trusted_proxy(
    client: str, said: list[str], sender: str
) -> None:
    assert seen(client, *said) == sender


def test_an_entry_that_is_no_network_is_named() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/33"):
        TrustedProxies(["10.0.0.0/33"])


async def test_limits_by_address_count_senders_behind_a_trusted_proxy_and_nobody_chooses_an_address() -> None:
    limits = HubLimits(requests_per_s=0.001, burst=2)
    async with hub_in_process() as rig:
        for proxies, counted in ((TrustedProxies(["127.0.0.1"]), 200), (None, 429)):
            hub = Hub(rig.engine, rig.documents, SystemClock(), limits=limits, proxies=proxies)
            for sender in ("203.0.113.1", "203.0.113.2"):
                for _ in range(2):
                    headers = {"host": "h", "x-forwarded-for": sender}
                    answer = await ask_app(hub, "GET", "/health", headers, b"")
            assert answer.status == counted
