"""Requests to a hub, repeated where that cannot do anything twice, and Server-Sent Events.

Names of routes come from the table of routes. A refusal of the hub is raised as it is; a hub that does not
answer is a `Fault`.
"""

from __future__ import annotations

import asyncio
import codecs
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from comfyfleet.client.discovery import DEFAULT_URL
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.net.reachability import WrongAddress, cause_of, not_a_hub
from comfyfleet.wire.problems import refusal_in
from comfyfleet.wire.routes import ROUTES

T = TypeVar("T")

_REQUEST_ID = "x-request-id"
"""A header that a hub sends with every answer."""
_TABLE = {route.name: route for route in ROUTES}
_SAME_TWICE = frozenset(
    {
        "submit",
        "submit_batch",
        "convert",
        "cancel_job",
        "pause_job",
        "resume_job",
        "change_job",
        "change_webhook",
        "pause_queue",
        "resume_queue",
        "drain_worker",
        "pause_worker",
        "resume_worker",
        "refresh_worker",
        "drain_workers",
        "pause_workers",
        "resume_workers",
        "revoke_key",
        "create_file",
        "complete_file",
        "change_tenant",
        "suspend_tenant",
        "resume_tenant",
        "move_tenant",
        "delete_tenant",
        "grant_credits",
        "confirm_grant",
        "void_grant",
        "adjust_credits",
        "part_links",
    }
)
"""Repeatable besides GET: submissions and grants have an id, a file announced twice is used once, and the
others set a state and add nothing."""
NOT_NOW = (RefusalCode.UNAVAILABLE, RefusalCode.RATE_LIMITED)
_PACK_FROM_BYTES = 16 * 1024
_BASE_S, _CAP_S = 0.1, 3.0


class HubAway(Fault):
    """The hub did not receive the request."""


class HubConnection:
    """`patience_s`: how long a hub that is away or says "not now" is tried again.

    Several addresses are hubs on one store: one is used until it does not answer, then the next.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        key: str | None,
        *,
        answer_s: float = 30.0,
        patience_s: float = 30.0,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._urls = (url,) if isinstance(url, str) else tuple(url)
        for each in self._urls or ("",):
            parts = urlsplit(each)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"{each!r} is not the address of a hub: write it like {DEFAULT_URL}",
                )
        self._urls = tuple(dict.fromkeys(each.rstrip("/") for each in self._urls))
        self.url = self._urls[0]
        """The hub in use."""
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._answer_s = answer_s
        self.patience_s = patience_s
        self._trust = trust
        self.on_away: Callable[[Exception | None], object] | None = None
        """Gets the error when the hub is away or says "not now", and None when it answers again."""
        self._is_away = False
        self._session: aiohttp.ClientSession | None = None
        self._hubs: set[str] = set()
        """Addresses that are known to be hubs."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def switch_hub(self, url: str) -> None:
        """That hub does not answer: the next request goes to the next one."""
        if url == self.url:
            self.url = self._urls[(self._urls.index(url) + 1) % len(self._urls)]

    def tries(self) -> RetryState:
        return RetryState(self.patience_s, len(self._urls), self._note_away)

    def _note_away(self, error: Exception | None) -> None:
        if (error is not None) is not self._is_away:
            self._is_away = not self._is_away
            if self.on_away is not None:
                self.on_away(error)

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            trust = True if self._trust is None else self._trust
            # Each watched job has its connection, so their number is not bounded here.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=trust))
        return self._session

    async def ask(
        self,
        name: str,
        kind: type[T],
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        **places: str,
    ) -> T:
        """Calls a route by its name; `places` are the values in its path."""
        content = await self._ask(name, body, query, headers, places)
        try:
            return msgspec.json.decode(content or b"null", type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Fault(f"cannot decode the answer of {self.url}: {error}") from error

    async def _ask(
        self,
        name: str,
        body: msgspec.Struct | None,
        query: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        places: Mapping[str, str],
    ) -> bytes:
        route = _TABLE[name]
        is_safe = route.method == "GET" or name in _SAME_TWICE
        content = None if body is None else msgspec.json.encode(body)
        tries = self.tries()
        wrong: set[str] = set()
        while True:
            url = self.url
            try:
                async with self._request(
                    route.method, fill_path(route.path, places), content, query, headers
                ) as response:
                    return await response.read()
            except WrongAddress:
                self.switch_hub(url)
                wrong.add(url)
                if len(wrong) == len(self._urls):
                    raise
            except HubAway as error:
                self.switch_hub(url)
                await tries.after(error)
            except Fault as error:
                self.switch_hub(url)
                if not is_safe:
                    raise
                await tries.after(error)
            except Refusal as error:
                if error.code is RefusalCode.UNAUTHENTICATED:
                    # It may belong to another fleet, so the next request goes to another hub.
                    self.switch_hub(url)
                if error.code not in NOT_NOW:
                    raise
                if error.code is RefusalCode.UNAVAILABLE:
                    self.switch_hub(url)
                await tries.after(error, float(error.details.get("retry_after_s", 0.0)))

    @asynccontextmanager
    async def stream(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """An endless answer; after a minute of silence it counts as broken."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._answer_s, sock_read=60.0)
        async with self._request("GET", path, None, None, headers, timeout) as response:
            yield response

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | None,
        query: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        sent = {**self._headers, **(headers or {})}
        if content is not None:
            sent["content-type"] = "application/json"
        is_long = content is not None and len(content) >= _PACK_FROM_BYTES
        url = self.url
        try:
            async with self.session.request(
                method,
                url + path,
                data=content,
                params={name: str(value) for name, value in (query or {}).items() if value is not None},
                headers=sent,
                compress="deflate" if is_long else None,
                timeout=timeout or aiohttp.ClientTimeout(total=self._answer_s),
                allow_redirects=False,
            ) as response:
                if response.status >= 300 or response.content_type == "text/html":
                    refusal = refusal_in(response.status, await response.read())
                    if isinstance(refusal, Fault) and response.status < 500:
                        refusal = await not_a_hub(self.session, url, response.status)
                    raise refusal
                if url not in self._hubs:
                    await self._check_hub(url, response)
                self._note_away(None)
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            why = cause_of(error, url, "the hub", " (--trust)")
            kind = HubAway if isinstance(error, aiohttp.ClientConnectorError) else Fault
            raise kind(f"cannot reach the hub at {url}: {why}") from error

    async def _check_hub(self, url: str, response: aiohttp.ClientResponse) -> None:
        """ComfyUI answers the same path, and its empty list of jobs looks like a hub's."""
        if _REQUEST_ID not in response.headers:
            found = await not_a_hub(self.session, url, response.status)
            if isinstance(found, WrongAddress):
                raise found
            # A proxy or a hub of an older version may omit the header.
        self._hubs.add(url)


class RetryState:
    """Growing pauses with jitter until the patience is over; then the error is raised. All hubs are tried
    before each pause. `on_pause` gets the errors after the first, which may be a short interruption."""

    def __init__(
        self, patience_s: float, hubs: int = 1, on_pause: Callable[[Exception], object] = lambda _: None
    ) -> None:
        self._ends_at = asyncio.get_running_loop().time() + patience_s
        self._count = 0
        self._hubs = self._left = hubs
        self._on_pause = on_pause

    async def after(self, error: Exception, least_s: float = 0.0) -> None:
        self._left -= 1
        if self._left and not least_s:
            return
        self._left = self._hubs
        if self._count:
            self._on_pause(error)
        pause_s = min(_CAP_S, _BASE_S * (1 << min(self._count, 10))) * (0.5 + random.random() / 2)
        pause_s = max(pause_s, least_s)
        if asyncio.get_running_loop().time() + pause_s > self._ends_at:
            raise error
        self._count += 1
        await asyncio.sleep(pause_s)


def fill_path(path: str, parameters: Mapping[str, str]) -> str:
    for name, value in parameters.items():
        path = path.replace(f"{{{name}}}", quote(value, safe=""))
    return path


class ServerEvent(msgspec.Struct, frozen=True):
    data: str
    event: str = "message"
    id: str = ""
    """The latest id, of this event or an earlier one."""


class EventParser:
    """Takes bytes in any portions and returns the complete events, by the rules of the HTML standard."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._is_first = True
        self._after_return = False
        self._data: list[str] = []
        self._event = ""
        self.last_id = ""
        self.retry_s: float | None = None

    def feed(self, content: bytes) -> list[ServerEvent]:
        text = self._decoder.decode(content)
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\ufeff")
        if self._after_return and text:
            # The second half of a line end that was split between two portions.
            text = text.removeprefix("\n")
            self._after_return = False
        if text.endswith("\r"):
            self._after_return = True
        *lines, self._rest = (self._rest + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        found = []
        for line in lines:
            if (event := self._line(line)) is not None:
                found.append(event)
        return found

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            return self._whole()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self.last_id = value
            case "retry" if value.isascii() and value.isdigit():
                self.retry_s = int(value) / 1000
            case _:
                # A comment, or a field that this version does not know.
                pass
        return None

    def _whole(self) -> ServerEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        if not data:
            return None
        return ServerEvent("\n".join(data), event or "message", self.last_id)
