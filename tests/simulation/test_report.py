"""The table and the page of charts."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
from tests.simulation._scenes import arriving, played, servers, workflow

from comfyfleet.simulation.metrics import SimulationRun
from comfyfleet.simulation.report import html_page, notes_on, table_rows
from comfyfleet.simulation.world import ServerSpec

EVIL = "<script>alert('x')</script>\"&"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def outcome(label: str, policy: str = "first-come", name: str = "red") -> SimulationRun:
    jobs = arriving(*((number, workflow(f"{name}{number % 3}")) for number in range(12)))
    return SimulationRun(label, servers(2), tuple(played(policy, servers(2), jobs)))


def test_the_page_loads_nothing() -> None:
    page = html_page([outcome("first-come"), outcome("comfyfleet", "comfyfleet")], "Title", "words")
    found = _Page()
    found.feed(page)
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(found.tags)
    assert not {"src", "href", "xlink:href"} & {name for name, _ in found.attributes}
    assert not re.search(r"https?:|url\(|@import", page)
    assert found.tags.count("svg") >= 7
    assert all(
        heading in found.text for heading in ("Utilisation", "Model loads", "Timeline by server", "How long")
    )


def test_names_of_others_are_escaped_everywhere() -> None:
    evil = outcome(EVIL, name=EVIL)
    specs = tuple(ServerSpec(f"{EVIL}{number}") for number in range(2))
    jobs = tuple(
        msgspec.structs.replace(job, tenant=EVIL, server=specs[number % 2].name)
        for number, job in enumerate(evil.jobs)
    )
    found = _Page()
    page = html_page([SimulationRun(EVIL, specs, jobs)], EVIL, EVIL)
    found.feed(page)
    assert "script" not in found.tags
    assert found.text.count("<script>") > 5
    assert "<script>" not in page


def test_every_run_is_on_the_timeline() -> None:
    page = html_page([outcome("first-come")], "Title", "")
    titles = set(re.findall(r"<title>job (\d+), ", page))
    assert titles == {str(number) for number in range(12)}


def test_a_row_has_the_figures_of_its_policy() -> None:
    jobs = arriving((0, workflow("red")), (0, workflow("blue")))
    found = SimulationRun("first-come", servers(1), tuple(played("first-come", servers(1), jobs)))
    assert table_rows([found]) == [["first-come", "8.0 s", "6.0 s", "8.0 s", "8.0 s", "4.0 s", "2", "25%"]]


def test_the_gain_is_said_in_words() -> None:
    notes = notes_on([outcome("first-come"), outcome("comfyfleet", "comfyfleet")])
    assert re.fullmatch(r"comfyfleet loads models \d+ times where first-come does \d+ times; .*", notes[0])


def test_jobs_that_never_ended_are_said() -> None:
    jobs = tuple(arriving((0, workflow("red"))))
    assert (
        "1 jobs had not ended" in notes_on([SimulationRun("first-come", servers(1), jobs, unfinished=1)])[0]
    )
