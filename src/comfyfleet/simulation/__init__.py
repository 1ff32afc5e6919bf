"""Simulated fleets: the real engine on simulated time, other policies beside it, reports, and random faults."""
