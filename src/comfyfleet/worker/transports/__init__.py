"""One `WorkerApi` for each transport to a hub."""
