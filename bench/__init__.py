"""The scoreboard: how the product does against the goals it has set itself. `python -m bench` runs all of it."""
