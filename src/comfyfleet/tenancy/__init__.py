"""Tenants, the keys that name them, and the databases that are theirs."""
