"""HTTP as such: connections, bodies, limits, credentials, routing."""
