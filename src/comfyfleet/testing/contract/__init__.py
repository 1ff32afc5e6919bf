"""What every store keeps to, as tests: inherit `StoreContract`, say how to make a store, and pytest does the rest.

A store of your own passes the same tests as those of the package, random days beside the memory store included. Needs
pytest, pytest-asyncio and hypothesis (`pip install 'comfyfleet[contract]'`); nothing else in the package imports this.
"""

from __future__ import annotations

import pytest

# Its modules are imported after it: a broken rule is then told with the values it was broken by, not as a bare line.
_MODULES = (
    "differential",
    "documents",
    "fair_share",
    "full_disk",
    "held_jobs",
    "job_transfer",
    "leases",
    "ledger_driver",
    "races",
    "settlement",
    "state",
    "statistics",
    "store_bench",
    "tenant_documents",
    "tenant_ledger",
    "tenants",
)
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _MODULES))
