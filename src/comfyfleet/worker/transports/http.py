"""The worker API over HTTP. It only opens outbound connections, so a worker behind NAT can use it.

It raises the hub's refusals as they are and any other error as a `Fault`, after which the agent tries again.
Polls carry the hash of the capabilities; a hub that does not know the hash refuses, and the agent registers
again.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self, TypeVar

import aiohttp
import msgspec

from comfyfleet.model.calls import (
    Command,
    Completion,
    FailureReport,
    HeartbeatReply,
    LeasedJob,
    Poll,
    ProgressReport,
    RegisterWorker,
    Release,
    ReportReply,
)
from comfyfleet.model.dispatch import LeaseRef, Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileGrant, InputFile
from comfyfleet.model.ids import ProfileKey, WorkerId
from comfyfleet.model.job import OutputFile
from comfyfleet.model.node_classes import NodeCatalog
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.net.reachability import cause_of, not_a_hub
from comfyfleet.ports import OutputSource
from comfyfleet.tracing import traceparent
from comfyfleet.wire import files
from comfyfleet.wire import worker as wire
from comfyfleet.wire.files import FilePart
from comfyfleet.wire.problems import refusal_in
from comfyfleet.worker.job_files import measured
from comfyfleet.worker.transports.file_transfer import FileTransfer, put_parts

T = TypeVar("T")

ANSWER_S = 15.0
"""The time for an answer, beyond the time that the call waits."""
LEFT_FOR = (RefusalCode.UNAVAILABLE, RefusalCode.UNAUTHENTICATED)
"""After these the next hub is tried: this one is stopping, or it belongs to another fleet."""
_PACK_FROM_BYTES = 16 * 1024
_QUIET_S = 120.0
_ASK_AGAIN_S = 60.0
"""A hub without file storage is asked again after this time, and after the next registration."""


class HttpWorkerApi:
    """An async context manager that any number of agents can share. It can be closed twice."""

    def __init__(
        self,
        url: str | Sequence[str],
        key: str | None = None,
        *,
        answer_s: float = ANSWER_S,
        trust: ssl.SSLContext | None = None,
        spool: Path | None = None,
    ) -> None:
        """Several addresses are hubs on one store: one is used until it does not answer, then the next."""
        self._urls = tuple(each.rstrip("/") for each in ((url,) if isinstance(url, str) else url))
        self._url = self._urls[0]
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._answer_s = answer_s
        self._trust = trust
        self._spool = spool
        self._hashes: dict[WorkerId, str] = {}
        self._knows_nodes: dict[WorkerId, bool | None] = {}
        self._session: aiohttp.ClientSession | None = None
        self._links = FileTransfer(self._url, connect_s=answer_s, quiet_s=_QUIET_S, trust=trust)
        self._keeps_none_until = 0.0
        self._tells_instance = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
        await self._links.close()

    # calls

    async def register(self, call: RegisterWorker) -> WorkerRecord:
        capabilities = msgspec.to_builtins(call.capabilities)
        body = wire.RegisterBody(call.worker_id, capabilities, slots=call.slots, live=call.live)
        if call.offline_reason:
            body = msgspec.structs.replace(body, offline_reason=call.offline_reason[:1_000])
        if call.instance and self._tells_instance:
            body = msgspec.structs.replace(body, instance=call.instance)
        try:
            answer = await self._ask("register", body, wire.RegisteredBody)
        except Refusal as refusal:
            is_refused = refusal.code is not RefusalCode.INVALID_REQUEST
            if body.instance is None or is_refused or call.offline_reason:
                raise
            # A hub of an older version does not know `instance`.
            self._tells_instance = False
            answer = await self._ask(
                "register", msgspec.structs.replace(body, instance=None), wire.RegisteredBody
            )
        self._hashes[call.worker_id] = answer.capabilities_hash
        self._knows_nodes[call.worker_id] = answer.knows_nodes
        self._keeps_none_until = 0.0
        return WorkerRecord(
            call.worker_id,
            answer.capabilities,
            ProfileKey(answer.profile),
            answer.slots,
            answer.connected_at,
            answer.last_seen_at,
            call.live,
        )

    async def describe(self, worker_id: WorkerId, nodes: NodeCatalog) -> None:
        knows = self._knows_nodes.get(worker_id)
        if knows:
            return
        # A hub of an older version does not say, and takes no signatures.
        signatures = {} if knows is None else nodes.signatures
        try:
            await self._send("describe", wire.DescribeBody(worker_id, nodes.definitions, signatures))
        except Refusal as refusal:
            if refusal.code is not RefusalCode.TOO_LARGE or not signatures:
                raise
            # Definitions are a third of the size, and editor workflows need them. Signatures are optional.
            await self._send("describe", wire.DescribeBody(worker_id, nodes.definitions))

    async def poll(self, call: Poll) -> LeasedJob | None:
        wait_s = min(call.wait_s, wire.MAX_WAIT_S)
        body = wire.PollBody(
            call.worker_id,
            call.poll_id,
            wait_s,
            capabilities_hash=self._hashes.get(call.worker_id),
            instance=call.instance or None if self._tells_instance else None,
        )
        content = await self._send("poll", body, wait_s)
        return None if content is None else wire.leased_job(_decode(content, wire.LeaseAnswer))

    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> HeartbeatReply:
        body = wire.HeartbeatBody(worker_id, tuple(refs))
        return wire.heartbeat_reply(await self._ask("heartbeat", body, wire.HeartbeatAnswer))

    async def progress(self, reports: Sequence[ProgressReport]) -> HeartbeatReply:
        body = wire.ProgressBatch(tuple(reports))
        return wire.heartbeat_reply(await self._ask("progress", body, wire.HeartbeatAnswer))

    async def complete(self, call: Completion) -> ReportReply:
        return await self._end_lease(
            "complete", msgspec.structs.replace(call, seconds=max(0.0, call.seconds))
        )

    async def fail(self, call: FailureReport) -> ReportReply:
        return await self._end_lease("fail", msgspec.structs.replace(call, seconds=max(0.0, call.seconds)))

    async def release(self, call: Release) -> ReportReply:
        return await self._end_lease("release", call)

    async def commands(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        body = wire.CommandsBody(worker_id, min(wait_s, wire.MAX_WAIT_S))
        return wire.commands_in(
            (await self._ask("commands", body, wire.CommandsAnswer, body.wait_s)).commands
        )

    async def unregister(self, worker_id: WorkerId, reason: str) -> None:
        await self._send("unregister", wire.UnregisterBody(worker_id, reason[:1_000]))

    # input files

    async def fetch_input(self, job: LeasedJob, file: InputFile, path: Path) -> None:
        if file.url is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"there is no file {file.file_id!r} (any more)")
        try:
            return await self._links.get(file.url, path, file.size)
        except Refusal as refusal:
            if refusal.code is not RefusalCode.UNAUTHENTICATED:
                raise
        # The link has expired, because other files came first or the lease was sent again.
        body = wire.HeartbeatBody(job.worker_id, (job.ref,), inputs=True)
        answer = await self._ask("heartbeat", body, wire.HeartbeatAnswer)
        for each in (each for lease in answer.inputs for each in lease.inputs):
            if each.file_id == file.file_id and each.url is not None:
                return await self._links.get(each.url, path, file.size)
        if not answer.alive:
            raise Refusal(RefusalCode.LEASE_LOST, "the lease is over")
        raise Refusal(RefusalCode.NOT_FOUND, f"there is no file {file.file_id!r} (any more)")

    # output files

    async def store_output(self, ref: LeaseRef, file: OutputFile, source: OutputSource) -> str | None:
        """Goes through this machine's disk: a file may be larger than the worker's free memory."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._keeps_none_until:
            return None
        with TemporaryDirectory(prefix="comfyfleet-", dir=self.spool_folder()) as folder:
            path = Path(folder) / "output"
            await source.save(file, path)
            size, digest = await asyncio.to_thread(measured, path)
            body = files.GrantsBody(ref, (files.output_body(file.filename, size, digest),))
            try:
                (granted,) = (await self._ask("grants", body, files.FileGrants)).files
            except Refusal as refusal:
                if refusal.code is not RefusalCode.NOT_FOUND:
                    raise
                # A hub without storage: callers get the server's links. It may restart with a folder.
                self._keeps_none_until = loop.time() + _ASK_AGAIN_S
                return None
            if granted.parts is not None:
                await put_parts(self._links, path, size, granted.parts, partial(self._part, ref, granted.id))
            else:
                assert granted.link is not None, "a grant is a link"
                await self._links.put(granted.link.url, path, granted.link.headers)
            return granted.id

    async def _part(self, ref: LeaseRef, file_id: str, part: FilePart, digest: str) -> FileGrant:
        asked = (files.PartBody(part.number, digest),)
        body = files.WorkerPartsBody(ref, file_id, asked)
        (link,) = (await self._ask("parts", body, files.PartGrants)).links
        return link

    def spool_folder(self) -> Path | None:
        """The folder for files in transit. None: the system's temporary folder."""
        return self._spool if self._spool is not None and self._spool.is_dir() else None

    # requests

    def _leave(self, url: str) -> None:
        """Switches to the next hub. Hubs share workers, leases and keys, but not their features."""
        if url != self._url or len(self._urls) == 1:
            return
        self._url = self._urls[(self._urls.index(url) + 1) % len(self._urls)]
        self._links.hub = self._url
        self._keeps_none_until = 0.0
        self._tells_instance = True

    async def _end_lease(self, name: str, body: msgspec.Struct) -> ReportReply:
        answer = await self._ask(name, body, wire.ReportAnswer)
        return ReportReply(Phase(answer.status), answer.will_retry)

    async def _ask(self, name: str, body: msgspec.Struct, kind: type[T], wait_s: float = 0.0) -> T:
        return _decode(await self._send(name, body, wait_s) or b"", kind)

    async def _send(self, name: str, body: msgspec.Struct, wait_s: float = 0.0) -> bytes | None:
        """Returns the body of the answer; None for status 204."""
        content = msgspec.json.encode(body)
        is_large = len(content) >= _PACK_FROM_BYTES
        for left in reversed(range(len(self._urls))):
            url = self._url
            try:
                return await self._post(url, name, content, is_large, wait_s)
            except aiohttp.ClientConnectorError as error:
                # No hub received the call, so it may go to the next one at once.
                self._leave(url)
                if not left:
                    raise unreached(error, url) from error
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                self._leave(url)
                raise unreached(error, url) from error
            except Refusal as refusal:
                if refusal.code in LEFT_FOR:
                    self._leave(url)
                raise
            except Fault:
                # A proxy without its hub, or another server at this address.
                self._leave(url)
                raise
        raise AssertionError("there is a hub")

    async def _post(self, url: str, name: str, content: bytes, is_large: bool, wait_s: float) -> bytes | None:
        async with self._opened().post(
            f"{url}/api/worker/{name}",
            # As a file, a large body is sent in pieces, and other tasks run in between.
            data=io.BytesIO(content) if is_large else content,
            compress="deflate" if is_large else None,
            headers={} if (trace := traceparent()) is None else {"traceparent": trace},
            timeout=aiohttp.ClientTimeout(total=wait_s + self._answer_s),
            allow_redirects=False,
        ) as response:
            answer = await response.read()
            if response.status == 204:
                return None
            if response.status < 300 and response.content_type != "text/html":
                return answer
            refusal = refusal_in(response.status, answer)
        if isinstance(refusal, Fault) and response.status < 500:
            refusal = await not_a_hub(self._opened(), url, response.status)
        elif (
            isinstance(refusal, Refusal) and refusal.code is RefusalCode.UNAUTHENTICATED and self._has_no_key
        ):
            refusal = no_key(url)
        raise refusal

    @property
    def _has_no_key(self) -> bool:
        return "authorization" not in self._headers

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Each parked poll has its connection, so their number is not bounded here.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=True if self._trust is None else self._trust),
                headers=self._headers,
            )
        return self._session


def unreached(error: Exception, url: str) -> Fault:
    return Fault(f"cannot reach the hub at {url}: {cause_of(error, url, 'the hub', ' (--trust)')}")


def no_key(url: str) -> Refusal:
    """Replaces the hub's answer, which is about headers."""
    return Refusal(
        RefusalCode.UNAUTHENTICATED,
        f"the hub at {url} requires a key: run `comfyfleet key invite` there and pass its token here with "
        "--enrol TOKEN, or set COMFYFLEET_KEY",
    )


def _decode(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Fault(f"cannot decode the hub's answer: {error}") from error
