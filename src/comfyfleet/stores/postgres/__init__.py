"""The PostgreSQL store; `store.py` implements the port."""

from __future__ import annotations

from comfyfleet.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
