"""The databases of tenants, from the settings of a hub. Each is opened when the first tenant needs it."""

from __future__ import annotations

from urllib.parse import quote

from comfyfleet.cli.settings import Resolved
from comfyfleet.tenancy.pools import DEFAULT_POOL


def pool_urls(resolved: Resolved) -> dict[str, str]:
    """Beside an embedded store there is one without being asked for; once tenants lie in it, it stays when others are
    named. On a shared one every hub must name the same, so nothing is guessed."""
    chosen = resolved.values
    if not (chosen.store is None or chosen.store.startswith("sqlite:")):
        return dict(chosen.pools)
    file = (resolved.data / "tenants.db").resolve()
    if chosen.pools and not file.exists():
        # Whoever names every pool means those: a tenant without one is refused, not put somewhere else.
        return dict(chosen.pools)
    return {DEFAULT_POOL: f"sqlite:///{quote(str(file))}", **chosen.pools}
