"""The audit log of a hub: who changed what, chained by hashes."""
