"""The shell round policy: load, decide, write, publish. Clocks, tasks and timers live here and nowhere below."""
