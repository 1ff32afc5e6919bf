"""Calls that the hub makes to addresses others have named."""
