"""A large file goes from a caller through hub and storage to a worker, its server, and all the way back, among real
processes. It must come back whole, and neither hub nor agent may grow by it.

Memory is the peak of what the kernel says was resident, after a first run with a small file has warmed everything up.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from tests.servers.s3_server import CREDENTIALS, S3Server

from chaos.kill_loop import Teller
from chaos.programs import HubProgram, Program, peak_mb
from comfyfleet.client.client import FleetClient
from comfyfleet.model.job import OutputFile

MIB = 1 << 20
_WARM = 1024
_POLL_S = 0.02
_READY_WITHIN_S = 60.0
_WITHIN_S = 900.0


class Size(msgspec.Struct, frozen=True):
    place: Literal["folder", "storage"]
    brought: int
    """Bytes of the file that a job brings …"""
    left: int
    """… and of the one that another leaves."""
    most_mb: float = 32.0
    """What hub and agent may grow by."""


class Moved(msgspec.Struct, frozen=True):
    jobs: int
    grown_mb: dict[str, float]
    """By hub and by worker."""
    wrong: tuple[str, ...] = ()


def run(size: Size, seed: int, tell: Teller) -> Moved:
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        env = stack.enter_context(_storage()) if size.place == "storage" else {}
        hub = HubProgram(folder / "hub", env)
        stack.callback(hub.kill)
        hub.start()
        server = _server(stack, folder)
        (folder / "spool").mkdir()
        worker = Program(
            ["worker", "--hub", hub.url, "--name", "gpu", "--server", server],
            {
                "COMFYFLEET_KEY": hub.key,
                "COMFYFLEET_DATA": str(folder / "worker"),
                "TMPDIR": str(folder / "spool"),
            },
            folder / "worker.said",
        )
        stack.callback(worker.kill)
        pids = {"hub": hub.pid, "worker": worker.process.pid}
        return asyncio.run(_play(size, seed, hub, pids, folder, tell))


async def _play(
    size: Size, seed: int, hub: HubProgram, pids: Mapping[str, int], folder: Path, tell: Teller
) -> Moved:
    wrong: list[str] = []
    async with FleetClient(hub.url, hub.key) as client:
        journey = _Journey(client, folder, seed, wrong)
        await journey.bring(_WARM)
        await journey.leave(_WARM)
        before = {name: peak_mb(pid) for name, pid in pids.items()}
        tell(f"a job brings {size.brought / MIB:.0f} MiB")
        await journey.bring(size.brought)
        tell(f"a job leaves {size.left / MIB:.0f} MiB")
        await journey.leave(size.left)
        grown = {name: round(peak_mb(pid) - before[name], 1) for name, pid in pids.items()}
    wrong += [
        f"the {name} grew by {more} MB" for name, more in grown.items() if not 0 <= more <= size.most_mb
    ]
    if left := [path.name for path in (folder / "spool").iterdir()]:
        wrong.append(f"the worker left {left} on its disk")
    return Moved(journey.jobs, grown, tuple(wrong))


class _Journey:
    def __init__(self, client: FleetClient, folder: Path, seed: int, wrong: list[str]) -> None:
        self._client = client
        self._folder = folder
        self._seed = seed
        self._wrong = wrong
        self.jobs = 0

    async def bring(self, size: int) -> None:
        """Up from here, to the server, which copies it, and back."""
        path = self._folder / "brought"
        digest = await asyncio.to_thread(_make, path, size)
        uploaded = await self._client.upload(path)
        if (uploaded.size, uploaded.sha256) != (size, digest):
            self._wrong.append(f"{size} bytes were uploaded and {uploaded.size} are known")
        brought = {"file": uploaded.id, "node": "1", "input": "file"}
        file = await self._run(0, inputs=[brought])
        if file is not None:
            await self._compare(file, digest)

    async def leave(self, size: int) -> None:
        """Made at the server, from the seed in the graph: so what it should be is known here, too."""
        file = await self._run(size)
        if file is None or file.file_id is None:
            self._wrong.append(f"a file of {size} bytes was not kept")
            return
        saved = await self._compare(file, await asyncio.to_thread(_sha_of_seed, size, self._seed))
        if saved != size:
            self._wrong.append(f"{size} bytes were made and {saved} came")

    async def _run(self, size: int, **more: Any) -> OutputFile | None:
        self._seed += 1
        inputs = {"filename_prefix": "large", "size": size, "seed": self._seed, "file": ""}
        job = await self._client.submit({"1": {"class_type": "LabFile", "inputs": inputs}}, **more)
        self.jobs += 1
        ended = await self._client.wait(job.id, timeout=_WITHIN_S)
        if ended.result is None or len(ended.result.files) != 1:
            self._wrong.append(f"the job {job.id} ended as {ended.status}: {ended.error}")
            return None
        return ended.result.files[0]

    async def _compare(self, file: OutputFile, digest: str) -> int:
        path = self._folder / "back"
        size = await self._client.save(file, path)
        if await asyncio.to_thread(_sha, path) != digest:
            self._wrong.append(f"{size} bytes came back, and others than were sent")
        path.unlink()
        return size


def _make(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as target:
        for start in range(0, size, MIB):
            piece = os.urandom(min(MIB, size - start))
            digest.update(piece)
            target.write(piece)
    return digest.hexdigest()


def _sha_of_seed(size: int, seed: int) -> str:
    """Of the file that a fake server makes."""
    digest, chance = hashlib.sha256(), random.Random(seed)
    for start in range(0, size, MIB):
        digest.update(chance.randbytes(min(MIB, size - start)))
    return digest.hexdigest()


def _sha(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _storage() -> Iterator[dict[str, str]]:
    server = S3Server().start()
    try:
        yield {
            "COMFYFLEET_ASSETS": f"s3://{server.bucket.name}/chaos",
            "COMFYFLEET_S3_ENDPOINT": server.bucket.endpoint,
            "COMFYFLEET_S3_REGION": server.bucket.region,
            "COMFYFLEET_S3_ACCESS_KEY": CREDENTIALS.access_key,
            "COMFYFLEET_S3_SECRET_KEY": CREDENTIALS.secret_key,
        }
    finally:
        server.stop()


def _server(stack: ExitStack, folder: Path) -> str:
    said: list[str] = []
    program = Program(
        ["fake-comfyui", "--port", "0"],
        {"TMPDIR": str(folder)},
        folder / "server.said",
        said.append,
    )
    stack.callback(program.kill)
    deadline = time.monotonic() + _READY_WITHIN_S
    while not (urls := [line.split()[0] for line in said if line.startswith("http://")]):
        if program.has_ended or time.monotonic() > deadline:
            raise RuntimeError("the fake server did not start")
        time.sleep(_POLL_S)
    return urls[0]
