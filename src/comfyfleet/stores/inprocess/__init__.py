"""Shared by the memory and the SQLite store: open jobs in this process, their lanes, shares and blocks."""
