"""Agents: they poll, run jobs, report and drain. This package uses no store and no engine."""
