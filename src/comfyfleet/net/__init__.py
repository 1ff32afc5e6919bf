"""Safe calls to URLs that callers give, and explanations of failed connections."""
