"""News and wake-ups between the parts of a process or a fleet. It may lose a message and holds no state."""
