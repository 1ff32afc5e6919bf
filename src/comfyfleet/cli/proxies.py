"""The setting `trusted_proxies` as the hub understands it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfyfleet.hub.proxies import TrustedProxies

if TYPE_CHECKING:
    from comfyfleet.cli.settings import Resolved


def proxies_of(resolved: Resolved) -> TrustedProxies:
    try:
        return TrustedProxies(resolved.values.trusted_proxies)
    except ValueError as error:
        raise resolved.wrong("trusted_proxies", str(error)) from error
