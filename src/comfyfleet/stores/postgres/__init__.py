"""The PostgreSQL store: SQL durability for teams that want it. `store.py` is its door."""

from __future__ import annotations

from comfyfleet.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
