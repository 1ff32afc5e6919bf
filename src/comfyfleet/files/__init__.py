"""Where inputs and outputs lie, and short-lived grants to them."""
