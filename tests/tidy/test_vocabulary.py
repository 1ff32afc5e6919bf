"""One vocabulary: a public class name has one definition, modules are nouns, and old names do not return."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "comfyfleet"

# Class names that were given up for words of the field.
CLASSES = {
    "Cabinet", "Estate", "House", "Kept", "Door", "Places", "Gate", "Rounds", "Verdicts", "Lesson", "ShareBook",
    "Turns", "Sealer", "Carrier", "Homes", "BookClosed", "WholeJob", "Beat", "Settled", "Written", "Newest", "Follower",
    "Relaying", "Teller", "Noted", "Applicant", "BlockShelf", "InsideApi",
}  # fmt: skip

NOUNS = {"tracing", "keyring", "accounting", "uvicorn_logging"}


def _sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_a_public_class_name_has_one_definition() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in _sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_class_names_that_were_given_up_do_not_return() -> None:
    found = {
        node.name
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and (node.name in CLASSES or node.name.endswith("Desk"))
    }
    assert found == set()


def test_modules_are_nouns() -> None:
    wrong = [
        str(path.relative_to(SOURCE))
        for path in _sources()
        if path.stem.endswith("ing") and path.stem not in NOUNS
    ]
    assert wrong == []
