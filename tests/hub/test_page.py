"""The status page: what is so, for whoever may see it, and never a word of others as HTML."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser

import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process, submission

from comfyfleet.model.access import Role
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import Capabilities, Service

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
BROWSER = {"accept": "text/html,application/xhtml+xml"}


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"


async def register(rig: HubRig, name: str) -> None:
    await rig.engine.register(RegisterWorker(WorkerId(name), Capabilities((Service("comfyui"),))))


async def test_the_page_tells_counts_workers_and_the_newest_jobs_first(rig: HubRig) -> None:
    await register(rig, "gpu-a")
    jobs = [await rig.submit() for _ in range(25)]
    answer = await rig.get("/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    words = Tags(answer.content.decode()).words
    assert "gpu-a" in words and re.search(r"waiting\s+25", words)
    shown = [job for job in jobs if job in words]
    assert shown == jobs[-20:]
    assert words.index(jobs[-1]) < words.index(jobs[-2])


async def test_what_others_named_is_text_and_the_browser_is_told_to_run_nothing(rig: HubRig) -> None:
    await register(rig, EVIL)
    answer = await rig.get("/")
    page = Tags(answer.content.decode())
    assert EVIL in page.words
    assert not page.tags & {"script", "img", "iframe", "link"}
    assert not {name for name in page.attributes if name.startswith("on")}
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"


async def test_a_tenant_sees_its_own_jobs_and_no_worker(rig: HubRig) -> None:
    await register(rig, "gpu-a")
    theirs, ours = await rig.submit(), await rig.submit(role=Role.TENANT)
    page = (await rig.get("/", role=Role.TENANT)).content.decode()
    assert ours in page
    assert theirs not in page and "gpu-a" not in page


async def test_a_browser_without_a_key_is_asked_for_one_and_a_program_gets_a_problem(rig: HubRig) -> None:
    asked = await rig.get("/", role=None, headers=BROWSER)
    assert (asked.status, asked.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert asked.headers["www-authenticate"].startswith("Basic "), (
        "the browser asks, and keeps it out of addresses"
    )
    assert not Tags(asked.content.decode()).tags & {"form", "input"}
    assert "content-security-policy" in asked.headers
    assert (await rig.get("/", role=None)).code == "unauthenticated"
    opened = await rig.get(f"/?token={rig.keys[Role.VIEWER]}", role=None, headers=BROWSER)
    assert opened.status == 200
    assert rig.keys[Role.VIEWER] not in opened.content.decode()


def basic(user: str, password: str) -> dict[str, str]:
    return {**BROWSER, "authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


async def test_a_key_that_a_browser_sends_as_password_opens_the_page_and_nothing_else(rig: HubRig) -> None:
    """A browser sends it for whichever site asks it to: it must change nothing."""
    admin = rig.keys[Role.ADMIN]
    assert (await rig.get("/", role=None, headers=basic("me", admin))).status == 200
    for wrong in (basic("me", "wrong"), basic(admin, ""), {**BROWSER, "authorization": "Basic !"}):
        asked = await rig.get("/", role=None, headers=wrong)
        assert (asked.status, asked.headers["www-authenticate"][:6]) == (401, "Basic ")
    assert (await rig.get("/api/jobs", role=None, headers=basic("me", admin))).status == 401
    assert (await rig.post("/api/jobs", submission(), role=None, headers=basic("me", admin))).status == 401


async def test_a_wrong_key_in_the_address_is_not_shown_on_the_page(rig: HubRig) -> None:
    answer = await rig.get("/?token=%3Cscript%3E", role=None, headers=BROWSER)
    assert answer.status == 401
    assert "script" not in Tags(answer.content.decode()).tags


async def test_the_api_page_shows_every_operation_with_its_parameters_bodies_and_examples(
    rig: HubRig,
) -> None:
    answer = await rig.get("/docs", role=None)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = answer.content.decode()
    page, words = Tags(text), " ".join(Tags(text).words.split())
    document = json.loads((await rig.get("/openapi.json", role=None)).content)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path} {operation['summary'].split('`')[0].strip()}" in words
            texts = [
                operation["summary"],
                *(each["description"] for each in (operation, *operation["parameters"])),
            ]
            assert all(" ".join(part.split()) in words for text in texts for part in text.split("`"))
            for answer_or_body in (*operation["responses"].values(), operation.get("requestBody", {})):
                for media in answer_or_body.get("content", {}).values():
                    if isinstance(example := media.get("example", ""), dict | list):
                        assert json.dumps(example, indent=2, ensure_ascii=False) in html.unescape(text)
    for name, schema in document["components"]["schemas"].items():
        assert f"id='schema-{name}'" in text
        assert set(schema.get("properties", ())) <= set(words.split())
    assert not page.tags & {"script", "img", "iframe", "link"}
    assert set(re.findall(r"href=([^ >]+)", text)) <= {"/openapi.json"} | {
        f"'#{anchor}'" for anchor in re.findall(r"id='?([^'> ]+)", text)
    }


async def test_nothing_outside_the_hub_is_needed_for_the_api_page(rig: HubRig) -> None:
    answer = await rig.get("/docs", role=None)
    text = answer.content.decode()
    (style,) = re.findall("<style>(.*?)</style>", text)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert "url(" not in style and "@import" not in style and " style=" not in text
