"""Install a pinned list of packages with pip and show one line of progress. The Makefile calls it.

pip itself is either silent or prints several lines for each package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main(requirements: Path) -> int:
    total = sum(line[:1].isalnum() for line in requirements.read_text().splitlines())
    print(f"installing {total} packages of {requirements} into .venv (once) …", file=sys.stderr, flush=True)
    # Python compiles modules when it first imports them. Compiling all of them here takes more time and disk.
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    command += ["--progress-bar", "off", "--require-hashes", "-r", str(requirements)]
    output: list[str] = []
    found = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line)
            # "Collecting NAME==1.2 (from …)", "Requirement already satisfied: NAME==1.2 in …"
            words = line.replace("Requirement already satisfied:", "Collecting").split()
            if words[:1] == ["Collecting"]:
                found += 1
                show(f"  {found} of {total}: {words[1]}")
            elif line.startswith("Installing collected packages"):
                show(f"  {found} packages downloaded, unpacking …")
    show("")
    if pip.returncode:
        sys.stderr.writelines(output[-20:])
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except KeyboardInterrupt:
        show("")
        sys.exit("interrupted. The same command continues the installation.")
