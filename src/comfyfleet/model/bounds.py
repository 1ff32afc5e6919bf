"""Bounds of values that arrive from outside: types with limits, which decoders check and the OpenAPI document shows.

A struct of the model may use them only where nothing that a store holds can exceed them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Names = Annotated[tuple[Name, ...], Meta(max_length=1_000)]
Text = Annotated[str, Meta(max_length=256)]
Reason = Annotated[str, Meta(max_length=500)]
Url = Annotated[str, Meta(min_length=1, max_length=2_048)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Amount = Annotated[float, Meta(ge=0, le=1e6)]
Count = Annotated[int, Meta(ge=0, le=100_000)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
"""JavaScript can represent it."""
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
PageSize = Annotated[int, Meta(ge=1, le=1_000)]
