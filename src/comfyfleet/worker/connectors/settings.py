"""The settings of a connector: the worker's table `[connectors.NAME]` as a struct of the connector.

Each connector declares its settings as a struct with defaults; the command line reads the table, the environment and
secret files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

_PLACE = re.compile(r" - at `\$\.?(.*)`$")


def converted_settings(given: Mapping[str, Any], kind: type[T]) -> T:
    """The settings as a struct. Raises `ValueError` that names the setting and the cause, and never a value.

    Values of the environment are texts, so a text that can be read as the type is accepted."""
    known = {each.encode_name for each in msgspec.structs.fields(kind)}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"there is no setting {unknown[0]!r}; known: {', '.join(sorted(known)) or 'none'}")
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        name = "" if place is None else place[1]
        cause = _PLACE.sub("", str(error)) if name else str(error)
        # A message about a choice repeats the value, and a value may be a secret.
        cause = re.sub(r"enum value '.*'", "choice", cause)
        raise ValueError(f"the setting {name!r} is not valid: {cause}") from None
