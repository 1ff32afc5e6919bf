"""Checks a value against the part of JSON Schema that payload schemas use. A keyword outside it is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANNOTATIONS = frozenset(
    {
        "$schema",
        "$id",
        "$defs",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "format",
    }
)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (Mapping,),
    "array": (list, tuple),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


def accepts(schema: Mapping[str, Any] | bool, value: Any) -> str | None:
    """None: the schema accepts the value. Otherwise where and why not."""
    return _Check(schema).problem(schema, value, "the payload")


class _Check:
    def __init__(self, root: Mapping[str, Any] | bool) -> None:
        self._root = root

    def problem(self, schema: Mapping[str, Any] | bool, value: Any, where: str) -> str | None:
        if isinstance(schema, bool):
            return None if schema else f"{where} is not allowed"
        for keyword, rule in schema.items():
            if keyword in _ANNOTATIONS or keyword in ("then", "else"):
                continue
            found = self._keyword(schema, keyword, rule, value, where)
            if found is not None:
                return found
        return None

    def _keyword(
        self, schema: Mapping[str, Any], keyword: str, rule: Any, value: Any, where: str
    ) -> str | None:
        is_met: bool
        match keyword:
            case "$ref":
                return self.problem(self._resolved(rule), value, where)
            case "type":
                is_met = any(_is(name, value) for name in ([rule] if isinstance(rule, str) else rule))
            case "enum":
                is_met = value in rule
            case "const":
                is_met = bool(value == rule)
            case "allOf":
                return next(filter(None, (self.problem(each, value, where) for each in rule)), None)
            case "anyOf":
                is_met = any(self.problem(each, value, where) is None for each in rule)
            case "oneOf":
                is_met = sum(self.problem(each, value, where) is None for each in rule) == 1
            case "not":
                is_met = self.problem(rule, value, where) is not None
            case "if":
                branch = "then" if self.problem(rule, value, where) is None else "else"
                return self.problem(schema.get(branch, True), value, where)
            case "properties" | "required" | "additionalProperties" | "minProperties" | "maxProperties":
                if not isinstance(value, Mapping):
                    return None
                return self._of_object(schema, keyword, rule, value, where)
            case "patternProperties" | "propertyNames":
                if not isinstance(value, Mapping):
                    return None
                return self._of_names(keyword, rule, value, where)
            case "items" | "prefixItems" | "minItems" | "maxItems" | "uniqueItems":
                if not isinstance(value, list):
                    return None
                return self._of_array(schema, keyword, rule, value, where)
            case "minLength" | "maxLength" | "pattern":
                is_met = not isinstance(value, str) or _fits_text(keyword, rule, value)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf":
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                is_met = not is_number or _fits_number(keyword, rule, value)
            case _:
                raise AssertionError(f"{keyword!r} in a payload schema is not known here; use a simpler one")
        return None if is_met else f"{where}: {value!r:.100} against {keyword} {rule!r:.100}"

    def _of_object(
        self, schema: Mapping[str, Any], keyword: str, rule: Any, value: Mapping[str, Any], where: str
    ) -> str | None:
        if keyword == "required":
            missing = [name for name in rule if name not in value]
            return f"{where} lacks {missing}" if missing else None
        if keyword in ("minProperties", "maxProperties"):
            is_met = len(value) >= rule if keyword == "minProperties" else len(value) <= rule
            return None if is_met else f"{where} has {len(value)} fields"
        if keyword == "properties":
            return self._each({name: rule[name] for name in rule if name in value}, value, where)
        patterns = schema.get("patternProperties", {})
        more = {
            name: rule
            for name in value
            if name not in schema.get("properties", {})
            and not any(re.search(each, name) for each in patterns)
        }
        return self._each(more, value, where)

    def _of_names(self, keyword: str, rule: Any, value: Mapping[str, Any], where: str) -> str | None:
        if keyword == "propertyNames":
            return next(filter(None, (self.problem(rule, name, where) for name in value)), None)
        matched = {
            name: schema for pattern, schema in rule.items() for name in value if re.search(pattern, name)
        }
        return self._each(matched, value, where)

    def _of_array(
        self, schema: Mapping[str, Any], keyword: str, rule: Any, value: list[Any], where: str
    ) -> str | None:
        match keyword:
            case "minItems":
                return None if len(value) >= rule else f"{where} has {len(value)} items"
            case "maxItems":
                return None if len(value) <= rule else f"{where} has {len(value)} items"
            case "uniqueItems":
                texts = [repr(each) for each in value]
                return f"{where} repeats an item" if rule and len(set(texts)) < len(texts) else None
            case "prefixItems":
                pairs = list(zip(rule, value, strict=False))
            case _:
                pairs = [(rule, each) for each in value[len(schema.get("prefixItems", ())) :]]
        found = (self.problem(each, item, f"{where}[{index}]") for index, (each, item) in enumerate(pairs))
        return next(filter(None, found), None)

    def _each(self, schemas: Mapping[str, Any], value: Mapping[str, Any], where: str) -> str | None:
        found = (self.problem(each, value[name], f"{where}.{name}") for name, each in schemas.items())
        return next(filter(None, found), None)

    def _resolved(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            if part:
                found = found[part.replace("~1", "/").replace("~0", "~")]
        return found


def _is(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _fits_text(keyword: str, rule: Any, value: str) -> bool:
    if keyword == "pattern":
        return re.search(rule, value) is not None
    return bool(len(value) >= rule if keyword == "minLength" else len(value) <= rule)


def _fits_number(keyword: str, rule: Any, value: float) -> bool:
    match keyword:
        case "minimum":
            return bool(value >= rule)
        case "maximum":
            return bool(value <= rule)
        case "exclusiveMinimum":
            return bool(value > rule)
        case "exclusiveMaximum":
            return bool(value < rule)
        case _:
            return bool(value % rule == 0)
