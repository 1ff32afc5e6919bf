"""A load generator that does what redis-benchmark does: so many connections, on each the next call once the last is
answered. Calls are packed before it counts. It is here because no wheel brings redis-benchmark, and because that
program cannot send a different call each time, which a lease and a completion need.
"""

from __future__ import annotations

import select
import socket
import time

import hiredis


class _Connection:
    __slots__ = ("calls", "reader", "socket")

    def __init__(self, port: int, calls: list[bytes]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = hiredis.Reader()
        # From the end, so that the next one is taken off cheaply.
        self.calls = calls[::-1]


def seconds(port: int, connections: int, calls: list[bytes]) -> float:
    opened = [_Connection(port, calls[first::connections]) for first in range(connections)]
    by_number = {each.socket.fileno(): each for each in opened}
    waiting = select.epoll()
    for number in by_number:
        waiting.register(number, select.EPOLLIN)
    left = len(calls)
    began = time.perf_counter()
    for each in opened:
        each.socket.sendall(each.calls.pop())
    while left:
        for number, _ in waiting.poll():
            each = by_number[number]
            each.reader.feed(each.socket.recv(65536))
            answer = each.reader.gets()
            if answer is False:
                continue
            if answer is None or isinstance(answer, Exception):
                raise SystemExit(f"a call of the load generator was not carried out: {answer!r}")
            left -= 1
            if each.calls:
                each.socket.sendall(each.calls.pop())
    spent = time.perf_counter() - began
    waiting.close()
    for each in opened:
        each.socket.close()
    return spent
