"""Tenants and the keys that name them."""
