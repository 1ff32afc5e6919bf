"""The guard on every URL that is fetched for a caller: only public addresses, and the very one that was looked at.

A name is resolved once, in the connection itself; every address it has must be allowed, and one of those is connected
to, so that an answer that changes between two lookups changes nothing. TLS still checks the name. Redirects are not
followed, and an answer is bounded in size and time. What is sent, and how often, is for whoever uses it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from comfyfleet.model.errors import Fault, Refusal, RefusalCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_LOG = logging.getLogger(__name__)

MAX_URL = 2_048
MAX_ANSWER_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 16 * 1024
_LOOKUPS = 256
"""Names that are looked up at a time. One whose servers are dead keeps its thread far longer than a call may last, so
that whoever names many of those must not have all the threads there are."""
_WEB_PORTS = frozenset({80, 443})
_FIRST_FREE_PORT = 1024

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name."""

# The registries of special addresses, written out: what Python calls global differs from version to version.
_NOT_PUBLIC_4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a carrier's NAT, and the metadata of one cloud
        "127.0.0.0/8",
        "168.63.129.16/32",  # a public address that means the host itself in one cloud
        "169.254.0.0/16",  # link-local, and the metadata of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
"""Whatever is outside is no public address: loopback, link-local, unique local, multicast, IPv4 in disguise, NAT64 …"""
_NOT_PUBLIC_6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # Teredo and other protocols
        "2001:db8::/32",
        "2002::/16",  # 6to4: any IPv4 address in disguise
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


class ForbiddenUrl(Refusal):
    """This URL is not fetched for anybody, now or later."""

    def __init__(self, why: str) -> None:
        super().__init__(RefusalCode.INVALID_REQUEST, why, field="url")


class FetchedAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    """At most `MAX_ANSWER_BYTES` of it."""
    headers: Mapping[str, str]


class AllowedHosts:
    """What an operator lets through beside public addresses: networks, addresses, and names wherever they lead to."""

    def __init__(self, entries: Sequence[str] = ()) -> None:
        """Raises `ValueError` with the entry that is neither."""
        networks: list[Network] = []
        names: set[str] = set()
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry))
                continue
            except ValueError:
                name = _plain_name(entry.removeprefix("*."))
            if name is None or "/" in entry:
                raise ValueError(
                    f"{entry!r} is neither an address, a network such as 10.0.0.0/8, nor a host name"
                )
            names.add(f".{name}" if entry.startswith("*.") else name)
        self._networks = tuple(networks)
        self._names = frozenset(names)

    def has_name(self, host: str) -> bool:
        parts = host.split(".")
        above = (f".{'.'.join(parts[number:])}" for number in range(1, len(parts)))
        return host in self._names or any(each in self._names for each in above)

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return address in _PUBLIC_6 and not any(address in network for network in _NOT_PUBLIC_6)


def check_url(url: str, allowed: AllowedHosts) -> SplitResult:
    """What can be said without asking anybody where the name leads to. Raises `ForbiddenUrl`."""
    if len(url) > MAX_URL:
        raise ForbiddenUrl(f"a URL has at most {MAX_URL} characters")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        # Two programs may read such a URL as two different hosts. A name of other letters has a form that begins xn--.
        raise ForbiddenUrl("a URL is written in visible ASCII, without spaces and backslashes")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ForbiddenUrl(f"the URL cannot be understood: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise ForbiddenUrl("only http:// and https:// URLs are called")
    if "@" in parts.netloc:
        raise ForbiddenUrl(
            "a URL with a user or a password in it is not called: verify the signature instead"
        )
    if parts.fragment:
        raise ForbiddenUrl("a URL that is called has no fragment: leave out the # and what follows")
    host = parts.hostname or ""
    address = _literal(host)
    is_let_through = allowed.has_name(host)
    if address is not None:
        is_let_through = allowed.has_address(address)
        if not is_let_through and not is_public(address):
            raise _not_public(host)
    elif (name := _plain_name(host)) is None:
        raise ForbiddenUrl(f"{host!r} is not the name of a host")
    elif name != host:
        # A dot at the end means the same host, and would be another name to whoever compares.
        raise ForbiddenUrl(f"write {name!r}, without the dot at its end")
    elif not is_let_through and (host == "localhost" or host.endswith((".localhost", ".local", ".internal"))):
        raise _not_public(host)
    if not is_let_through and port is not None and port not in _WEB_PORTS and port < _FIRST_FREE_PORT:
        raise ForbiddenUrl(f"port {port} is not called: use 80, 443 or one from {_FIRST_FREE_PORT} on")
    if port == 0:
        raise ForbiddenUrl("port 0 is nobody's")
    return parts


def _not_public(host: str) -> ForbiddenUrl:
    return ForbiddenUrl(
        f"{host!r} is not a public address; the operator of the hub can allow it with 'webhook_allow'"
    )


def _literal(host: str) -> Address | None:
    if "%" in host:
        raise ForbiddenUrl("an address with a zone is nobody's but this machine's")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _plain_name(host: str) -> str | None:
    """The name without a dot at its end; None for what is none, numbers among it: systems read 2130706433, 0177.1 and
    0x7f.1 as addresses."""
    name = host.removesuffix(".").lower()
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    return None if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]) else name


class UrlGuard:
    """Fetches for others. `lookup` tells the addresses of a name; the system's resolver does unless another is given.

    `trust` is what TLS trusts: the system's certificates unless given.
    """

    def __init__(
        self,
        allowed: AllowedHosts | None = None,
        *,
        lookup: Lookup | None = None,
        trust: ssl.SSLContext | None = None,
        limit_s: float = 10.0,
    ) -> None:
        self.allowed = allowed or AllowedHosts()
        self._limit_s = limit_s
        self._trust = trust
        self._threads = threading.BoundedSemaphore(_LOOKUPS)
        self._lookup = lookup or self._ask_system
        self._session: aiohttp.ClientSession | None = None

    def check(self, url: str) -> SplitResult:
        return check_url(url, self.allowed)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> FetchedAnswer:
        """Raises `ForbiddenUrl`, or `Fault` where nobody answered in time."""
        parts = self.check(url)
        try:
            async with (
                asyncio.timeout(self._limit_s),
                self._asked("POST", url, data=body, headers=headers) as response,
            ):
                content = await _beginning(response)
                return FetchedAnswer(response.status, content, response.headers)
        except TimeoutError as error:
            raise Fault(f"{parts.netloc} did not answer within {self._limit_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            forbidden = _forbidden_in(error)
            if forbidden is not None:
                raise forbidden from error
            raise Fault(f"{parts.netloc} cannot be reached: {_short(error)}") from error

    @asynccontextmanager
    async def _asked(self, method: str, url: str, **more: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        # As it was written: what was signed, or means something else when it is put in order, is its owner's.
        exactly = URL(url, encoded=True)
        async with self._opened().request(method, exactly, allow_redirects=False, **more) as response:
            yield response

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = _Connector(
                resolver=_Checked(self._lookup, self.allowed),
                use_dns_cache=False,
                force_close=True,
                limit=0,
                ssl=self._trust or True,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                # What a receiver sends packed is not unpacked, and no cookie of one goes to another.
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=self._limit_s),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask_system(self, host: str, port: int) -> Sequence[str]:
        # Not in the threads that everybody uses: a name whose servers are dead would keep files and stores waiting. Nor
        # in any that Python waits for at its end: a hub that is stopped would be kept by that name, too.
        if not self._threads.acquire(blocking=False):
            raise OSError("too many names are being looked up")
        found: Future[list[str]] = Future()
        found.set_running_or_notify_cancel()

        def look_up() -> None:
            try:
                answer = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found.set_result([str(each[4][0]) for each in answer])
            except Exception as error:
                found.set_exception(error)
            finally:
                self._threads.release()

        threading.Thread(target=look_up, name="lookup", daemon=True).start()
        return await asyncio.wrap_future(found)


class _Checked(AbstractResolver):
    """Asked by the connector, which connects to what is answered here and asks nobody else."""

    def __init__(self, lookup: Lookup, allowed: AllowedHosts) -> None:
        self._lookup = lookup
        self._allowed = allowed

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_INET,  # noqa: ARG002
    ) -> list[ResolveResult]:
        addresses = [ipaddress.ip_address(each.partition("%")[0]) for each in await self._lookup(host, port)]
        if not addresses:
            raise OSError(f"{host} has no address")
        if not self._allowed.has_name(host):
            for address in addresses:
                # One bad address condemns the name: whoever mixes them means the bad one.
                if not is_public(address) and not self._allowed.has_address(address):
                    # Where to is not for whoever asked: he would learn what our own name servers know.
                    _LOG.info("%s leads to %s and is not called", host, address)
                    raise _Led(ForbiddenUrl(f"{host!r} leads to an address that is not public"))
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in dict.fromkeys(addresses)
        ]

    async def close(self) -> None:
        """Nothing of its own is open."""


class _Led(OSError):
    """A refusal on its way through the connector, which passes on nothing but its own kind of error."""

    def __init__(self, refusal: ForbiddenUrl) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _forbidden_in(error: BaseException | None) -> ForbiddenUrl | None:
    while error is not None:
        if isinstance(error, _Led):
            return error.refusal
        error = error.__cause__ or error.__context__
    return None


class _Connector(aiohttp.TCPConnector):
    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        transport, protocol = connection.transport, connection.protocol
        if transport is not None and protocol is not None:
            transport.set_protocol(_Bounded(protocol))
        return connection


class _Bounded(asyncio.Protocol):
    """Takes so much of a connection and no more. An answer may have a thousand heads before its own (100 Continue …):
    whoever sent them for as long as a call may last kept the loop from everything else."""

    def __init__(self, reader: asyncio.Protocol) -> None:
        self._reader = reader
        self._left = MAX_ANSWER_BYTES + _MAX_HEAD_BYTES

    def data_received(self, data: bytes) -> None:
        if self._left > 0:
            self._reader.data_received(data[: self._left])
        self._left -= len(data)

    def eof_received(self) -> bool | None:
        return self._reader.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.connection_lost(exc)

    def pause_writing(self) -> None:
        self._reader.pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume_writing()


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(16 * 1024):
        parts.append(part[: MAX_ANSWER_BYTES - size])
        size += len(part)
        if size >= MAX_ANSWER_BYTES:
            # The rest is not read: the connection is closed, not used again.
            response.close()
            break
    return b"".join(parts)


def _short(error: Exception) -> str:
    """What the system or TLS said, without the connector's own words around it."""
    cause: BaseException = error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
    elif isinstance(error, aiohttp.ServerDisconnectedError):
        # Its own text shows whatever came before.
        return "it hung up before it had answered"
    elif isinstance(error, aiohttp.ClientResponseError):
        # Its own text has the URL in it, with whatever secret is in the query, and what another service answered.
        return "its answer is not HTTP, or its head is too long"
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and (cause.errno or 0) > 0:
        return os.strerror(cause.errno or 0)
    return (str(cause) or type(cause).__name__)[:300]
