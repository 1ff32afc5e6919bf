"""Simulated fleets: the real engine on simulated time, other policies beside it, reports, and a simulation of faults."""
