"""A hub from outside: `FleetClient` for programs with an event loop, `SyncFleetClient` for those without."""
