"""Real processes, killed for real: callers, engines, workers and servers, and a checker that reads only their logs."""
