"""A worker's own network: a namespace from which nothing leads out but connections to one address, over one cable.

Run by itself this is the gate, the far end of the cable: it takes connections and passes them on to a Unix socket,
which lies in the file system and so reaches out of the namespace. Nobody can connect to the worker's side. `Network`
is what tests use; it needs no rights where the system lets users have namespaces of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

GATE, WORKER = "10.98.0.1", "10.98.0.2"
PORT = 7001
URL = f"http://{GATE}:{PORT}"


class NotHere(Exception):
    """Why this machine has no network namespaces for us."""


class Network:
    def __init__(self, admission_control: subprocess.Popen[str], holder: int) -> None:
        self._gate = admission_control
        self._holder = holder

    def inside(self, *command: str) -> Sequence[str]:
        """The command as it is run in the worker's network."""
        enter = ("nsenter", "-t", str(self._holder), "-U", "-n", "--preserve-credentials", "--")
        return (*enter, *command)

    @contextlib.contextmanager
    def reaching(self, folder: Path, port: int) -> Iterator[None]:
        """A port of this machine is reached from inside at the same address: what is signed for a host stays so."""
        socket = folder / f"{port}.socket"
        with _passing_on(socket, port):
            way = subprocess.Popen(
                self.inside(sys.executable, __file__, str(socket), str(port)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert way.stdin is not None and way.stdout is not None
            try:
                assert way.stdout.readline() == "ready\n"
                yield
            finally:
                way.stdin.close()
                way.wait(60)
                way.stdout.close()

    def pull_the_cable(self) -> None:
        self._say("down")

    def put_it_back(self) -> None:
        self._say("up")

    def _say(self, word: str) -> None:
        assert self._gate.stdin is not None and self._gate.stdout is not None
        self._gate.stdin.write(f"{word}\n")
        self._gate.stdin.flush()
        assert self._gate.stdout.readline() == f"{word}\n"


@contextlib.contextmanager
def network(folder: Path, port: int) -> Iterator[Network]:
    """Whoever connects to the gate reaches that port of this machine."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            raise NotHere(f"the program {program} is not installed")
    socket = folder / "gate.socket"
    with _passing_on(socket, port):
        admission_control = subprocess.Popen(
            ["unshare", "-Urn", "--kill-child", "--fork", sys.executable, __file__, str(socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert admission_control.stdin is not None and admission_control.stdout is not None
        try:
            said = admission_control.stdout.readline()
            if not said.startswith("ready "):
                raise NotHere(f"network namespaces cannot be made: {said.strip()}")
            yield Network(admission_control, int(said.split()[1]))
        finally:
            admission_control.stdin.close()
            admission_control.wait(60)
            admission_control.stdout.close()


@contextlib.contextmanager
def _passing_on(socket: Path, port: int) -> Iterator[None]:
    """From the Unix socket to the port, in a thread of its own."""
    loop = asyncio.new_event_loop()

    async def serve() -> asyncio.Server:
        async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await join(reader, writer, lambda: asyncio.open_connection("127.0.0.1", port))

        return await asyncio.start_unix_server(link, socket)

    async def end() -> None:
        server.close()
        links = asyncio.all_tasks() - {asyncio.current_task()}
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    server = loop.run_until_complete(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(end())
        # What was aborted is closed in the next turn.
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Callable[[], Awaitable[Streams]]
) -> None:
    """Passes on in both directions until one side has ended."""
    try:
        there = await connect()
    except OSError:
        writer.transport.abort()
        return
    ways = [
        asyncio.ensure_future(_pass_on(reader, there[1])),
        asyncio.ensure_future(_pass_on(there[0], writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for end in (writer, there[1]):
            end.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


# the gate's own process


def _ip(*arguments: str, of: int | None = None) -> None:
    enter = () if of is None else ("nsenter", "-t", str(of), "-n", "--")
    done = subprocess.run([*enter, "ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHere(" ".join((done.stderr or done.stdout).split()) or f"ip {' '.join(arguments)} failed")


async def _be_the_gate(socket: str) -> None:
    holder = await asyncio.create_subprocess_exec(
        "unshare", "-n", "sh", "-c", "echo in; exec sleep 100000", stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    try:
        if await holder.stdout.readline() != b"in\n":
            raise NotHere("no second namespace")
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "gate", "type", "veth", "peer", "name", "cable", "netns", str(holder.pid))
        _ip("address", "add", f"{GATE}/30", "dev", "gate")
        _ip("link", "set", "gate", "up")
        _ip("link", "set", "lo", "up", of=holder.pid)
        _ip("address", "add", f"{WORKER}/30", "dev", "cable", of=holder.pid)
        _ip("link", "set", "cable", "up", of=holder.pid)

        async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await join(reader, writer, lambda: asyncio.open_unix_connection(socket))

        await asyncio.start_server(link, GATE, PORT)
        print("ready", holder.pid, flush=True)
        while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
            _ip("link", "set", "gate", word)
            print(word, flush=True)
    finally:
        holder.kill()
        await holder.wait()


async def _be_a_way(socket: str, port: int) -> None:
    """On the worker's own loopback, until whoever began it is gone."""

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, lambda: asyncio.open_unix_connection(socket))

    await asyncio.start_server(link, "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    try:
        if len(sys.argv) > 2:
            asyncio.run(_be_a_way(sys.argv[1], int(sys.argv[2])))
        else:
            asyncio.run(_be_the_gate(sys.argv[1]))
    except (NotHere, OSError) as reason:
        print(f"cannot: {reason}", flush=True)
