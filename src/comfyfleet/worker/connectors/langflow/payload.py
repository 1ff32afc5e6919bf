"""The payload of a LangFlow job: which flow runs, and with what.

Pure: the hub reads a payload with it at submit, the connector before the run. It knows no server, so it cannot say
whether the flow or a component exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Literal, get_args

import msgspec

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.payload import PayloadReading, check_plain
from comfyfleet.model.workflow_graph import InvalidWorkflow

SERVICE = "langflow"

InputType = Literal["chat", "text", "any"]
OutputType = Literal["chat", "text", "any", "debug"]

FILES = "files"
"""The first part of an input place whose file is attached to the run: `files.picture`."""

_MAX_NAME = 500
_MAX_SESSION = 255
_MAX_COMPONENTS = 1_000
_MAX_NESTING = 64
"""LangFlow refuses deeper tweaks."""
_GLOBAL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_GLOBAL_VALUE = re.compile(r"[\x20-\x7e]{0,4096}")


class FlowCall(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a flow, as the caller asks for it."""

    flow: str
    input_value: str = ""
    input_type: InputType = "chat"
    output_type: OutputType | None = None
    tweaks: dict[str, dict[str, Any]] = {}
    globals: dict[str, str] = {}
    session_id: str | None = None
    output_ids: tuple[str, ...] = ()


def read_call(payload: Mapping[str, Any]) -> FlowCall:
    """Raises `InvalidWorkflow` that names the field, the cause and the next step."""
    if not isinstance(payload, Mapping):
        raise InvalidWorkflow("The LangFlow payload must be a JSON object with the field `flow`.")
    if "data" in payload:
        raise InvalidWorkflow(
            "The field `data` is refused: a graph contains the code of its components, which would run on the "
            "server. Save the flow in LangFlow and name it in `flow`."
        )
    unknown = sorted(str(name) for name in set(payload) - set(_READERS))
    if unknown:
        raise InvalidWorkflow(
            f"A LangFlow payload has no field `{unknown[0][:100]}`. It has: {', '.join(_READERS)}."
        )
    if "flow" not in payload:
        raise InvalidWorkflow("The field `flow` is missing: give the id, endpoint name or name of a flow.")
    check_plain(payload)
    fields: dict[str, Any] = {name: _READERS[name](name, value) for name, value in payload.items()}
    return FlowCall(**fields)


class LangFlowPayload:
    """The `PayloadFormat` of LangFlow."""

    service = SERVICE

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        call = read_call(payload)
        structure = [call.flow, {name: sorted(fields) for name, fields in call.tweaks.items()}]
        digest = sha256(b"langflow/1\n" + msgspec.json.encode(structure, order="deterministic")).hexdigest()
        return PayloadReading(
            dict(payload),
            WorkflowHash(digest),
            models=frozenset({call.flow}),
            # Only the server knows the components of the flow.
            inputs=None,
        )

    def json_schema(self) -> dict[str, Any]:
        text = {"type": "string"}
        return {
            "type": "object",
            "required": ["flow"],
            "additionalProperties": False,
            "properties": {
                "flow": {**text, "minLength": 1, "description": "Id, endpoint name or name of the flow."},
                "input_value": {**text, "description": "The text for the flow's input."},
                "input_type": {
                    **text,
                    "enum": list(get_args(InputType)),
                    "description": "Only for servers before 1.11: the kind of input component that gets the text.",
                },
                "output_type": {
                    **text,
                    "enum": list(get_args(OutputType)),
                    "description": "`chat` or `text` keeps only outputs of such components. Default: all outputs.",
                },
                "tweaks": {
                    "type": "object",
                    "description": "Values of component fields, by component id or display name.",
                    "additionalProperties": {"type": "object"},
                },
                "globals": {
                    "type": "object",
                    "description": "Global variables for this run. LangFlow gets the names in capitals.",
                    "additionalProperties": text,
                },
                "session_id": {
                    **text,
                    "description": "The chat memory. Default: one of its own per attempt.",
                },
                "output_ids": {
                    "type": "array",
                    "items": text,
                    "description": "Keep only the outputs of these components. Default: all outputs.",
                },
            },
        }


def _wrong(name: str, expected: str, value: Any) -> InvalidWorkflow:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    found = kinds.get(type(value), "a number")
    return InvalidWorkflow(f"The field `{name}` must be {expected}, not {found}.")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return value


def _flow(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "the id, endpoint name or name of a flow", value)
    if not value.strip() or len(value) > _MAX_NAME:
        raise InvalidWorkflow(
            f"The field `flow` must be the id, endpoint name or name of a flow, with 1 to {_MAX_NAME} characters."
        )
    if value != value.strip():
        raise InvalidWorkflow(
            "The field `flow` begins or ends with a space, so no worker would match it. Remove the space, or give the "
            "id of the flow if its name has one."
        )
    return value


def _choice(choices: tuple[str, ...], name: str, value: Any) -> str:
    if value not in choices or not isinstance(value, str):
        shown = value[:100] if isinstance(value, str) else type(value).__name__
        raise InvalidWorkflow(f"The field `{name}` must be one of {', '.join(choices)}, not {shown!r}.")
    return value


def _session(name: str, value: Any) -> str:
    text = _text(name, value)
    if not 1 <= len(text) <= _MAX_SESSION:
        raise InvalidWorkflow(f"The field `session_id` must have 1 to {_MAX_SESSION} characters.")
    return text


def _tweaks(name: str, value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise _wrong(name, "an object of components", value)
    if len(value) > _MAX_COMPONENTS:
        raise InvalidWorkflow(f"The field `tweaks` names more than {_MAX_COMPONENTS} components.")
    for component, fields in value.items():
        if not isinstance(fields, dict):
            raise InvalidWorkflow(
                f"The tweak `{component[:100]}` must be an object of fields, such as "
                '{"ChatInput-a": {"sender_name": "Ada"}}: name the component first, then the field.'
            )
        if "code" in fields:
            raise InvalidWorkflow(
                f"The tweak `{component[:100]}.code` is refused: it would replace the component's code, which runs "
                "on the server. Change the component in LangFlow."
            )
        if _depth(fields) > _MAX_NESTING:
            raise InvalidWorkflow(
                f"The tweak `{component[:100]}` is nested deeper than {_MAX_NESTING} levels, which LangFlow refuses."
            )
    return value


def _globals(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(name, "an object of texts", value)
    seen: set[str] = set()
    for variable, text in value.items():
        if not _GLOBAL_NAME.fullmatch(variable):
            raise InvalidWorkflow(
                f"The global variable `{variable[:100]}` must consist of letters, digits, `_` and `-`, because "
                "LangFlow takes it as an HTTP header."
            )
        if variable.upper() in seen:
            raise InvalidWorkflow(
                f"The global variable `{variable}` is given twice: LangFlow does not distinguish capitals in names."
            )
        seen.add(variable.upper())
        if not isinstance(text, str) or not _GLOBAL_VALUE.fullmatch(text):
            raise InvalidWorkflow(
                f"The value of the global variable `{variable}` must be a text of at most 4096 printable ASCII "
                "characters, because LangFlow takes it as an HTTP header. Give other values in `tweaks`."
            )
    return value


def _output_ids(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(name, "a list of component ids", value)
    return tuple(value)


def _depth(value: Any) -> int:
    level, found = [value], 0
    while level and found <= _MAX_NESTING:
        found += 1
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return found


_READERS: dict[str, Callable[[str, Any], object]] = {
    "flow": _flow,
    "input_value": _text,
    "input_type": lambda name, value: _choice(get_args(InputType), name, value),
    "output_type": lambda name, value: _choice(get_args(OutputType), name, value),
    "tweaks": _tweaks,
    "globals": _globals,
    "session_id": _session,
    "output_ids": _output_ids,
}
