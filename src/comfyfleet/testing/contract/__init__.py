"""The store contract as tests: inherit `StoreContract` and provide a fixture that makes a store.

Your own store passes the same tests as the package's stores, including random days beside the memory store.
It needs pytest, pytest-asyncio and hypothesis (`pip install 'comfyfleet[contract]'`); the package never
imports it.
"""

from __future__ import annotations

import pytest

# Registered before the modules are imported, so that pytest shows the values of a failed assertion.
_MODULES = (
    "connector",
    "connector_faults",
    "connector_plugin",
    "connector_runs",
    "connector_scene",
    "differential",
    "documents",
    "fair_share",
    "full_disk",
    "held_jobs",
    "job_transfer",
    "leases",
    "ledger_driver",
    "load_times",
    "payload_format",
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
