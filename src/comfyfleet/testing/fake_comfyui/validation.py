"""Validates a prompt before it is queued.

It gives the refusals of `POST /prompt` with the real server's types and texts, and raises where a strange
body makes the real one raise. `execution` runs prompts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from comfyfleet.testing.fake_comfyui.catalogue import INPUT_IMAGES, InputSpec, ListNames, NodeClass
from comfyfleet.testing.fake_comfyui.disk import FakeDisk
from comfyfleet.testing.fake_comfyui.settings import Behaviour

_LIST_SHOWN_MAX = 20
_FRAME = '  File "/srv/comfyui/execution.py", line {line}, in {function}\n    <source line>\n'


class ValidationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs that may run, and the errors. A prompt with at least one valid output is accepted."""

    outputs: tuple[str, ...] = ()
    error: dict[str, Any] | None = None
    node_errors: dict[str, Any] = msgspec.field(default_factory=dict)
    blocks_for_s: float = 0.0
    """How long the validation blocks the whole server."""


class _Result(msgspec.Struct):
    is_valid: bool
    reasons: list[dict[str, Any]]


class _Cycle(Exception):
    def __init__(self, nodes: list[str]) -> None:
        self.nodes = nodes


def problem(kind: str, message: str, details: str = "", **extra_info: Any) -> dict[str, Any]:
    """An error in ComfyUI's form."""
    return {"type": kind, "message": message, "details": details, "extra_info": extra_info}


class Validator:
    """Validates prompts against the installed classes, models and input files."""

    def __init__(
        self, catalogue: dict[str, NodeClass], list_names: ListNames, disk: FakeDisk, behaviour: Behaviour
    ) -> None:
        self._catalogue = catalogue
        self._list_names = list_names
        self._disk = disk
        self._behaviour = behaviour

    def validate(self, prompt: Any, targets: Any | None) -> ValidationResult:
        """Raises (and so gives a 500) where the real server does."""
        if self._behaviour.is_recent and isinstance(prompt, list):
            raise TypeError("list indices must be integers or slices, not str")
        outputs: list[str] = []
        for node_id in prompt:
            refusal = self._unknown_node(node_id, prompt[node_id])
            if refusal is not None:
                return ValidationResult(error=refusal)
            if self._catalogue[prompt[node_id]["class_type"]].output_node and (
                targets is None or node_id in targets
            ):
                outputs.append(node_id)
        if not outputs:
            return ValidationResult(error=problem("prompt_no_outputs", "Prompt has no outputs"))
        return _Judgement(self._catalogue, self._list_names, self._disk, self._behaviour, prompt).judge(
            outputs
        )

    def _unknown_node(self, node_id: str, node: Any) -> dict[str, Any] | None:
        details = f"Node ID '#{node_id}'"
        # No type check on purpose: a number here raises TypeError, as on the real server.
        if "class_type" not in node:
            if not self._behaviour.says_missing_node_type:
                return problem(
                    "invalid_prompt",
                    "Cannot execute because a node is missing the class_type property.",
                    details,
                )
            title = node.get("_meta", {}).get("title") if isinstance(node, dict) else None
            return problem(
                "missing_node_type",
                f"Node '{title or f'ID #{node_id}'}' has no class_type. "
                "The workflow may be corrupted or a custom node is missing.",
                details,
                node_id=node_id,
                class_type=None,
                node_title=title,
            )
        class_type = node["class_type"]
        if class_type in self._catalogue:
            return None
        if not self._behaviour.says_missing_node_type:
            message = f"Cannot execute because node {class_type} does not exist."
            return problem("invalid_prompt", message, details)
        title = node.get("_meta", {}).get("title", class_type)
        return problem(
            "missing_node_type",
            f"Node '{title}' not found. The custom node may not be installed.",
            details,
            node_id=node_id,
            class_type=class_type,
            node_title=title,
        )


class _Judgement:
    """The validation of one prompt."""

    def __init__(
        self,
        catalogue: dict[str, NodeClass],
        list_names: ListNames,
        disk: FakeDisk,
        behaviour: Behaviour,
        prompt: dict[str, Any],
    ) -> None:
        self._catalogue = catalogue
        self._list_names = list_names
        self._disk = disk
        self._behaviour = behaviour
        self._prompt = prompt
        self._results: dict[str, _Result] = {}
        self._blocks_for_s = 0.0

    def judge(self, outputs: list[str]) -> ValidationResult:
        good: list[str] = []
        texts: list[str] = []
        node_errors: dict[str, Any] = {}
        for output in outputs:
            result = self._check_output(output)
            if result.is_valid:
                good.append(output)
                continue
            texts += [f"{reason['message']}: {reason['details']}" for reason in result.reasons]
            for node_id, found in self._results.items():
                # Nodes after a faulty one are invalid too, without their own error.
                if not found.is_valid and found.reasons:
                    entry = node_errors.setdefault(
                        node_id,
                        {
                            "errors": found.reasons,
                            "dependent_outputs": [],
                            "class_type": self._prompt[node_id]["class_type"],
                        },
                    )
                    entry["dependent_outputs"].append(output)
        error = None
        if not good:
            error = problem(
                "prompt_outputs_failed_validation", "Prompt outputs failed validation", "\n".join(texts)
            )
        return ValidationResult(
            outputs=tuple(good), error=error, node_errors=node_errors, blocks_for_s=self._blocks_for_s
        )

    def _check_output(self, output: str) -> _Result:
        try:
            return self._check(output, ())
        except _Cycle as cycle:
            self._blame_cycle(cycle.nodes)
            result = self._results[output] = _Result(
                False, self._results.get(output, _Result(False, [])).reasons
            )
            return result
        except Exception as error:
            reason = problem(
                "exception_during_validation",
                "Exception when validating node",
                str(error),
                exception_type=type(error).__name__,
                traceback=[_FRAME.format(line=1043, function="validate_prompt")],
            )
            result = self._results[output] = _Result(False, [reason])
            return result

    def _blame_cycle(self, nodes: list[str]) -> None:
        # Older releases have no error type for cycles: every node is invalid without a message.
        chain = " -> ".join(f"{node} ({self._prompt[node]['class_type']})" for node in [*nodes, nodes[0]])
        for node in nodes:
            reasons = []
            if self._behaviour.says_dependency_cycle:
                reasons = [
                    problem(
                        "dependency_cycle",
                        "Dependency cycle detected",
                        chain,
                        node_id=node,
                        cycle_nodes=list(nodes),
                    )
                ]
            self._results[node] = _Result(False, reasons)

    def _check(self, node_id: str, path: tuple[str, ...]) -> _Result:
        if node_id in self._results:
            return self._results[node_id]
        if node_id in path:
            raise _Cycle(list(path[path.index(node_id) :]))
        inputs: dict[str, Any] = self._prompt[node_id]["inputs"]
        node_class = self._catalogue[self._prompt[node_id]["class_type"]]
        reasons: list[dict[str, Any]] = []
        is_valid = True
        for name, spec in {**node_class.required, **node_class.optional}.items():
            if name not in inputs:
                if name in node_class.required:
                    reasons.append(
                        problem("required_input_missing", "Required input is missing", name, input_name=name)
                    )
            elif isinstance(inputs[name], list):
                is_sound, reason = self._check_link(name, spec, inputs[name], (*path, node_id))
                is_valid = is_valid and is_sound
                reasons += [reason] if reason else []
            else:
                reason = self._check_value(name, spec, inputs)
                reasons += [reason] if reason else []
        if node_class.slow_validation_input is not None:
            self._blocks_for_s += float(inputs.get(node_class.slow_validation_input, 0.0))
        result = self._results[node_id] = _Result(is_valid and not reasons, reasons)
        return result

    def _check_link(
        self, name: str, spec: InputSpec, link: list[Any], path: tuple[str, ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        config = self._config(spec)
        if len(link) != 2:
            return False, problem(
                "bad_linked_input",
                "Bad linked input, must be a length-2 list of [node_id, slot_index]",
                name,
                input_name=name,
                input_config=config,
                received_value=link,
            )
        source = link[0]
        received = self._catalogue[self._prompt[source]["class_type"]].outputs[link[1]]
        if not _fits(received, config[0]):
            return False, problem(
                "return_type_mismatch",
                "Return type mismatch between linked nodes",
                f"{name}, received_type({received}) mismatch input_type({config[0]})",
                input_name=name,
                input_config=config,
                received_type=received,
                linked_node=link,
            )
        try:
            return self._check(source, path).is_valid, None
        except _Cycle:
            raise
        except Exception as error:
            reason = problem(
                "exception_during_inner_validation",
                "Exception when validating inner node",
                str(error),
                input_name=name,
                input_config=config,
                exception_message=str(error),
                exception_type=type(error).__name__,
                traceback=[_FRAME.format(line=838, function="validate_inputs")],
                linked_node=link,
            )
            self._results[source] = _Result(False, [reason])
            return False, None

    def _check_value(self, name: str, spec: InputSpec, inputs: dict[str, Any]) -> dict[str, Any] | None:
        value = inputs[name]
        config = self._config(spec)
        try:
            if isinstance(value, dict) and "__value__" in value:
                value = inputs[name] = value["__value__"]
            if spec.type in _CONVERSIONS:
                value = inputs[name] = _CONVERSIONS[spec.type](value)
        except Exception as error:
            return problem(
                "invalid_input_type",
                f"Failed to convert an input value to a {spec.type} value",
                f"{name}, {value}, {error}",
                input_name=name,
                input_config=config,
                received_value=value,
                exception_message=str(error),
            )
        if spec.folder == INPUT_IMAGES:
            if self._disk.find_input(str(value)) is None:
                details = f"{name} - Invalid image file: {value}"
                return problem(
                    "custom_validation_failed", "Custom validation failed for node", details, input_name=name
                )
            return None
        given: dict[str, Any] = {"input_name": name, "input_config": config, "received_value": value}
        if "min" in spec.options and value < spec.options["min"]:
            message = f"Value {value} smaller than min of {spec.options['min']}"
            return problem("value_smaller_than_min", message, name, **given)
        if "max" in spec.options and value > spec.options["max"]:
            message = f"Value {value} bigger than max of {spec.options['max']}"
            return problem("value_bigger_than_max", message, name, **given)
        is_checked = not spec.new_style or self._behaviour.checks_new_style_choices
        allowed = spec.allowed(self._list_names) if is_checked else None
        if allowed is not None and value not in allowed:
            shown = str(allowed)
            if len(allowed) > _LIST_SHOWN_MAX:
                shown, given["input_config"] = f"(list of length {len(allowed)})", None
            return problem(
                "value_not_in_list", "Value not in list", f"{name}: '{value}' not in {shown}", **given
            )
        return None

    def _config(self, spec: InputSpec) -> list[Any]:
        return [spec.declared_type(self._list_names), spec.declared_options()]


_CONVERSIONS: dict[str, Any] = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}


def _fits(received: str, wanted: str | list[str]) -> bool:
    if isinstance(wanted, list):
        return False
    if received == wanted or "*" in (received, wanted):
        return True
    return bool({part.strip() for part in received.split(",")} & {part.strip() for part in wanted.split(",")})
