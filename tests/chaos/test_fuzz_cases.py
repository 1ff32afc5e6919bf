"""What is thrown at a hub follows from the seed, and an answer that must not be is noticed."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from chaos.fuzz import Thrower
from chaos.fuzz_cases import Case, case
from chaos.programs import HubProgram


def test_a_case_follows_from_the_seed_and_its_number_alone() -> None:
    cases = [case(7, number) for number in range(300)]
    assert cases == [case(7, number) for number in range(300)]
    assert cases != [case(8, number) for number in range(300)]
    assert {each.kind for each in cases} == {"request", "json", "packed", "broken", "messages", "frames"}


ASKED = Case(1, "request", "http", (b"GET / HTTP/1.1\r\n\r\n",))
BROKEN = Case(2, "broken", "http", (b"GET",), is_broken=True)
SPOKEN = Case(3, "messages", "socket", (b"\x81\x00",))


@pytest.mark.parametrize(
    ("thrown", "answer", "is_wrong"),
    [
        (ASKED, b"HTTP/1.1 200 OK\r\n\r\n", False),
        (ASKED, b"HTTP/1.1 500 Internal Server Error\r\n\r\n", True),
        (ASKED, b"HTTP/1.1 502 Bad Gateway\r\n\r\n", True),
        (ASKED, b"HTTP/1.1 503 Service Unavailable\r\n\r\n", True),
        (ASKED, b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"code":"queue_full"}', False),
        (ASKED, b"", True),
        (BROKEN, b"", False),
        (BROKEN, b"HTTP/1.1 500 Internal Server Error\r\n\r\n", True),
        (SPOKEN, b'\x81\x15{"request_id":"the last"}', False),
        (SPOKEN, b'\x81\x15{"type":"error"}', True),
        (SPOKEN, b'\x81\x15{"code":"internal"}{"request_id":"the last"}', True),
        (SPOKEN, b"\x88\x02\x03\xf3", True),
    ],
)
async def test_an_answer_that_must_not_be_is_noticed(
    tmp_path: Path, thrown: Case, answer: bytes, is_wrong: bool
) -> None:
    async with aiohttp.ClientSession() as session:
        thrower = Thrower(HubProgram(tmp_path, {}), session)
        thrower._judge(thrown, answer)
    assert bool(thrower.wrong) is is_wrong


def test_a_defect_in_the_hubs_log_is_noticed_and_a_senders_fault_is_none(tmp_path: Path) -> None:
    hub = HubProgram(tmp_path, {})
    thrower = Thrower(hub, None)  # type: ignore[arg-type]
    hub.said.write_text(
        "2026-11-15 17:07:57,787 WARNING uvicorn.error: Invalid HTTP request received.\n"
        "2026-11-15 17:07:57,788 INFO comfyfleet.hub.http.uvicorn_logging: connection closed: the client left "
        "or violated the protocol (UnicodeDecodeError)\n"
    )
    thrower.check(7)
    assert thrower.wrong == []
    with hub.said.open("a") as log:
        log.write(
            "2026-11-15 17:07:58,000 ERROR hub: incident 1\nTraceback (most recent call last):\nKeyError: 1\n"
        )
    thrower.check(7)
    assert len(thrower.wrong) == 1
