"""A tenant's private file from upload to consumed credits, in a storage of its own, by a worker that nobody can reach.

The caller's picture goes to the storage by a link, the job is submitted and credits are held; the worker, from whose
network connections only lead out, polls, fetches the picture by a link, runs, uploads by a link and reports; the hub
looks at what lies there, and then the credits are consumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.acceptance._process import CLI, eventually, read_until, started
from tests.network._gate import URL, NotHere, network
from tests.servers.redis_server import free_port
from tests.servers.s3_server import CREDENTIALS, S3Server, s3_server

from comfyfleet.testing.fake_comfyui.pictures import png

pytestmark = pytest.mark.xdist_group("network")

EDIT = {
    "10": {"class_type": "LoadImage", "inputs": {"image": ""}},
    "11": {"class_type": "SaveImage", "inputs": {"images": ["10", 0], "filename_prefix": "edited"}},
}


class Caller:
    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self.key = key

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        answer = _send(method, self._url + path, data, {"authorization": f"Bearer {self.key}"})
        return json.loads(answer)

    def balance(self) -> tuple[int, int]:
        found = self.ask("GET", "/api/tenants/acme/balance")
        return found["balance"], found["held"]


def _send(method: str, url: str, data: bytes | None, headers: dict[str, str]) -> bytes:
    request = urllib.request.Request(url, method=method, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
    return content


def _environment(server: S3Server, folder: Path, port: int) -> dict[str, str]:
    return {
        "COMFYFLEET_DATA": str(folder / "hub"),
        "COMFYFLEET_PORT": str(port),
        "COMFYFLEET_ASSETS": f"s3://{server.bucket.name}/private",
        "COMFYFLEET_S3_ENDPOINT": server.bucket.endpoint,
        "COMFYFLEET_S3_REGION": server.bucket.region,
        "COMFYFLEET_S3_ACCESS_KEY": CREDENTIALS.access_key,
        "COMFYFLEET_S3_SECRET_KEY": CREDENTIALS.secret_key,
        "COMFYFLEET_DATABASES": f"videos=sqlite:///{folder}/videos.db",
        "REDIS_URL": "",
        "HUB_PORT": "",
    }


def _uploaded(caller: Caller, picture: bytes) -> str:
    said = {
        "name": "holiday.png",
        "type": "image/png",
        "size": len(picture),
        "sha256": hashlib.sha256(picture).hexdigest(),
    }
    made = caller.ask("POST", "/api/files", said)
    link = made["link"]
    assert link["url"].startswith("http://127.0.0.1") and link["method"] == "PUT"
    _send("PUT", link["url"], picture, link["headers"])
    assert caller.ask("POST", f"/api/files/{made['id']}/complete")["is_complete"]
    return str(made["id"])


def test_a_private_picture_is_brought_changed_and_paid_for(tmp_path: Path) -> None:
    port, picture = free_port(), png(Image.new("RGB", (64, 64), "red"))
    with ExitStack() as stack:
        try:
            cable = stack.enter_context(network(tmp_path, port))
        except NotHere as reason:
            pytest.skip(f"no network namespaces: {reason}")
        server = stack.enter_context(s3_server())
        stack.enter_context(cable.reaching(tmp_path, server.port))
        hub = stack.enter_context(started(*CLI, "hub", env=_environment(server, tmp_path, port)))
        read_until(hub, lambda line: line.startswith("The hub answers at"))
        known = json.loads((tmp_path / "hub" / "hub.json").read_text())
        admin = Caller(known["url"], known["key"])

        # An operator sets up the tenant, and gives it credits for two jobs.
        price = {"by": "output", "credits_each": 5, "most_outputs": 4}
        admin.ask("POST", "/api/tenants", {"id": "acme", "database": "videos", "price": price})
        admin.ask("POST", "/api/tenants/acme/grants", {"id": "payment-1", "amount": 40})
        acme = Caller(
            known["url"], admin.ask("POST", "/api/keys", {"role": "tenant", "tenant": "acme"})["key"]
        )
        borg = Caller(
            known["url"], admin.ask("POST", "/api/keys", {"role": "tenant", "tenant": "borg"})["key"]
        )

        # Upload, submit: the credits are held.
        file_id = _uploaded(acme, picture)
        inputs = [{"file": file_id, "node": "10", "input": "image"}]
        job = acme.ask("POST", "/api/jobs", {"payload": {"workflow": EDIT}, "inputs": inputs})
        assert acme.balance() == (40, 20)

        # A worker that nobody can reach polls, runs, uploads and reports.
        worker_key = admin.ask("POST", "/api/keys", {"role": "worker"})["key"]
        env = {"COMFYFLEET_KEY": worker_key, "COMFYFLEET_DATA": str(tmp_path / "far")}
        command = cable.inside(
            *CLI, "worker", "--hub", URL, "--name", "far", "--fake", "1", "--log-level", "debug"
        )
        worker = stack.enter_context(started(*command, env=env))
        lines = read_until(worker, lambda line: line.endswith(": online"))
        assert eventually(lambda: bool(acme.ask("GET", f"/api/jobs/{job['id']}")["status"] == "completed"))

        # One picture was made of the four that were held for: the rest went back.
        assert acme.balance() == (35, 0)
        (receipt,) = acme.ask("GET", f"/api/jobs/{job['id']}/receipt")["rounds"]
        assert (receipt["held"], receipt["consumed"], receipt["outcome"]) == (20, 5, "consumed")
        assert receipt["verified_by"] == "hub"
        (left,) = acme.ask("GET", f"/api/jobs/{job['id']}/result")["result"]["files"]
        record = acme.ask("GET", f"/api/files/{left['file_id']}")
        assert _send("GET", record["link"]["url"], None, {}).startswith(b"\x89PNG")

        # Nobody else sees any of it, and the worker has never had a key to the storage.
        for path in (f"/api/jobs/{job['id']}", f"/api/files/{file_id}", "/api/tenants/acme/balance"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                borg.ask("GET", path)
            assert refused.value.code == 404
            refused.value.close()
        worker.terminate()
        output, errors = worker.communicate(timeout=60)
        told = "\n".join((*lines, output, errors, *_texts(tmp_path / "far")))
        assert CREDENTIALS.secret_key not in told and "X-Amz-Signature" not in told
        hub.terminate()
        hub.communicate(timeout=60)

    # What is private lies with the tenant, and the store has none of it.
    assert _counts(tmp_path / "videos.db") == (1, 1, 0)
    central = (tmp_path / "hub" / "fleet.db").read_bytes()
    for private in (b"holiday.png", b"filename_prefix", b"edited"):
        assert private not in central, private


def _texts(folder: Path) -> list[str]:
    return [
        (Path(place) / name).read_text(errors="replace")
        for place, _, names in os.walk(folder)
        for name in names
    ]


def _counts(path: Path) -> tuple[int, ...]:
    """Jobs, settlements, and holds that are open."""
    with sqlite3.connect(path) as database:
        return tuple(
            database.execute(query).fetchone()[0]
            for query in (
                "SELECT count(*) FROM jobs",
                "SELECT count(*) FROM settlements",
                "SELECT count(*) FROM holds WHERE NOT is_settled",
            )
        )
