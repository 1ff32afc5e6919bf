"""Stores keep state and compare guards; they never decide. All pass one contract and are opened by URL."""
