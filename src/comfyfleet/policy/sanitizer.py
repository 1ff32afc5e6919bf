"""What of a worker's report may reach a caller through a hub: names that stay in a folder, addresses that callers can
have, and text that does not tell where a server stands.

A worker is another party's program, and so is its server. Nothing is refused here, since the run is done and paid for:
what is not safe is left out or renamed (docs/decisions/0029).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from comfyfleet.model.failure import Failure
from comfyfleet.model.job import JobResult, OutputFile

INSIDE = "(an address inside the fleet)"

_MAX_DEPTH = 32
_MAX_PATH = 4_096
_MAX_URL = 16_384
_MAX_PROGRESS_VALUES = 10_000
"""Characters; no text of a run that goes on needs more."""
_MAX_KEY = 1_000
_UNNAMED = "file"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_STEERING = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""The same without tabs and line breaks."""
_BLANKS = re.compile(r"[\x00-\x20]")
"""Browsers pass over these in the scheme of an address."""
_SCRIPTS = ("javascript:", "vbscript:", "data:text/html")
_URL_KEYS = frozenset({"url", "href", "src", "link"})
_INSIDE_NAMES = (".local", ".internal", ".lan", ".home", ".localdomain", ".localhost")
_URL = re.compile(r"\b(?:https?|wss?)://[^\s\"'<>)\]]*[^\s\"'<>)\].,:;]")
# As clients of HTTP tell of a connection: "host gpu-a:8188", "('10.0.0.5', 8188)".
_HOST = re.compile(r"(?<=\bhost )[\w.-]+:\d+")
_PAIR = re.compile(r"\('([\w.:-]+)', \d+(?:, \d+)*\)")
# A port has five digits: looked for without end, what follows would be read again from each of them.
_NUMBERS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?(?![\w.]*\w)")


def safe_result(result: JobResult) -> JobResult:
    changed = msgspec.structs.replace(
        result,
        outputs={node: _safe_object(output, 0) for node, output in result.outputs.items()},
        files=tuple(map(safe_file, result.files)),
    )
    return result if changed == result else changed


def safe_file(file: OutputFile) -> OutputFile:
    return msgspec.structs.replace(
        file,
        filename=safe_name(file.filename),
        subfolder=safe_folder(file.subfolder),
        folder=safe_name(file.folder),
        url=None if file.url is None else safe_url(file.url),
    )


def safe_failure(failure: Failure) -> Failure:
    errors = failure.node_errors
    changed = msgspec.structs.replace(
        failure,
        message=safe_text(failure.message),
        traceback=tuple(map(safe_text, failure.traceback)),
        node_errors=None if errors is None else _safe_texts(errors, 0),
    )
    return failure if changed == failure else changed


def safe_progress(data: dict[str, Any]) -> dict[str, Any]:
    """What a worker told of a run that goes on, at every depth."""
    return {_safe_key(name): _safe_progress(name, value, 1) for name, value in data.items()}


def _safe_key(name: str) -> str:
    return safe_text(name[:_MAX_KEY])[:_MAX_KEY]


def _safe_progress(name: str, value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return {_safe_key(key): _safe_progress(key, each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_safe_progress(name, each, depth + 1) for each in value]
    if not isinstance(value, str):
        return value
    safe = _safe_member(name, value)
    if safe is None or _is_script(safe):
        return None
    return safe_text(safe[:_MAX_PROGRESS_VALUES])


# names


def safe_name(name: str) -> str:
    """One that stays in its folder, whichever system it is used on."""
    last = re.split(r"[/\\]", _CONTROL.sub("_", name[-_MAX_PATH:]))[-1].strip()
    if re.fullmatch(r"[A-Za-z]:.*", last):
        last = last[2:]
    return last if last.strip(".") else _UNNAMED


def safe_folder(folder: str) -> str:
    """Below the one it is relative to."""
    parts = re.split(r"[/\\]", _CONTROL.sub("_", folder[:_MAX_PATH]))
    return "/".join(part for part in parts if part.strip(". ") and not re.fullmatch(r"[A-Za-z]:", part))


# addresses


def safe_url(url: str) -> str | None:
    """None: it is no address of the web, carries a password, or leads to where callers cannot go."""
    if len(url) > _MAX_URL or _CONTROL.search(url):
        return None
    try:
        parts = urlsplit(url)
        host, is_web = parts.hostname, parts.scheme in ("http", "https")
        has_password = parts.username is not None or parts.password is not None
    except ValueError:
        return None
    if not is_web or not host or has_password or is_inside(host):
        return None
    return url


def _is_script(text: str) -> bool:
    """Whether a browser that took it for an address would run it."""
    return _BLANKS.sub("", text[:64]).casefold().startswith(_SCRIPTS)


def is_inside(host: str) -> bool:
    """Whether it can only be reached from within a network."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_global
    except ValueError:
        pass
    name = host.rstrip(".").casefold()
    return "." not in name or name.endswith(_INSIDE_NAMES)


# text


def safe_text(text: str) -> str:
    """Without addresses of servers inside and without control characters. Line breaks stay: it may be a traceback."""
    text = _STEERING.sub("_", text)
    text = _URL.sub(_without_inside_url, text)
    text = _HOST.sub(lambda found: _without_inside(found[0].rpartition(":")[0], found[0]), text)
    text = _PAIR.sub(lambda found: _without_inside(found[1], found[0]), text)
    return _NUMBERS.sub(lambda found: _without_inside(found[0].partition(":")[0], found[0]), text)


def _without_inside(host: str, text: str) -> str:
    return INSIDE if is_inside(host) else text


def _without_inside_url(found: re.Match[str]) -> str:
    try:
        host = urlsplit(found[0]).hostname
    except ValueError:
        return INSIDE
    return INSIDE if not host or is_inside(host) else found[0]


# what nodes reported, in forms of their own


def _safe_object(value: Mapping[str, Any], depth: int) -> dict[str, Any]:
    return {name: _safe(name, each, depth) for name, each in value.items()}


def _safe(name: str, value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return _safe_object(value, depth + 1)
    if isinstance(value, list | tuple):
        return [_safe(name, each, depth + 1) for each in value]
    return _safe_member(name, value) if isinstance(value, str) else value


def _safe_member(name: str, text: str) -> str | None:
    if name == "filename":
        return safe_name(text)
    if name == "subfolder":
        return safe_folder(text)
    return safe_url(text) if name in _URL_KEYS else text


def _safe_texts(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return {safe_text(name): _safe_texts(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_safe_texts(each, depth + 1) for each in value]
    return safe_text(value) if isinstance(value, str) else value
