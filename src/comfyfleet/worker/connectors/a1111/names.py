"""The names by which jobs need and servers offer models, samplers and scripts. Pure.

Checkpoints have their own names, as a caller lists them under `requirements.models`; everything else is qualified,
because an upscaler and a VAE may have the same name. Both sides must use the same spelling, so both use this module.
"""

from __future__ import annotations

from typing import Literal

Route = Literal["txt2img", "img2img", "extra-single-image", "extra-batch-images"]


def plain(name: str) -> str:
    """A name with '/' between folders, on any operating system."""
    return name.replace("\\", "/")


def vae(name: str) -> str:
    return f"vae/{plain(name).rpartition('/')[2]}"


def module(name: str) -> str:
    """A VAE or text encoder of Forge, which may be named by its path."""
    return f"module/{plain(name).rpartition('/')[2]}"


def lora(name: str) -> str:
    return f"lora/{plain(name)}"


def upscaler(name: str) -> str:
    return f"upscaler/{plain(name)}"


def sampler(name: str) -> str:
    return f"sampler/{name}"


def scheduler(name: str) -> str:
    """The server accepts a scheduler by its name and by its label, in any case."""
    return f"scheduler/{name.lower()}"


def script(route: Route, name: str) -> str:
    """The server compares the titles of scripts in lower case. Each route has its own scripts."""
    return f"script/{route}/{name.lower()}"
