"""The documents say what is so: the diagram is the table's, links lead somewhere, nothing points outside."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from comfyfleet.policy.lifecycle import diagram

ROOT = Path(__file__).resolve().parents[2]


def tracked(*suffixes: str) -> list[Path]:
    """The files of the repository, those not yet committed included."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in listing.stdout.splitlines()]
    return [path for path in paths if path.suffix in suffixes and path.is_file()]


def test_the_lifecycle_diagram_in_the_docs_is_printed_from_the_table() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    found = re.search(r"```mermaid\n(stateDiagram-v2.*?)\n```", page, re.DOTALL)
    assert found is not None, "docs/concepts.md has no lifecycle diagram"
    assert found.group(1) == diagram()


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)} → {target}"
        for page in tracked(".md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_decision_has_a_number_a_page_and_a_line_and_gaps_are_explained() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    pages = sorted(path.name for path in folder.glob("0*.md"))
    numbers = [name[:4] for name in pages]
    assert len(set(numbers)) == len(numbers), "two pages have one number"
    assert re.findall(r"^\| \[(\d{4})\]\(\1-", index, re.MULTILINE) == numbers
    # Of the newest some may still be on their way, each with a change of its own.
    missing = {f"{number:04}" for number in range(1, int(numbers[-1]) - 10)} - set(numbers)
    told = index.partition("| | |")[0]
    assert [number for number in sorted(missing) if number not in told] == [], (
        "nobody says why they are missing"
    )


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_nothing_refers_to_places_outside_the_repository() -> None:
    # Spelled apart, so that this file does not find itself.
    forbidden = [
        "/work" + "/",
        "../" + "shared",
        "pypi" + ".org",
        "pythonhosted" + ".org",
        "registry.npmjs" + ".org",
    ]
    wrong = [
        f"{path.relative_to(ROOT)} names {word}"
        for path in tracked(".py", ".md", ".toml", ".txt", ".json", ".yml", ".in", ".cfg", "")
        for word in forbidden
        if word in path.read_text(errors="replace")
    ]
    assert wrong == []


def pinned(name: str) -> dict[str, set[str]]:
    """The hashes of each pinned package, by its name and version."""
    hashes: dict[str, set[str]] = {}
    pin = ""
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if re.match(r"[a-z0-9]", line):
            pin = line.split()[0]
            hashes[pin] = set()
        hashes.setdefault(pin, set()).update(re.findall(r"--hash=(sha256:[0-9a-f]{64})", line))
    return hashes


def test_the_pinned_requirements_are_hash_checked() -> None:
    for name in ("run.txt", "dev.txt"):
        pins = pinned(name)
        assert len(pins) > 10
        assert [pin for pin, hashes in pins.items() if "==" not in pin or not hashes] == []


def test_what_runs_is_a_part_of_what_is_tested() -> None:
    run, dev = pinned("run.txt"), pinned("dev.txt")
    assert {pin: hashes for pin, hashes in run.items() if dev.get(pin) != hashes} == {}
    assert not {pin.partition("==")[0] for pin in run} & {"mypy", "pytest", "ruff", "schemathesis"}


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them from its headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_links_lead_to_headings_that_exist() -> None:
    broken = [
        f"{page.relative_to(ROOT)} → {target}#{anchor}"
        for page in tracked(".md")
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text())
        if anchor not in headings(page.parent / target if target else page)
    ]
    assert broken == []


# Named on a page although no code has them: names of other systems, an alternative that was rejected.
FOREIGN = {"BigInt", "last_heartbeat", "is_removed", "limit_concurrency"}


def test_the_docs_name_modules_classes_and_settings_that_exist() -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in tracked(".py", ".lua", ".sql", ".js", ".mjs", ".html", ".toml")
    }
    code = "\n".join((ROOT / name).read_text() for name in files if not name.startswith("tests/tidy/"))
    words = set(re.findall(r"\w+", code))
    wrong = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for name in sorted(set(re.findall(r"`([\w./]+)(?:\([^`]*\))?`", text))):
            if re.fullmatch(r"[\w/]+\.(?:py|lua|sql)", name):
                is_known = any(each == name or each.endswith(f"/{name}") for each in files)
            elif re.fullmatch(
                r"comfyfleet\.[\w.]+|(?:[A-Z][a-z]+){2,}(?:\.\w+)*|[a-z]+(?:_[a-z]+)+(?:\.\w+)*", name
            ):
                is_known = all(part in words for part in name.split("."))
            else:
                continue
            # tests/hub compares the metrics of operations.md with those of a hub.
            if not is_known and name not in FOREIGN and not name.startswith("comfyfleet_"):
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert wrong == []
