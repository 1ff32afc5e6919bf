"""Clients of a hub: `FleetClient` for programs with an event loop, `SyncFleetClient` for those without."""
