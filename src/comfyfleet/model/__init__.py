"""Nouns: frozen values without I/O. Everything else in the package speaks in these."""
