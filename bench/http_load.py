"""A load generator for HTTP: so many connections, on each the next request once the last is answered.

Requests are packed before it counts, and of an answer only its status and length are read while it does; so one core of
it keeps one core of the hub busy.
"""

from __future__ import annotations

import select
import socket
import time
from typing import Any

import msgspec

_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = b"content-length: "


def request(path: str, key: str, body: Any) -> bytes:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Connection:
    """One request under way; `answer` is that of the last."""

    __slots__ = ("answer", "head", "left", "received", "requests", "socket")

    def __init__(self, port: int, requests: list[bytes]) -> None:
        self.socket = connect(port)
        # From the end, so that the next one is taken off cheaply.
        self.requests = requests[::-1]
        self.received = b""
        self.answer = b""

    def send(self) -> None:
        self.socket.sendall(self.requests.pop())

    def receive(self) -> bool:
        """Whether the answer is whole."""
        part = self.socket.recv(262_144)
        if not part:
            raise SystemExit("the hub hung up on the load generator")
        self.received += part
        head, end, rest = self.received.partition(_END_OF_HEAD)
        if not end:
            return False
        begin = head.find(_LENGTH)
        length = int(head[begin + len(_LENGTH) :].partition(b"\r\n")[0]) if begin >= 0 else 0
        if len(rest) < length:
            return False
        if head[9:10] != b"2":
            raise SystemExit(f"a request of the load generator was refused: {head[:16]!r} {rest[:400]!r}")
        self.received, self.answer = rest[length:], rest[:length]
        return True


def run(
    port: int, connections: int, requests: list[bytes], *, keep: bool = False
) -> tuple[float, list[bytes]]:
    """Seconds for all of the requests; with `keep` their answers, in the order in which they came."""
    opened = [
        Connection(port, requests[first::connections]) for first in range(min(connections, len(requests)))
    ]
    by_number = {each.socket.fileno(): each for each in opened}
    waiting = select.epoll()
    for number in by_number:
        waiting.register(number, select.EPOLLIN)
    answers: list[bytes] = []
    left = len(requests)
    began = time.perf_counter()
    for each in opened:
        each.send()
    while left:
        for number, _ in waiting.poll():
            each = by_number[number]
            if each.receive():
                left -= 1
                if keep:
                    answers.append(each.answer)
                if each.requests:
                    each.send()
    spent = time.perf_counter() - began
    waiting.close()
    for each in opened:
        each.socket.close()
    return spent, answers
