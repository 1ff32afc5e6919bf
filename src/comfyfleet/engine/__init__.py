"""The engine runs policy against a store: load, decide, write, publish. Clocks and timers live here."""
