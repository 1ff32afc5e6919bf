"""The HTTP layer: connections, bodies, limits, credentials, routing."""
