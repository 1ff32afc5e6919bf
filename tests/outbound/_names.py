"""A name server on a port of this machine whose answer changes from question to question, and somebody to ask it."""

from __future__ import annotations

import asyncio
import ipaddress
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest


class NameServer(asyncio.DatagramProtocol):
    """Each question gets the next of the answers; the last one stays."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked = 0
        self._transport: asyncio.DatagramTransport
        self._port = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self._port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answers = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        # The question goes back as it came; each answer names it by its place, is of class IN and kept for 0 s.
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(answers), 0, 0)
        rows = (
            b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + ipaddress.IPv4Address(each).packed
            for each in answers
        )
        self._transport.sendto(head + data[12:] + b"".join(rows), addr)

    async def lookup(self, host: str, port: int) -> Sequence[str]:
        """Over UDP, as any resolver would."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        class Asking(asyncio.DatagramProtocol):
            def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
                answer.set_result(data)

        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            Asking, remote_addr=("127.0.0.1", self._port)
        )
        labels = b"".join(bytes([len(label)]) + label.encode() for label in host.split("."))
        transport.sendto(struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0\0\1\0\1")
        try:
            async with asyncio.timeout(60):
                data = await answer
        finally:
            transport.close()
        count, start = struct.unpack("!H", data[6:8])[0], 12 + len(labels) + 5
        rows = [data[start + 16 * number :][:16] for number in range(count)]
        return [str(ipaddress.IPv4Address(row[12:16])) for row in rows]


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that names one host, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate of this test, is not installed")
    file, key = folder / "hub.pem", folder / "hub-key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}"]
    make += ["-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(file)]
    subprocess.run(make, check=True, capture_output=True)
    return file, key
