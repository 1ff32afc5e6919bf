"""The hub: both doors of an engine, published over HTTP. No policy, no SQL."""
