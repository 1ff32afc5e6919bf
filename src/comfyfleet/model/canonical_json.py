"""Canonical JSON: the bytes that hashes and keys are computed over. docs/workflow-hash.md specifies it.

The form is RFC 8785 with two differences, because seeds can exceed 2**53. Integral numbers have all their digits,
whether they arrive as integer or float. Keys are sorted by code point, which is also the order of their UTF-8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from math import isfinite
from typing import Any

MAX_NESTING = 64
MAX_INTEGER_BITS = 1024
"""Every finite double fits. Without this bound the interpreter's limit on digits would apply."""


class NotCanonicalError(ValueError):
    """The value has no canonical JSON text. The message names the part and the reason."""


def canonical_json(value: Any, *, max_nesting: int = MAX_NESTING) -> bytes:
    """Encode a JSON value in canonical form. Raises `NotCanonicalError` for a value that is not JSON."""
    parts: list[str] = []
    _write(value, parts.append, max_nesting)
    try:
        return "".join(parts).encode()
    except UnicodeEncodeError as error:
        raise NotCanonicalError("a string contains a lone surrogate, which UTF-8 cannot encode") from error


def check_canonical(value: Any, *, max_nesting: int = MAX_NESTING) -> None:
    """Raise what `canonical_json` would raise, without building the text."""
    kind = type(value)
    if value is None or kind is bool or (kind is str and value.isascii()):
        return
    if kind is list and value and max_nesting:
        for item in value:
            check_canonical(item, max_nesting=max_nesting - 1)
    elif kind is dict and value and max_nesting:
        for name in value:
            if type(name) is not str:
                canonical_json({name: None})
            check_canonical(name)
            check_canonical(value[name], max_nesting=max_nesting - 1)
    elif kind is int or kind is float:
        canonical_number(value)
    else:
        canonical_json(value, max_nesting=max_nesting)


def canonical_number(number: int | float) -> str:
    """All digits for an integral number, else the shortest form as ECMAScript writes it."""
    if isinstance(number, float):
        if not isfinite(number):
            raise NotCanonicalError(f"{number} is not a JSON number: use a finite number or null")
        if not number.is_integer():
            return _fraction(number)
        return str(int(number))
    if number.bit_length() > MAX_INTEGER_BITS:
        raise NotCanonicalError(f"an integer has more than {MAX_INTEGER_BITS} bits: send it as a string")
    return int.__repr__(number)


def _fraction(number: float) -> str:
    text = float.__repr__(number)
    if "e" not in text:
        return text
    # Only small numbers get here, as every double from 2**52 on is integral. Python uses exponents below 1e-4 and
    # pads them to two digits. ECMAScript uses exponents below 1e-6, without padding.
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if power < -6:
        return f"{mantissa}e{power}"
    sign = "-" if mantissa[0] == "-" else ""
    digits = mantissa.lstrip("-").replace(".", "")
    return f"{sign}0.{'0' * (-power - 1)}{digits}"


def _write(value: Any, write: Callable[[str], None], levels: int) -> None:
    kind = type(value)
    if kind is str:
        write(encode_basestring(value))
    elif kind is int or kind is float:
        write(canonical_number(value))
    elif value is None:
        write("null")
    elif kind is bool:
        write("true" if value else "false")
    elif kind is dict:
        _write_object(value, write, levels)
    elif kind is list or kind is tuple:
        _write_array(value, write, levels)
    else:
        _write_relative(value, write, levels)


def _write_object(value: Mapping[Any, Any], write: Callable[[str], None], levels: int) -> None:
    if not levels:
        raise NotCanonicalError("the value is nested too deeply: flatten it")
    if not value:
        write("{}")
        return
    opening = "{"
    try:
        names = sorted(value)
    except TypeError:
        names = list(value)
    for name in names:
        if not isinstance(name, str):
            raise NotCanonicalError(f"a key is {type(name).__name__}, not a string: {name!r}")
        write(f"{opening}{encode_basestring(name)}:")
        _write(value[name], write, levels - 1)
        opening = ","
    write("}")


def _write_array(value: Any, write: Callable[[str], None], levels: int) -> None:
    if not levels:
        raise NotCanonicalError("the value is nested too deeply: flatten it")
    if not value:
        write("[]")
        return
    opening = "["
    for item in value:
        write(opening)
        _write(item, write, levels - 1)
        opening = ","
    write("]")


def _write_relative(value: Any, write: Callable[[str], None], levels: int) -> None:
    """Write subclasses and read-only views of the plain types. They are rare, so they come last."""
    if isinstance(value, str):
        write(encode_basestring(str.__str__(value)))
    elif isinstance(value, int | float):
        write(canonical_number(value))
    elif isinstance(value, Mapping):
        _write_object(value, write, levels)
    elif isinstance(value, list | tuple):
        _write_array(value, write, levels)
    else:
        raise NotCanonicalError(f"{type(value).__name__} is not a JSON type: {value!r:.80}")
