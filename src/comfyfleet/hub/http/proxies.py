"""Finds the address of the sender behind reverse proxies.

Any client can send `X-Forwarded-For`, so the hub reads it only from proxies that the operator trusts.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_HEADER = b"x-forwarded-for"
_MAX_HOPS = 100


class TrustedProxies:
    """`entries`: addresses, and networks such as 10.0.0.0/8."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Raises `ValueError` for an entry that is neither."""
        networks = []
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                raise ValueError(f"{entry!r} is neither an address nor a network: {error}") from error
        self._networks = tuple(networks)

    def with_sender(self, scope: Scope) -> Scope:
        """The scope with the sender's address in place of a trusted proxy's."""
        client = scope.get("client")
        if not self._networks or not client or not self._trusts(_parsed(client[0])):
            return scope
        sender = self._sender(_forwarded(scope["headers"]))
        return scope if sender is None else {**scope, "client": (sender, 0)}

    def _sender(self, hops: Sequence[str]) -> str | None:
        """The last hop that is not a trusted proxy: each proxy appends the address of its client."""
        sender = None
        for hop in reversed(hops):
            address = _parsed(hop)
            if address is None:
                break
            sender = str(address)
            if not self._trusts(address):
                break
        return sender

    def _trusts(self, address: _Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    values = [value.decode("latin-1") for name, value in headers if name == _HEADER]
    return [hop.strip() for hop in ",".join(values).split(",")][-_MAX_HOPS:]


def _parsed(text: str) -> _Address | None:
    """The address without the port that some proxies append."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # A dual-stack socket shows IPv4 addresses in this form.
    return getattr(address, "ipv4_mapped", None) or address
