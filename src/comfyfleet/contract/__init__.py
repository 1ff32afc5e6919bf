"""What every store keeps to, as tests: inherit `StoreContract`, say how to make a store, and pytest does the rest.

A store of your own passes the same tests as those of the package, random days beside the memory store included. Needs
pytest, pytest-asyncio and hypothesis (`pip install 'comfyfleet[contract]'`); nothing else in the package imports this.
"""

from __future__ import annotations

import pytest

# Its modules are imported after it: a broken rule is then told with the values it was broken by, not as a bare line.
_MODULES = (
    "bench",
    "cabinet",
    "differential",
    "holding",
    "keeping",
    "leasing",
    "moving",
    "racing",
    "refusing",
    "settling",
    "tenant_documents",
    "tenants",
)
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _MODULES))
