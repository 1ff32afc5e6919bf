"""The pictures of a run: reads them from the answer and keeps them on disk until they are fetched.

The server sends its pictures once, inside the answer, and no route serves them later. They are kept in a private folder
of this process, which is removed when the connector closes.
"""

from __future__ import annotations

import base64
import binascii
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from comfyfleet.model.failure import Failure, FailureKind, FileTooLarge
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.worker.connectors.a1111.failures import fail
from comfyfleet.worker.connectors.a1111.settings import A1111Settings

MAX_ENTRIES = 1_000
MAX_TEXT = 300
_TOLD = (
    "sampler_name",
    "scheduler",
    "steps",
    "cfg_scale",
    "width",
    "height",
    "batch_size",
    "denoising_strength",
)


class GenerationAnswer(msgspec.Struct, frozen=True):
    pictures: tuple[str, ...]
    """In base64, without grids and maps."""
    info: Mapping[str, Any]
    told: dict[str, Any]
    """What of `info` the result shows."""

    @property
    def timestamp(self) -> str:
        return str(self.info.get("job_timestamp") or "")


def read_answer(body: Any) -> GenerationAnswer | None:
    """Of any route. None: it is not the answer of a run."""
    if not isinstance(body, Mapping):
        return None
    images = body.get("images")
    if images is None and isinstance(body.get("image"), str):
        images = [body["image"]]
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        return None
    info: Any = body.get("info")
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except (ValueError, RecursionError):
            info = None
    info = info if isinstance(info, Mapping) else {}
    first = info.get("index_of_first_image")
    start = first if isinstance(first, int) and 0 <= first <= len(images) else 0
    texts = info.get("infotexts")
    # A grid comes first, and maps of ControlNet come last: only real pictures have a text.
    end = len(texts) if isinstance(texts, list) and start < len(texts) else len(images)
    return GenerationAnswer(tuple(images[start:end]), info, _told(info))


def _told(info: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {name: info[name] for name in _TOLD if _is_small(info.get(name))}
    for name, source in (("seeds", "all_seeds"), ("subseeds", "all_subseeds")):
        numbers = info.get(source)
        if isinstance(numbers, list):
            told[name] = [each for each in numbers[:MAX_ENTRIES] if isinstance(each, int)]
    for name, source in (("model", "sd_model_name"), ("model_hash", "sd_model_hash"), ("vae", "sd_vae_name")):
        if _is_small(info.get(source)):
            told[name] = info[source]
    if _is_small(info.get("version")):
        told["version"] = info["version"]
    return told


def _is_small(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= MAX_TEXT)


def ending_of(content: bytes) -> str | None:
    """By the first bytes, because the server's `samples_format` may be anything. None: no known picture."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if content.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return None


class KeptPictures:
    """Pictures of ended runs, by the task id and the name of the file."""

    def __init__(self, settings: A1111Settings) -> None:
        self._settings = settings
        self._folder: TemporaryDirectory[str] | None = None
        self._sizes: dict[str, int] = {}
        """By task id, the oldest first."""

    def open(self) -> None:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="comfyfleet-a1111-", dir=self._settings.spool)

    def close(self) -> None:
        folder, self._folder = self._folder, None
        self._sizes.clear()
        if folder is not None:
            folder.cleanup()

    def keep(self, task_id: str, route: str, pictures: tuple[str, ...]) -> tuple[OutputFile, ...]:
        """Blocks. Raises `ServiceFailed` if a picture cannot be read or kept."""
        if self._folder is None:
            raise fail(
                FailureKind.UNKNOWN, "The connector was closed before the pictures of the run were kept."
            )
        folder = Path(self._folder.name) / task_id
        files = []
        size = 0
        try:
            self._make_room(sum(map(len, pictures)) * 3 // 4)
            folder.mkdir(mode=0o700, exist_ok=True)
            for number, text in enumerate(pictures, start=1):
                content = _decoded(text, number)
                ending = ending_of(content)
                if ending is None:
                    raise fail(
                        FailureKind.NODE_ERROR,
                        f"Picture {number} of the run is neither PNG, JPEG nor WebP. Set the server's option "
                        "samples_format to one of them.",
                    )
                name = f"{route}_{number:05}.{ending}"
                (folder / name).write_bytes(content)
                size += len(content)
                files.append(OutputFile(route, "images", name, task_id))
        except BaseException as error:
            # What is not listed is never removed otherwise.
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise fail(
                FailureKind.TRANSIENT,
                f"The pictures of the run could not be kept on the worker's disk: {error.strerror}. Free some space.",
            ) from error
        self._sizes[task_id] = size
        return tuple(files)

    def save(self, file: OutputFile, path: Path) -> int:
        """Blocks. Copies a kept picture and returns its size."""
        source = self._path(file)
        size = _checked_size(source, self._settings.max_file_bytes)
        if size > shutil.disk_usage(path.parent).free - self._settings.min_free_bytes:
            # No server keeps the picture, so a job without it must not count as complete.
            raise fail(
                FailureKind.TRANSIENT,
                f"The worker's disk has no space for {file.filename!r} ({size} bytes). Free some.",
            )
        shutil.copyfile(source, path)
        return size

    def read(self, file: OutputFile) -> bytes:
        """Blocks."""
        source = self._path(file)
        _checked_size(source, self._settings.max_fetch_bytes)
        return source.read_bytes()

    def _path(self, file: OutputFile) -> Path:
        if self._folder is not None and file.subfolder in self._sizes:
            # Only the last part of a name that we gave ourselves leads anywhere.
            path = Path(self._folder.name) / file.subfolder / Path(file.filename).name
            if path.is_file():
                return path
        raise fail(
            FailureKind.UNKNOWN,
            f"The worker no longer has {file.filename!r}: it was restarted, or newer pictures took the space.",
        )

    def remove(self, task_id: str) -> None:
        """Blocks. Nothing happens if there are none."""
        if self._sizes.pop(task_id, None) is not None and self._folder is not None:
            shutil.rmtree(Path(self._folder.name) / task_id, ignore_errors=True)

    def _make_room(self, size: int) -> None:
        while self._sizes and sum(self._sizes.values()) + size > self._settings.max_kept_bytes:
            self.remove(next(iter(self._sizes)))


def _checked_size(path: Path, most: int) -> int:
    size = path.stat().st_size
    if size > most:
        words = f"The file {path.name!r} has {size} bytes; the limit is {most}."
        raise FileTooLarge(Failure(FailureKind.UNKNOWN, words))
    return size


def _decoded(text: str, number: int) -> bytes:
    try:
        return base64.b64decode(text.partition(";base64,")[2] or text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise fail(FailureKind.NODE_ERROR, f"Picture {number} of the run is not base64: {error}.") from error


def result_of(route: str, answer: GenerationAnswer, files: tuple[OutputFile, ...]) -> JobResult:
    images = [{"filename": each.filename, "subfolder": each.subfolder, "type": each.folder} for each in files]
    outputs: dict[str, Any] = {"images": images}
    if answer.told:
        outputs["info"] = [answer.told]
    return JobResult({route: outputs}, files)
