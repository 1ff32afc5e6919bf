"""Tenants, API keys, webhooks and tenant databases."""
