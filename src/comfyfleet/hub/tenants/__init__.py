"""Tenants at a hub: their handlers, admission, credits and background work."""
