"""Protects against SSRF: calls a URL that a caller gave only if all its addresses are public or allowed.

The connection resolves the name once, checks every address and connects to a checked one, so DNS rebinding
does not help an attacker. It follows no redirects and limits answers in size and time. Its callers decide
what to send.
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
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from comfyfleet.model.errors import Fault, Refusal, RefusalCode

_LOG = logging.getLogger(__name__)

MAX_URL = 2_048
MAX_ANSWER_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 16 * 1024
_LOOKUPS = 256
"""Simultaneous DNS lookups. Dead name servers block a thread far longer than a call lasts."""
_WEB_PORTS = frozenset({80, 443})
_FIRST_FREE_PORT = 1024

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host name."""

# The IANA registries, written out: `is_global` differs between versions of Python.
_NOT_PUBLIC_4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT, and the metadata of one cloud
        "127.0.0.0/8",
        "168.63.129.16/32",  # the host itself in one cloud
        "169.254.0.0/16",  # link-local, and the metadata of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
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
"""All public addresses are in it: no loopback, link-local, unique local, multicast, mapped IPv4, NAT64 …"""
_NOT_PUBLIC_6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # Teredo and other protocols
        "2001:db8::/32",
        "2002::/16",  # 6to4: contains any IPv4 address
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


class ForbiddenUrl(Refusal):
    """The guard never calls this URL."""

    def __init__(self, why: str) -> None:
        super().__init__(RefusalCode.INVALID_REQUEST, why, field="url")


class FetchedAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    """At most `MAX_ANSWER_BYTES`."""
    headers: Mapping[str, str]


class AllowedHosts:
    """What an operator allows besides public addresses: networks, addresses and host names."""

    def __init__(self, entries: Sequence[str] = ()) -> None:
        """Raises `ValueError` for an invalid entry."""
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
    """Checks a URL without DNS. Raises `ForbiddenUrl`."""
    if len(url) > MAX_URL:
        raise ForbiddenUrl(f"the URL has more than {MAX_URL} characters")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        # Programs disagree about the host of such a URL. Other letters have an ASCII form (xn--…).
        raise ForbiddenUrl("the URL may contain only visible ASCII, without spaces and backslashes")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ForbiddenUrl(f"the URL is not valid: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise ForbiddenUrl("the URL must start with http:// or https://")
    if "@" in parts.netloc:
        raise ForbiddenUrl("the URL may not contain a user or password: verify the signature instead")
    if parts.fragment:
        raise ForbiddenUrl("the URL may not have a fragment: leave out the # and what follows")
    host = parts.hostname or ""
    address = _literal(host)
    is_allowed = allowed.has_name(host)
    if address is not None:
        is_allowed = allowed.has_address(address)
        if not is_allowed and not is_public(address):
            raise _not_public(host)
    elif (name := _plain_name(host)) is None:
        raise ForbiddenUrl(f"{host!r} is not a host name")
    elif name != host:
        # The same host with another spelling would pass comparisons of names.
        raise ForbiddenUrl(f"write {name!r}, without the dot at its end")
    elif not is_allowed and (host == "localhost" or host.endswith((".localhost", ".local", ".internal"))):
        raise _not_public(host)
    if not is_allowed and port is not None and port not in _WEB_PORTS and port < _FIRST_FREE_PORT:
        raise ForbiddenUrl(f"port {port} is not allowed: use 80, 443 or one from {_FIRST_FREE_PORT} on")
    if port == 0:
        raise ForbiddenUrl("port 0 is not a valid port")
    return parts


def _not_public(host: str) -> ForbiddenUrl:
    return ForbiddenUrl(
        f"{host!r} is not a public address; the operator of the hub can allow it with 'webhook_allow'"
    )


def _literal(host: str) -> Address | None:
    if "%" in host:
        raise ForbiddenUrl("an address with a zone (%) is not allowed")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _plain_name(host: str) -> str | None:
    """The name without a final dot. None: it is not a host name, or a number that systems read as an address
    (2130706433, 0177.1, 0x7f.1)."""
    name = host.removesuffix(".").lower()
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    return None if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]) else name


class UrlGuard:
    """The defaults of `lookup` and `trust` are the system's resolver and certificates."""

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
        """Raises `ForbiddenUrl`, or `Fault` if there is no answer in time."""
        parts = self.check(url)
        try:
            async with (
                asyncio.timeout(self._limit_s),
                # Send the URL as it was written: normalising may change its meaning or break a signature.
                self._opened().request(
                    "POST", URL(url, encoded=True), allow_redirects=False, data=body, headers=headers
                ) as response,
            ):
                content = await _beginning(response)
                return FetchedAnswer(response.status, content, response.headers)
        except TimeoutError as error:
            raise Fault(f"{parts.netloc} did not answer within {self._limit_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            forbidden = _forbidden_in(error)
            if forbidden is not None:
                raise forbidden from error
            raise Fault(f"cannot reach {parts.netloc}: {_short(error)}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = _Connector(
                resolver=CheckingResolver(self._lookup, self.allowed),
                use_dns_cache=False,
                force_close=True,
                limit=0,
                ssl=self._trust or True,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                # Do not decompress answers, and do not share cookies between receivers.
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
        # A daemon thread: a slow lookup must block neither the shared threads nor the end of the process.
        if not self._threads.acquire(blocking=False):
            raise OSError("too many DNS lookups are running")
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


class CheckingResolver(AbstractResolver):
    """The connector connects only to addresses that this resolver answers."""

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
                # One forbidden address forbids the name: a mix is an attack.
                if not is_public(address) and not self._allowed.has_address(address):
                    # Do not tell the caller the address: it may come from an internal name server.
                    _LOG.info("refused to call %s: it resolves to %s", host, address)
                    raise _ForbiddenAddress(
                        ForbiddenUrl(f"{host!r} resolves to an address that is not public")
                    )
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
        """Nothing to close."""


class _ForbiddenAddress(OSError):
    """Carries a refusal through the connector, which passes on only `OSError`s."""

    def __init__(self, refusal: ForbiddenUrl) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _forbidden_in(error: BaseException | None) -> ForbiddenUrl | None:
    while error is not None:
        if isinstance(error, _ForbiddenAddress):
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
            transport.set_protocol(_LimitedProtocol(protocol))
        return connection


class _LimitedProtocol(asyncio.Protocol):
    """Limits the bytes of a connection: endless interim answers (100 Continue …) could block the event loop."""

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
            # Close the connection instead of reading the rest.
            response.close()
            break
    return b"".join(parts)


def _short(error: Exception) -> str:
    """The system's or TLS's own message."""
    cause: BaseException = error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
    elif isinstance(error, aiohttp.ServerDisconnectedError):
        # Its text shows what was received.
        return "it closed the connection before it answered"
    elif isinstance(error, aiohttp.ClientResponseError):
        # Its text contains the URL, with secrets in the query, and the answer.
        return "its answer is not HTTP, or its head is too long"
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and (cause.errno or 0) > 0:
        return os.strerror(cause.errno or 0)
    return (str(cause) or type(cause).__name__)[:300]
