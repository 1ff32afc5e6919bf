"""Webhooks: their handlers, the dispatcher of deliveries, and the sender."""
