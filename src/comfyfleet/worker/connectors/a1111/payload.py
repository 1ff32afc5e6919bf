"""Reads payloads of the service `a1111`: checks them and tells their identity and needs. Pure.

`request.py` makes the request to a server from a payload and the files of its job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec

from comfyfleet.model.payload import PayloadAmounts, PayloadReading, check_plain, payload_hash
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.worker.connectors.a1111.names import (
    Route,
    lora,
    module,
    plain,
    sampler,
    scheduler,
    script,
    upscaler,
    vae,
)

SERVICE = "a1111"
ROUTES: tuple[str, ...] = get_args(Route)
MAX_PICTURES = 256
"""Of one job: `batch_size` times `n_iter`."""

_MAX_ARGUMENTS = 10_000
"""Each may be a place for a file."""

COUNTS = ("width", "height", "steps", "batch_size", "n_iter")
SEEDS = ("seed", "subseed")
PROMPTS = ("prompt", "negative_prompt", "hr_prompt", "hr_negative_prompt")
TEXTS = (
    *PROMPTS,
    "sampler_name",
    "sampler_index",
    "scheduler",
    "script_name",
    "hr_upscaler",
    "hr_checkpoint_name",
    "hr_sampler_name",
    "hr_scheduler",
    "refiner_checkpoint",
    "upscaler_1",
    "upscaler_2",
)
PICTURES: Mapping[str, tuple[str, ...]] = {
    "txt2img": (),
    "img2img": ("init_images", "mask"),
    "extra-single-image": ("image",),
    "extra-batch-images": ("imageList",),
}
"""The fields that hold pictures. Those in `PICTURE_LISTS` hold several."""
PICTURE_LISTS = frozenset({"init_images", "imageList"})
_DEFAULT_STEPS, _DEFAULT_EDGE, _DEFAULT_SCALE = 50, 512, 2.0
"""Of the server, for fields that are left out."""
_FIXED: Mapping[str, Any] = {"send_images": True, "override_settings_restore_afterwards": True}
_SAME_CHECKPOINT = frozenset({"", "none", "use same checkpoint"})
_SAME_SAMPLER = frozenset({"", "use same sampler"})
_SAME_SCHEDULER = frozenset({"", "use same scheduler"})
_NO_VAE = frozenset({"", "none", "automatic"})
_LORA = re.compile(r"<lora:([^:>]+)[^>]*>")
_OTHER_NETWORK = re.compile(r"<(?!lora:)\w+:[^>]*>")
_READ_TEXTS = frozenset({*TEXTS, "script_args"})
"""The arguments of a script say nothing without its name."""
_READ_OPTIONS = frozenset({"sd_model_checkpoint", "sd_vae", "forge_additional_modules"})
_FOLDER_OPTION = re.compile(r"^outdir_|_dir$|_path$|filename_pattern$")
_URL = re.compile(r"\s*https?:", re.IGNORECASE)


class A1111Needs(msgspec.Struct, frozen=True):
    models: frozenset[str]
    node_classes: frozenset[str]


class A1111Format(msgspec.Struct, frozen=True):
    service: str = SERVICE

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        check_plain(payload)
        route, body = checked_parts(payload)
        _check_fields(body)
        _check_options(body)
        _check_pictures(route, body)
        needs = needs_of(route, body)
        if route in ("txt2img", "img2img"):
            # Without a seed the server draws one, so a retry would make another picture.
            body.setdefault("seed", -1)
            if body.get("subseed_strength"):
                body.setdefault("subseed", -1)
        structure = {
            "route": route,
            "has_second_pass": bool(body.get("enable_hr")),
            "options": sorted(body.get("override_settings") or {}),
            "models": sorted(needs.models),
            "node_classes": sorted(needs.node_classes),
        }
        return PayloadReading(
            {"route": route, "body": body},
            payload_hash(SERVICE, structure),
            models=needs.models,
            node_classes=needs.node_classes,
            seeds=tuple(f"body.{name}" for name in SEEDS if body.get(name) == -1),
            inputs=frozenset(f"body.{place}" for place in places_of(route, body)),
            amounts=amounts_of(route, body),
            unread=tuple(unread_of(route, body)),
        )

    def json_schema(self) -> dict[str, Any]:
        count = {"type": "integer", "minimum": 1}
        seed = {"type": "integer", "minimum": -1, "description": "-1: ComfyFleet draws one at submit."}
        picture = {"type": "string", "description": "Base64, with or without `data:image/…;base64,`. No URL."}
        fields: dict[str, Any] = {name: {"type": "string"} for name in TEXTS}
        fields |= dict.fromkeys(COUNTS, count) | dict.fromkeys(SEEDS, seed)
        fields |= {
            "override_settings": {
                "type": "object",
                "properties": {"sd_model_checkpoint": {"type": "string"}, "sd_vae": {"type": "string"}},
            },
            "alwayson_scripts": {"type": "object", "additionalProperties": {"type": "object"}},
            "init_images": {"type": "array", "items": picture},
            "mask": picture,
            "image": picture,
            "imageList": {
                "type": "array",
                "items": {"type": "object", "properties": {"data": picture, "name": {"type": "string"}}},
            },
        }
        return {
            "type": "object",
            "required": ["route", "body"],
            "additionalProperties": False,
            "properties": {
                "route": {"enum": list(ROUTES)},
                "body": {
                    "type": "object",
                    "description": "The body of the request to /sdapi/v1/{route}. Further fields of the server are "
                    "sent as they are.",
                    # The server's own documentation shows null for a field that is not given.
                    "properties": {
                        name: {**each, "type": [each["type"], "null"]} for name, each in fields.items()
                    },
                },
            },
        }


def checked_parts(payload: Mapping[str, Any]) -> tuple[Route, dict[str, Any]]:
    """The route and a copy of the body without nulls. Raises `InvalidWorkflow`."""
    if unknown := sorted(payload.keys() - {"route", "body"}):
        raise _invalid(unknown[0], "it is not known", 'Write {"route": …, "body": {…}}')
    route, body = payload.get("route"), payload.get("body")
    if route not in ROUTES:
        given = "it is missing" if "route" not in payload else f"{route!r:.100} is no route"
        raise _invalid("route", given, f"Choose one of: {', '.join(ROUTES)}")
    if not isinstance(body, Mapping):
        given = "it is missing" if "body" not in payload else "it is not an object"
        raise _invalid("body", given, f"Give the body of a request to /sdapi/v1/{route}")
    return route, {name: value for name, value in body.items() if value is not None}


def needs_of(route: Route, body: Mapping[str, Any]) -> A1111Needs:
    """Names as the inventory offers them (`names.py`)."""
    options = body.get("override_settings") or {}
    models: set[str] = set()
    if text := str(options.get("sd_model_checkpoint") or ""):
        models.add(plain(text))
    if (text := str(options.get("sd_vae") or "")).lower() not in _NO_VAE:
        models.add(vae(text))
    modules = options.get("forge_additional_modules")
    models |= (
        {module(name) for name in modules if isinstance(name, str)} if isinstance(modules, list) else set()
    )
    has_second_pass = route == "txt2img" and bool(body.get("enable_hr"))
    checkpoints = ["refiner_checkpoint", *(["hr_checkpoint_name"] if has_second_pass else [])]
    for field in checkpoints:
        if (text := str(body.get(field) or "")).lower() not in _SAME_CHECKPOINT:
            models.add(plain(text))
    upscalers = ["hr_upscaler"] if has_second_pass else []
    upscalers += ["upscaler_1", "upscaler_2"] if route.startswith("extra") else []
    for field in upscalers:
        if (text := str(body.get(field) or "")).lower() not in ("", "none"):
            models.add(upscaler(text))
    if not body.get("disable_extra_networks"):
        prompts = [body.get("prompt"), body.get("hr_prompt") if has_second_pass else None]
        models |= {
            lora(name.strip()) for text in prompts if text for name in _LORA.findall(_closed(str(text)))
        }
    return A1111Needs(frozenset(models), frozenset(_classes(route, body, has_second_pass)))


def _classes(route: Route, body: Mapping[str, Any], has_second_pass: bool) -> Iterator[str]:
    if route.startswith("extra"):
        return
    # As the server: the older field counts only without the newer one.
    if text := body.get("sampler_name") or body.get("sampler_index"):
        yield sampler(str(text))
    if text := body.get("scheduler"):
        yield scheduler(str(text))
    if has_second_pass:
        if (text := str(body.get("hr_sampler_name") or "")).lower() not in _SAME_SAMPLER:
            yield sampler(text)
        if (text := str(body.get("hr_scheduler") or "")).lower() not in _SAME_SCHEDULER:
            yield scheduler(text)
    for name in (body.get("script_name"), *(body.get("alwayson_scripts") or {})):
        if name:
            yield script(route, str(name))


def _closed(prompt: str) -> str:
    """Up to the last `>`. Without one, each `<` would be searched to the end of a prompt of megabytes."""
    return prompt[: prompt.rfind(">") + 1]


def unread_of(route: Route, body: Mapping[str, Any]) -> Iterator[str]:
    """Fields in which a text may name a model that `needs_of` does not see. Numbers name none."""
    for name, value in body.items():
        if name in PROMPTS:
            if _OTHER_NETWORK.search(_closed(value)):
                yield f"body.{name}"
        elif name == "script_name":
            # A script may choose models by number too.
            if value:
                yield f"body.{name}"
        elif name == "override_settings":
            for option, chosen in value.items():
                if option not in _READ_OPTIONS and any(_texts(chosen, option)):
                    yield f"body.{name}.{option[:100]}"
        elif name == "alwayson_scripts":
            for script_name, content in value.items():
                if content.get("args"):
                    yield f"body.{name}.{script_name[:100]}"
        elif name not in _READ_TEXTS and name not in PICTURES[route] and any(_texts(value, name)):
            yield f"body.{name[:100]}"


def places_of(route: Route, body: Mapping[str, Any]) -> Iterator[str]:
    """Where a file of the hub may go, as dotted paths below the body."""
    yield from PICTURES[route]
    for name, content in (body.get("alwayson_scripts") or {}).items():
        arguments = content.get("args") if isinstance(content, Mapping) else None
        for index, argument in enumerate(arguments if isinstance(arguments, list) else ()):
            if isinstance(argument, Mapping) and "." not in name:
                yield f"alwayson_scripts.{name}.args.{index}.image"
                yield f"alwayson_scripts.{name}.args.{index}.mask"


def amounts_of(route: Route, body: Mapping[str, Any]) -> PayloadAmounts | None:
    """None for upscaling, because the size of the picture is not known, and with a script, which may do anything."""
    if route.startswith("extra") or body.get("script_name"):
        return None
    steps = body.get("steps", _DEFAULT_STEPS)
    width, height = body.get("width", _DEFAULT_EDGE), body.get("height", _DEFAULT_EDGE)
    if route == "txt2img" and body.get("enable_hr"):
        steps = max(steps, _number(body, "hr_second_pass_steps", 0))
        scale = _number(body, "hr_scale", _DEFAULT_SCALE)
        width = max(width * scale, _number(body, "hr_resize_x", 0))
        height = max(height * scale, _number(body, "hr_resize_y", 0))
    return PayloadAmounts(steps=steps, pixels=width * height, batch=body.get("batch_size", 1))


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(f"body.{name}", "it is not a number", "Give a number")
    return value


def _check_fields(body: Mapping[str, Any]) -> None:
    if "force_task_id" in body:
        raise _invalid("body.force_task_id", "ComfyFleet sets it, to find the run again", "Leave it out")
    if "infotext" in body:
        raise _invalid(
            "body.infotext",
            "the server would take checkpoint, size and steps from it, which ComfyFleet cannot read",
            "Give them as fields",
        )
    for name, value in _FIXED.items():
        if body.get(name, value) != value:
            raise _invalid(f"body.{name}", "ComfyFleet needs it to be true", "Leave it out")
    for name in COUNTS:
        if name in body and (not _is_integer(body[name]) or body[name] < 1):
            raise _invalid(
                f"body.{name}", f"{body[name]!r:.100} is not a whole number from 1 on", "Correct it"
            )
    for name in SEEDS:
        if name in body and (not _is_integer(body[name]) or not -1 <= body[name] < 1 << 63):
            raise _invalid(
                f"body.{name}",
                f"{body[name]!r:.100} is not a seed",
                "Give a whole number from 0 on, or -1 for a random one",
            )
    for name in TEXTS:
        if name in body and not isinstance(body[name], str):
            raise _invalid(f"body.{name}", "it is not a text", "Give a text")
    pictures = body.get("batch_size", 1) * body.get("n_iter", 1)
    if pictures > MAX_PICTURES:
        raise _invalid(
            "body.n_iter",
            f"with batch_size it asks for {pictures} pictures; a job has at most {MAX_PICTURES}",
            "Submit several jobs",
        )


def _check_options(body: Mapping[str, Any]) -> None:
    options = body.get("override_settings", {})
    if not isinstance(options, Mapping):
        raise _invalid("body.override_settings", "it is not an object", "Give options by name")
    for name, value in options.items():
        if _FOLDER_OPTION.search(name):
            raise _invalid(
                f"body.override_settings.{name[:100]}",
                "this option says where the server writes files, which a job must not",
                "Leave it out",
            )
        if name in ("sd_model_checkpoint", "sd_vae") and not isinstance(value, str):
            raise _invalid(f"body.override_settings.{name}", "it is not a text", "Give the name of a model")
    scripts = body.get("alwayson_scripts", {})
    if not isinstance(scripts, Mapping) or not all(isinstance(each, Mapping) for each in scripts.values()):
        raise _invalid(
            "body.alwayson_scripts", "it is not an object of objects", 'Write {"name": {"args": […]}}'
        )
    arguments = [each["args"] for each in scripts.values() if isinstance(each.get("args"), list)]
    if len(scripts) + sum(map(len, arguments)) > _MAX_ARGUMENTS:
        raise _invalid(
            "body.alwayson_scripts",
            f"it has more than {_MAX_ARGUMENTS} scripts and arguments",
            "Name those that you use",
        )


def _check_pictures(route: Route, body: Mapping[str, Any]) -> None:
    for name in PICTURES[route]:
        if name not in body:
            continue
        value = body[name]
        if name == "imageList":
            is_valid = isinstance(value, list) and all(
                isinstance(each, Mapping) and isinstance(each.get("data"), str) for each in value
            )
            wanted = 'Give a list of {"data": base64, "name": …}'
        elif name in PICTURE_LISTS:
            is_valid = isinstance(value, list) and all(isinstance(each, str) for each in value)
            wanted = "Give a list of pictures in base64"
        else:
            is_valid, wanted = isinstance(value, str), "Give a picture in base64"
        if not is_valid:
            raise _invalid(f"body.{name}", "its form is wrong", wanted)
    for name, value in body.items():
        if name in PROMPTS:
            continue
        for place, text in _texts(value, f"body.{name}"):
            if _URL.match(text):
                raise _invalid(
                    place,
                    "it is a URL, which a server would fetch for anybody",
                    "Send the picture in base64, or upload it to the hub and name it in `inputs`",
                )


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each, f"{place}.{str(name)[:100]}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _texts(each, f"{place}.{index}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(field: str, cause: str, step: str) -> InvalidWorkflow:
    return InvalidWorkflow(f"The field {field[:200]!r} of an A1111 payload is not valid: {cause}. {step}.")
