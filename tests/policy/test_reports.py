"""What of a worker's report may reach a caller: safe names, addresses of the web, no word of where a server stands."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.policy.sanitizer import (
    INSIDE,
    safe_failure,
    safe_folder,
    safe_name,
    safe_progress,
    safe_result,
    safe_text,
    safe_url,
)


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("ComfyUI_00001_.png", "ComfyUI_00001_.png"),
        ("größe 1.png", "größe 1.png"),
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("/etc/passwd", "passwd"),
        ("C:evil.exe", "evil.exe"),
        ("..", "file"),
        ("", "file"),
        ("a/", "file"),
        ("x\x1b[2J\n.png", "x_[2J_.png"),
        ("gpj.\u202eexe", "gpj._exe"),
    ],
)
def test_a_name_stays_in_its_folder(name: str, safe: str) -> None:
    assert safe_name(name) == safe


@pytest.mark.parametrize(
    ("folder", "safe"),
    [("", ""), ("a/b", "a/b"), ("../a", "a"), ("/etc", "etc"), ("a/../../b", "a/b"), ("C:\\temp", "temp")],
)
def test_a_folder_stays_below_its_own(folder: str, safe: str) -> None:
    assert safe_folder(folder) == safe


@given(st.text())
def test_nothing_that_is_safe_leads_elsewhere(text: str) -> None:
    name = safe_name(text)
    assert name and "/" not in name and "\\" not in name and name.strip(".")
    assert not {"..", "."} & set(safe_folder(text).split("/"))
    assert (safe_name(name), safe_text(safe_text(text))) == (name, safe_text(text))


@pytest.mark.parametrize(
    "url", ["https://cdn.example.com/x.png?y=1", "http://8.8.8.8/x", "https://a.b:8443/"]
)
def test_an_address_of_the_web_stays(url: str) -> None:
    assert safe_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)",
        "JAVASCRIPT:alert(1)",
        "java\nscript:alert(1)",
        "data:text/html,<script>",
        "file:///etc/passwd",
        "//evil.example/x",
        "/view?filename=x.png",
        "http://127.0.0.1:8188/view",
        "http://10.1.2.3/view",
        "http://[::1]:8188/",
        "http://[fe80::1%25eth0]/",
        "http://gpu-a:8188/view",
        "http://gpu.internal/",
        "http://localhost/",
        "https://user:secret@example.com/",
        "http://[broken",
        "http:///x",
    ],
)
def test_any_other_address_does_not(url: str) -> None:
    assert safe_url(url) is None


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("Cannot reach http://10.0.0.5:8188/prompt: refused", f"Cannot reach {INSIDE}: refused"),
        ("Cannot connect to host gpu-a:8188 ssl:default", f"Cannot connect to host {INSIDE} ssl:default"),
        ("Connect call failed ('127.0.0.1', 8188)", f"Connect call failed {INSIDE}"),
        ("peer 192.168.1.7:8188 is gone.", f"peer {INSIDE} is gone."),
        ("see https://github.com/x/y.", "see https://github.com/x/y."),
        ("version 0.3.64 of node 1.2.3.4.5", "version 0.3.64 of node 1.2.3.4.5"),
        ("expected 10.5 GB\n  at line 12", "expected 10.5 GB\n  at line 12"),
    ],
)
def test_text_does_not_tell_where_a_server_stands(text: str, safe: str) -> None:
    assert safe_text(text) == safe


def test_a_whole_result_is_made_safe_and_a_good_one_is_as_it_was() -> None:
    bad: dict[str, Any] = {
        "images": [{"filename": "../x.png", "subfolder": "../..", "type": "output"}],
        "gifs": [{"url": "javascript:alert(1)", "nested": {"href": "http://10.0.0.1/"}}],
        "text": ["javascript: is only a word here"],
    }
    result = safe_result(
        JobResult({"9": bad}, (OutputFile("9", "images", "../x.png", "..", url="http://gpu:8188/view"),))
    )
    assert result.outputs == {
        "9": {
            "images": [{"filename": "x.png", "subfolder": "", "type": "output"}],
            "gifs": [{"url": None, "nested": {"href": None}}],
            "text": ["javascript: is only a word here"],
        }
    }
    assert result.files == (OutputFile("9", "images", "x.png"),)
    good = JobResult(
        {"9": {"images": [{"filename": "x.png", "subfolder": "a", "type": "output"}], "n": [1, None, True]}},
        (OutputFile("9", "images", "x.png", "a", url="https://example.com/x.png"),),
    )
    assert safe_result(good) is good


def test_a_failure_and_news_are_made_safe() -> None:
    where = "http://127.0.0.1:8188/prompt"
    failure = Failure(
        FailureKind.TRANSIENT, where, traceback=(where,), node_errors={"9": {"details": [where, 3]}}
    )
    safe = safe_failure(failure)
    assert (safe.message, safe.traceback) == (INSIDE, (INSIDE,))
    assert safe.node_errors == {"9": {"details": [INSIDE, 3]}}
    progress = {"message": f"at {where}", "value": 3, "files": [{"filename": "../x", "url": where}]}
    assert safe_progress(progress) == {
        "message": f"at {INSIDE}",
        "value": 3,
        "files": [{"filename": "x", "url": None}],
    }


def test_news_are_made_safe_at_every_depth() -> None:
    evil: dict[str, Any] = {
        "message": "at http://10.0.0.5:8188/prompt \x1b[2J",
        "href": "javascript:alert(1)",
        "picture": {"of": " Java\nScript:alert(1)"},
        "filename": "../../x.png",
        "subfolder": "../a",
        "lines": ["one\ntwo", "gpj.\u202eexe", ["('127.0.0.1', 8188)"]],
        "host gpu-a:8188\x07": 1,
        "value": 3,
    }
    safe = {
        "message": f"at {INSIDE} _[2J",
        "href": None,
        "picture": {"of": None},
        "filename": "x.png",
        "subfolder": "a",
        "lines": ["one\ntwo", "gpj._exe", [INSIDE]],
        f"host {INSIDE}_": 1,
        "value": 3,
    }
    assert safe_progress(evil) == safe
    assert safe_progress({"a": [{"b": evil}]}) == {"a": [{"b": safe}]}
    assert safe_progress(safe) == safe


def test_news_are_bounded_at_every_depth() -> None:
    long = "x" * 20_000
    deep: Any = "http://10.0.0.5/"
    for _ in range(100):
        deep = [deep]
    progress = safe_progress({"a": {"b": [long]}, long: 1, "deep": deep})
    assert len(progress["a"]["b"][0]) == 10_000
    assert max(map(len, progress)) < 1_001
    assert "10.0.0.5" not in repr(progress)


def test_text_steers_no_terminal() -> None:
    failure = Failure(FailureKind.TRANSIENT, "\x1b]0;owned\x07 bad\r\n\tagain", node_errors={"\x1b": "\x9b"})
    safe = safe_failure(failure)
    assert safe.message == "_]0;owned_ bad\r\n\tagain"
    assert safe.node_errors == {"_": "_"}


@pytest.mark.parametrize(
    "text",
    [
        "1.1.1.1:" + "1" * 60_000 + "a",
        "1.1.1.1" + ".1" * 30_000 + "a",
        "http://" + "." * 60_000,
        "host " + "a-" * 30_000,
        "('" + "1." * 30_000 + "', 1" + ", 1" * 20_000,
    ],
)
def test_no_text_is_read_over_and_over(text: str) -> None:
    """Each character of an address that has no end costs the same: read again from each, it would take a quarter of a
    minute."""
    began = time.process_time()
    safe_text(text)
    assert time.process_time() - began < 2


def test_what_has_no_end_is_cut_before_it_is_looked_at() -> None:
    long = "a/" * 1_000_000
    assert len(safe_name(long + "b" * 1_000_000)) == 4_096
    assert safe_name(long + "x.png") == "x.png"
    assert len(safe_folder(long)) < 4_097
    assert safe_url("https://example.com/" + long) is None
    assert len(safe_progress({"message": long})["message"]) == 10_000
