"""The WebSocket at `/hub`: sessions of callers, monitors, workers and agents."""
