"""The guard: which URLs and addresses are called, and that the address that was looked at is the one connected to."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.outbound._names import NameServer, certificate

from comfyfleet.model.errors import Fault
from comfyfleet.net.url_guard import (
    MAX_ANSWER_BYTES,
    AllowedHosts,
    ForbiddenUrl,
    UrlGuard,
    check_url,
    is_public,
)

HERE = AllowedHosts(["127.0.0.0/8"])


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.255.255.255",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "203.0.113.9",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "64:ff9b::7f00:1",
        "64:ff9b::808:808",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
        "2002:7f00:1::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fec0::1",
        "ff02::1",
    ],
)
def test_an_address_that_is_not_public_is_not_called(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(ForbiddenUrl):
        check_url(f"http://{host}/", AllowedHosts())


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "100.63.255.255", "2606:4700::1111", "2a00:1450::1"]
)
def test_a_public_address_is_called(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
    check_url(f"https://[{address}]/" if ":" in address else f"https://{address}/", AllowedHosts())


@pytest.mark.parametrize(
    "url",
    [
        "http://2130706433/",
        "http://017700000001/",
        "http://0x7f000001/",
        "http://127.1/",
        "http://127.0.1/",
        "http://0177.0.0.1/",
        "http://0x7f.0.0.1/",
        "http://127.0.0.1./",
        "http://127.0.0.01/",
        "http://0/",
        "http://evil.0x7f/",
        "http://localhost/",
        "http://LOCALHOST/",
        "http://localhost./",
        "http://a.localhost/",
        "http://metadata.google.internal/",
        "http://printer.local/",
        "http://example.com./",
        "http://ⓛocalhost/",
        "http://１２７.0.0.1/",
        "http://bücher.example/",
        "http://127。0。0。1/",
        "http://[::ffff:127.0.0.1]/",
        "http://[fe80::1%25eth0]/",
        "http://[::1/",
        "http://exa mple.com/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com\t/",
        "http://example.com\r\nHost: x/",
        "http://user@example.com/",
        "http://user:password@example.com/",
        "http://@example.com/",
        "http://example.com/#fragment",
        "http://example.com:22/",
        "http://example.com:25/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://example.com:x/",
        "http://-example.com/",
        "http://exa..mple.com/",
        "http://%31%32%37.0.0.1/",
        "http:///path",
        "http://",
        "//example.com/",
        "example.com",
        "",
        "file:///etc/passwd",
        "ftp://example.com/",
        "gopher://example.com:6379/_",
        "HTTPS:example.com",
        "https://example.com/" + "x" * 2048,
    ],
)
def test_a_url_that_means_something_else_to_somebody_is_not_called(url: str) -> None:
    with pytest.raises(ForbiddenUrl):
        check_url(url, AllowedHosts())


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "HTTP://Example.COM/hook?a=b&token=c",
        "https://xn--bcher-kva.example/hook",
        "https://hooks.example.com:8443/a",
        "http://1e100.net/",
        "http://a_b.example.com:80/",
        "https://[2606:4700::1111]:443/",
    ],
)
def test_an_ordinary_url_is_called(url: str) -> None:
    check_url(url, AllowedHosts())


@pytest.mark.parametrize(
    ("url", "is_called"),
    [
        ("http://10.2.3.4:25/", True),
        ("http://192.168.0.7/", True),
        ("http://192.168.0.8/", False),
        ("http://[fd00::1]/", True),
        ("http://[::ffff:10.2.3.4]/", False),
        ("http://hooks.internal/", True),
        ("http://hooks.internal:9/", True),
        ("http://other.internal/", False),
        ("http://a.corp.local/", True),
        ("http://a.b.corp.local/", True),
        ("http://corp.local/", False),
        ("http://evilcorp.local/", False),
    ],
)
def test_an_operator_lets_private_receivers_through(url: str, is_called: bool) -> None:
    allowed = AllowedHosts(["10.0.0.0/8", "192.168.0.7", "fd00::/8", "hooks.internal", "*.corp.local"])
    if is_called:
        check_url(url, allowed)
    else:
        with pytest.raises(ForbiddenUrl):
            check_url(url, allowed)


@pytest.mark.parametrize("entry", ["", "10.0.0.0/33", "10.0.0.1/8", "http://x/", "a b", "*", "2130706433"])
def test_an_entry_that_means_nothing_is_told(entry: str) -> None:
    with pytest.raises(ValueError, match="neither an address"):
        AllowedHosts([entry])


# over real connections


@asynccontextmanager
async def receiver(
    handle: Callable[[web.Request], web.StreamResponse] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    trust: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[int, list[web.Request]]]:
    """Its port, and the requests that came."""
    came: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        came.append(request)
        return web.Response() if handle is None else handle(request)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, host, port, ssl_context=trust)
    await site.start()
    try:
        yield runner.addresses[0][1], came
    finally:
        await runner.cleanup()


@asynccontextmanager
async def guard(allowed: AllowedHosts, **more: object) -> AsyncIterator[UrlGuard]:
    made = UrlGuard(allowed, **more)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


async def test_an_answer_that_changes_between_lookups_changes_nothing() -> None:
    # The first answer may be called, every later one is a place that must not be.
    async with (
        NameServer(["127.0.0.2"], ["127.0.0.1"]) as names,
        receiver(host="127.0.0.2") as (port, good),
        receiver(host="127.0.0.1", port=port) as (_, bad),
        guard(AllowedHosts(["127.0.0.2"]), lookup=names.lookup) as called,
    ):
        assert (await called.post(f"http://hooks.example:{port}/", b"", {})).status == 200
        assert (len(good), len(bad), names.asked) == (1, 0, 1)
        with pytest.raises(ForbiddenUrl, match="resolves to an address that is not public"):
            await called.post(f"http://hooks.example:{port}/", b"", {})
        assert (len(good), len(bad), names.asked) == (1, 0, 2)


async def test_one_bad_address_among_good_ones_condemns_the_name() -> None:
    async with (
        NameServer(["127.0.0.2", "169.254.169.254"]) as names,
        guard(AllowedHosts(["127.0.0.2"]), lookup=names.lookup) as called,
    ):
        with pytest.raises(ForbiddenUrl, match="not public") as forbidden:
            await called.post("http://hooks.example:8080/", b"", {})
        assert "169.254" not in forbidden.value.message, (
            "what our name servers know is not the caller's to learn"
        )


async def test_a_name_that_the_operator_allows_leads_anywhere() -> None:
    async with (
        NameServer(["127.0.0.1"]) as names,
        receiver() as (port, came),
        guard(AllowedHosts(["hooks.internal"]), lookup=names.lookup) as called,
    ):
        await called.post(f"http://hooks.internal:{port}/", b"", {})
        assert came[0].host == f"hooks.internal:{port}"


async def test_the_systems_own_resolver_is_guarded_too() -> None:
    async with receiver() as (port, came), guard(AllowedHosts()) as called:
        for host in ("localhost.localdomain", "ip6-localhost", "localhost6"):
            with pytest.raises((ForbiddenUrl, Fault)):
                await called.post(f"http://{host}:{port}/", b"", {})
        assert came == []


@pytest.mark.parametrize("target", ["http://169.254.169.254/latest/meta-data/", "/elsewhere"])
async def test_a_redirect_is_an_answer_and_not_followed(target: str) -> None:
    def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": target})

    async with receiver(redirect) as (port, came), guard(HERE) as called:
        assert (await called.post(f"http://127.0.0.1:{port}/", b"", {})).status == 307
        assert len(came) == 1


async def test_of_a_long_answer_the_beginning_is_read() -> None:
    def long(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (50 * MAX_ANSWER_BYTES))

    async with receiver(long) as (port, _), guard(HERE) as called:
        assert len((await called.post(f"http://127.0.0.1:{port}/", b"", {})).body) == MAX_ANSWER_BYTES


async def test_whoever_takes_a_connection_and_says_nothing_is_not_waited_for() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, guard(HERE, limit_s=0.05) as called:
        with pytest.raises(Fault, match="did not answer within"):
            await called.post(f"http://127.0.0.1:{port}/", b"", {})
    async with guard(HERE) as called:
        with pytest.raises(Fault, match=r"^cannot reach \S+: Connection refused$"):
            await called.post(f"http://127.0.0.1:{port}/", b"", {})


@pytest.mark.parametrize(
    "answer", [b"220 mail.example ESMTP\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000]
)
async def test_what_is_told_of_an_answer_that_is_none_has_nothing_of_the_query(answer: bytes) -> None:
    async def confuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(confuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, guard(HERE) as called:
        with pytest.raises(Fault, match="its answer is not HTTP") as fault:
            await called.post(f"http://127.0.0.1:{port}/hook?token=hidden", b"", {})
        assert "hidden" not in str(fault.value)
        assert "mail.example" not in str(fault.value)


@pytest.mark.parametrize(("heads", "is_taken"), [(3, True), (10_000, False)])
async def test_of_heads_without_end_before_an_answer_only_some_are_read(heads: int, is_taken: bool) -> None:
    """Each costs the loop more than it costs whoever sends it."""

    async def go_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * heads)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(go_on, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, guard(HERE, limit_s=5.0 if is_taken else 0.5) as called:
        if is_taken:
            assert (await called.post(f"http://127.0.0.1:{port}/", b"", {})).status == 200
        else:
            with pytest.raises(Fault, match="did not answer"):
                await called.post(f"http://127.0.0.1:{port}/", b"", {})


async def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look the name up once more, and connect to wherever that leads."""
    async with receiver() as (port, came), receiver() as (proxy, passed), guard(HERE) as called:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        await called.post(f"http://127.0.0.1:{port}/", b"", {})
        assert (len(came), len(passed)) == (1, 0)


async def test_a_url_is_called_as_it_was_written() -> None:
    written = "/a%2Fb/../c%41?sig=x%2Fy%2B%7E&to=/"
    async with receiver() as (port, came), guard(HERE) as called:
        await called.post(f"http://127.0.0.1:{port}{written}", b"", {})
        await called.post(f"http://127.0.0.1:{port}?a=b", b"", {})
        assert [each.raw_path for each in came] == [written, "/?a=b"]


async def test_tls_still_asks_for_the_name_that_was_meant(tmp_path: Path) -> None:
    """Connected to by address, a server must still prove the name in the URL."""
    file, key = certificate(tmp_path, "hooks.example")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(file, key)
    trust = ssl.create_default_context(cafile=str(file))
    async with (
        NameServer(["127.0.0.1"]) as names,
        receiver(trust=serving) as (port, came),
        guard(HERE, lookup=names.lookup, trust=trust) as called,
    ):
        assert (await called.post(f"https://hooks.example:{port}/", b"", {})).status == 200
        with pytest.raises(Fault, match="certificate verify failed: Hostname mismatch"):
            await called.post(f"https://other.example:{port}/", b"", {})
        assert len(came) == 1


_ENDS_WHILE_A_NAME_IS_LOOKED_UP = """
import asyncio, socket, threading
from comfyfleet.model.errors import Fault
from comfyfleet.net.url_guard import UrlGuard

socket.getaddrinfo = lambda *_, **__: threading.Event().wait()

async def main():
    guard = UrlGuard(limit_s=0.05)
    try:
        await guard.post("http://dead.example/", b"", {})
    except Fault as fault:
        print(fault)
    await guard.close()

asyncio.run(main())
"""


def test_a_name_whose_servers_are_dead_keeps_no_process_from_ending() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_WHILE_A_NAME_IS_LOOKED_UP],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout == "dead.example did not answer within 0.05 s\n"
