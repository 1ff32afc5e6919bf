"""Agents: poll, run, report, drain. No store and no engine is known here."""
