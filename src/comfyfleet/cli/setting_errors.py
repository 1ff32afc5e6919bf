"""What is wrong with the value of a setting, in words for people. `settings.py` reads the values and raises errors."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text in quotes",
    "array": "a list",
    "object": "a table",
}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}
_EXPECTED = re.compile(r"Expected `([^`]+)`(?: (>=|<=|>|<) (\S+))?(?:, got `[^`]+`)?(?: - at `[^`]+`)?")

_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def misfit(shown: object, wanted: Any, problem: str) -> str:
    """`shown` is the value without secrets, `wanted` its type, and `problem` what the type checker says."""
    if choices := _choices(wanted):
        return f"{shown!r} is not allowed. Use one of: {', '.join(choices)}"
    found = _EXPECTED.fullmatch(problem)
    names = found[1].split(" | ") if found else []
    kinds = [_KINDS.get(name, "") for name in names if name != "null"]
    if found is None or not kinds or not all(kinds):
        return problem
    bound = f" {_BOUNDS[found[2]]} {found[3].removesuffix('.0')}" if found[2] else ""
    hint = ". Write it without quotes" if _NUMBER.fullmatch(str(shown)) and "got `str`" in problem else ""
    return f"{shown!r} is not {' or '.join(kinds)}{bound}{hint}"


def _choices(wanted: Any) -> list[str]:
    if get_origin(wanted) is Literal:
        return [str(each) for each in get_args(wanted)]
    return [choice for each in get_args(wanted) for choice in _choices(each)]
