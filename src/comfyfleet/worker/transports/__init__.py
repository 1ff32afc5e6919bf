"""The workers' door over the wire: a `WorkerApi` for each way to reach a hub."""
