"""Sanitizes a worker's report before it reaches a caller: file names, URLs, and texts with internal addresses.

A worker and its server are programs of another party. Nothing is refused here, because the run is complete and paid:
unsafe parts are removed or renamed (docs/decisions/0029).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
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
"""Characters of one text in a progress report."""
_MAX_KEY = 1_000
_UNNAMED = "file"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_STEERING = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""The same, except tabs and line breaks."""
_BLANKS = re.compile(r"[\x00-\x20]")
"""Browsers ignore these in the scheme of a URL."""
_SCRIPTS = ("javascript:", "vbscript:", "data:text/html")
_URL_KEYS = frozenset({"url", "href", "src", "link"})
_INSIDE_NAMES = (".local", ".internal", ".lan", ".home", ".localdomain", ".localhost")
_URL = re.compile(r"\b(?:https?|wss?)://[^\s\"'<>)\]]*[^\s\"'<>)\].,:;]")
# As HTTP clients describe a connection: "host gpu-a:8188", "('10.0.0.5', 8188)".
_HOST = re.compile(r"(?<=\bhost )[\w.-]+:\d+")
_PAIR = re.compile(r"\('([\w.:-]+)', \d+(?:, \d+)*\)")
# A port has at most five digits. Without this limit the search would be quadratic.
_NUMBERS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?(?![\w.]*\w)")


def safe_result(result: JobResult) -> JobResult:
    changed = msgspec.structs.replace(
        result,
        outputs={
            node: _sanitize(node, output, _MAX_DEPTH + 1, str, _safe_member)
            for node, output in result.outputs.items()
        },
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
        node_errors=None if errors is None else _sanitize("", errors, _MAX_DEPTH, safe_text, _safe_value),
    )
    return failure if changed == failure else changed


def safe_progress(data: dict[str, Any]) -> dict[str, Any]:
    """Progress data of a running attempt, at every depth."""
    safe: dict[str, Any] = _sanitize("", data, _MAX_DEPTH, _safe_key, _safe_progress)
    return safe


def _safe_key(name: str) -> str:
    return safe_text(name[:_MAX_KEY])[:_MAX_KEY]


def _safe_progress(name: str, value: str) -> str | None:
    safe = _safe_member(name, value)
    if safe is None or _is_script(safe):
        return None
    return safe_text(safe[:_MAX_PROGRESS_VALUES])


# names


def safe_name(name: str) -> str:
    """A name that stays in its folder on every operating system."""
    last = re.split(r"[/\\]", _CONTROL.sub("_", name[-_MAX_PATH:]))[-1].strip()
    if re.fullmatch(r"[A-Za-z]:.*", last):
        last = last[2:]
    return last if last.strip(".") else _UNNAMED


def safe_folder(folder: str) -> str:
    """A folder that stays below its parent."""
    parts = re.split(r"[/\\]", _CONTROL.sub("_", folder[:_MAX_PATH]))
    return "/".join(part for part in parts if part.strip(". ") and not re.fullmatch(r"[A-Za-z]:", part))


# addresses


def safe_url(url: str) -> str | None:
    """None: it is not an HTTP URL, contains a password, or names an internal host."""
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
    """Whether a browser would run it as a URL."""
    return _BLANKS.sub("", text[:64]).casefold().startswith(_SCRIPTS)


def is_inside(host: str) -> bool:
    """Whether only an internal network reaches this host."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_global
    except ValueError:
        pass
    name = host.rstrip(".").casefold()
    return "." not in name or name.endswith(_INSIDE_NAMES)


# text


def safe_text(text: str) -> str:
    """Replace internal addresses and control characters. Line breaks stay, because it may be a traceback."""
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


# nested values


def _sanitize(
    name: str,
    value: Any,
    levels: int,
    safe_key: Callable[[str], str],
    safe_leaf: Callable[[str, str], str | None],
) -> Any:
    """Sanitize every string in a JSON value. `name` is the key of the value; deeper levels become None."""
    if levels < 0:
        return None
    if isinstance(value, dict):
        return {
            safe_key(key): _sanitize(key, each, levels - 1, safe_key, safe_leaf)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_sanitize(name, each, levels - 1, safe_key, safe_leaf) for each in value]
    return safe_leaf(name, value) if isinstance(value, str) else value


def _safe_member(name: str, text: str) -> str | None:
    if name == "filename":
        return safe_name(text)
    if name == "subfolder":
        return safe_folder(text)
    return safe_url(text) if name in _URL_KEYS else text


def _safe_value(name: str, text: str) -> str:  # noqa: ARG001
    return safe_text(text)
