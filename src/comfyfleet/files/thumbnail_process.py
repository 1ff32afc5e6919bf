"""Draws one thumbnail: `python -m comfyfleet.files.thumbnail_process PATH SIZE` writes it to standard output.

It runs as a separate process with limited memory and CPU time, because pictures may attack their decoder. The
exit status tells why there is no thumbnail.
"""

from __future__ import annotations

import contextlib
import sys
from io import BytesIO
from typing import Any

MAX_PIXELS = 64_000_000
IS_NO_PICTURE, HAS_TOO_MANY_PIXELS, HAS_NO_PILLOW = 3, 4, 5
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MEMORY_BYTES = 2 << 30
_CPU_S = 20


def draw(path: str, size: int) -> bytes | int:
    """The thumbnail as WebP, or an exit status."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return HAS_NO_PILLOW
    # This function checks the number itself.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(path, formats=_FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                return HAS_TOO_MANY_PIXELS
            return _small(picture, size)
    except Exception:
        return IS_NO_PICTURE


def _small(picture: Any, size: int) -> bytes:
    from PIL import ImageOps

    # Decodes a large JPEG at reduced size.
    picture.draft("RGB", (size * 2, size * 2))
    upright = ImageOps.exif_transpose(picture)
    upright.thumbnail((size, size))
    if upright.mode not in ("RGB", "RGBA"):
        upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
    # Drop metadata such as the location or the workflow.
    clean = upright.copy()
    clean.info = {}
    target = BytesIO()
    clean.save(target, "WEBP", quality=80)
    return target.getvalue()


def _bound() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))


def main() -> int:
    _, path, size = sys.argv
    _bound()
    drawn = draw(path, int(size))
    if isinstance(drawn, int):
        return drawn
    sys.stdout.buffer.write(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
