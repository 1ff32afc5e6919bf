"""A home folder of its own for tests, chaos and bench, and for every process that they start.

A developer may have a hub running, with jobs in it, on the machine where the tests run. They must neither find it nor
change anything of it: nothing of the user's settings reaches them, and `keep_out` refuses what would.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.keep_out import sitecustomize as guard

ROOT = Path(__file__).resolve().parents[1]
_OF_THE_TESTS = ("COMFYFLEET_TEST_", "COMFYFLEET_DAYS")
_OF_THE_USER = ("COMFYFLEET_", "TWO_STAGE_", "HUB_", "REDIS_URL", "XDG_", "AWS_", "PG")
"""How the variables begin that could lead a program under test to something real."""


@contextmanager
def own_home(*, is_guarded: bool = True) -> Iterator[Path]:
    """From here on this process and its children have an empty home folder, which ends with the context. Where a
    process that has done so started this one, its home folder is this one's too. What is measured is not guarded."""
    if guard.VARIABLE in os.environ:
        yield Path(os.environ["HOME"])
        return
    home = Path(tempfile.mkdtemp(prefix="comfyfleet-home-")).resolve()
    limits = _limits()
    for name in [name for name in os.environ if _is_users(name)]:
        del os.environ[name]
    os.environ["HOME"] = os.environ["USERPROFILE"] = os.environ["LOCALAPPDATA"] = str(home)
    if is_guarded:
        os.environ[guard.VARIABLE] = json.dumps(limits)
        os.environ[guard.OFFENCES] = str(home / "offences")
        paths = [str(Path(guard.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        guard.install()
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def offences() -> list[str]:
    """What this process and its children tried so far."""
    path = Path(os.environ[guard.OFFENCES])
    return path.read_text().splitlines() if path.exists() else []


def _is_users(name: str) -> bool:
    return name.startswith(_OF_THE_USER) and not name.startswith(_OF_THE_TESTS)


def _limits() -> dict[str, list[str]]:
    homes = _homes()
    data = [home / ".local" / "share" for home in homes]
    data += [home / "Library" / "Application Support" for home in homes]
    data += [Path(os.environ[name]) for name in ("XDG_DATA_HOME", "LOCALAPPDATA") if os.environ.get(name)]
    own = [folder / "comfyfleet" for folder in data]
    if os.environ.get("COMFYFLEET_DATA"):
        own.append(Path(os.environ["COMFYFLEET_DATA"]))
    # What is installed, or checked out, below the home folder is not what a home folder is kept for.
    exempt = [ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(tempfile.gettempdir())]
    exempt = [each for each in exempt if any(each.is_relative_to(home) for home in homes)]
    return {
        "homes": [str(each.absolute()) for each in homes],
        "data": [str(each.absolute()) for each in own],
        "exempt": [str(each.absolute()) for each in exempt],
    }


def _homes() -> list[Path]:
    """The one that the environment names, and the one that the system knows."""
    homes = [Path.home()]
    if sys.platform != "win32":
        import pwd

        homes.append(Path(pwd.getpwuid(os.getuid()).pw_dir))
    # A user without a home folder has the root of the disk, or a folder that nobody made.
    return [each for each in dict.fromkeys(homes) if each != Path(each.anchor)]
