"""One vocabulary: a public class name has one definition, modules are nouns, and old words do not return."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

from tests.tidy.test_docs import tracked

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "comfyfleet"

# Class names that were given up for words of the field.
CLASSES = {
    "Cabinet", "Estate", "House", "Kept", "Door", "Places", "Gate", "Rounds", "Verdicts", "Lesson", "ShareBook",
    "Turns", "Sealer", "Carrier", "Homes", "BookClosed", "WholeJob", "Beat", "Settled", "Written", "Newest", "Follower",
    "Relaying", "Teller", "Noted", "Applicant", "BlockShelf", "InsideApi", "Charge", "Due", "Review", "EndedLease",
}  # fmt: skip

# Private words that were given up for the terms of the field. Each is sought in any case and inside identifiers.
WORDS = (
    "cabinet", "drawers?", "estate", "purse", "teller", "leaver", "belongings", "shelf", "sealed", "sealer", "unseal",
    "carriers?", "lessons?", "apart", "unless said", "every no",
)  # fmt: skip

# Ordinary English, and a term of networking.
IDIOMS = re.compile(
    r"drift\s+apart|apart\s+from|(?:tells?|told|telling)\s+(?:\w+\s+)?apart|carrier-grade\s+NAT",
    re.IGNORECASE,
)

# Names in stores of users: columns, tables, Redis keys and functions. Only these files may have them.
STORED = {
    "cabinet": ("src/comfyfleet/stores/redis/*", "docs/redis-protocol.md"),
    "drawers?": (
        "src/comfyfleet/stores/*/documents.py",
        "src/comfyfleet/stores/sqlite/*.py",
        "src/comfyfleet/stores/*/migrations/*",
        "src/comfyfleet/tenancy/database/documents.py",
        "src/comfyfleet/tenancy/database/tenant_rows.py",
        "src/comfyfleet/tenancy/database/*/migrations/*",
    ),
    "sealed": ("src/comfyfleet/model/encrypted.py",),
    "lessons?": ("src/comfyfleet/stores/*", "docs/redis-protocol.md"),
    "apart": (
        "src/comfyfleet/stores/*",
        "src/comfyfleet/model/dispatch.py",
        "src/comfyfleet/model/file.py",
    ),
}

# Where "pool" is not the old word for a tenant's database, or is kept as an old name beside the new one.
POOLS = {
    "the library's pool": (
        "cli/run.py",
        "cli/settings.py",
        "policy/poison_workflows.py",
        "wire/status_names.py",
    ),
    "a connection pool": ("stores/postgres/*", "tenancy/database/postgres/__init__.py"),
    "an old name of a setting or a flag": ("cli/main.py", "cli/settings_schema.py"),
    "an old field": ("cli/tenants.py", "wire/descriptions.py", "wire/examples.py", "wire/tenants.py"),
    "a stored name": ("model/tenant.py", "tenancy/database/*/migrations/*"),
}

NOUNS = {"tracing", "keyring", "accounting", "scheduling", "uvicorn_logging"}


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


def test_words_that_were_given_up_do_not_return() -> None:
    patterns = {word: re.compile(rf"(?<![a-z]){word}(?![a-z])", re.IGNORECASE) for word in WORDS}
    found = []
    for path in tracked(".py", ".md", ".lua", ".sql", ".js", ".toml", ".html"):
        name = str(path.relative_to(ROOT))
        if not name.startswith(("src/", "docs/", "examples/", "README", "CHANGELOG", "CONTRIBUTING")):
            continue
        lines = [
            path.name,
            *IDIOMS.sub(lambda idiom: "\n" * idiom[0].count("\n"), path.read_text()).splitlines(),
        ]
        for word, pattern in patterns.items():
            if any(fnmatch(name, allowed) for allowed in STORED.get(word, ())):
                continue
            found += [
                f"{name}:{number}: {line.strip()[:100]}"
                for number, line in enumerate(lines)
                if pattern.search(line)
            ]
    assert found == []


def test_pool_is_no_word_for_a_tenants_database() -> None:
    word = re.compile(r"(?<![a-z])(?<!comfyfleet\.)pools?(?![a-z])", re.IGNORECASE)
    allowed = [name for names in POOLS.values() for name in names]
    packages = ("cli", "client", "engine", "hub", "model", "policy", "stores", "tenancy", "wire")
    found = {
        str(path.relative_to(SOURCE))
        for path in tracked(".py", ".sql", ".lua")
        if path.is_relative_to(SOURCE)
        and path.relative_to(SOURCE).parts[0] in packages
        and word.search(path.read_text())
    }
    assert {name for name in found if not any(fnmatch(name, each) for each in allowed)} == set()
    assert {each for each in allowed if not any(fnmatch(name, each) for name in found)} == set()
