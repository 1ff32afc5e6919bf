"""A hub with its files in a storage, as real processes from settings to the picture in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.acceptance._process import CLI, picture_workflow, read_until, run_cli, started, written
from tests.servers.s3_server import CREDENTIALS, S3Server, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def settings(server: S3Server, folder: Path, secret: str = CREDENTIALS.secret_key) -> Mapping[str, str]:
    return {
        "COMFYFLEET_DATA": str(folder),
        "COMFYFLEET_PORT": "0",
        "COMFYFLEET_ASSETS": f"s3://{server.bucket.name}/of-acceptance",
        "COMFYFLEET_S3_ENDPOINT": server.bucket.endpoint,
        "COMFYFLEET_S3_REGION": server.bucket.region,
        "COMFYFLEET_S3_ACCESS_KEY": CREDENTIALS.access_key,
        "COMFYFLEET_S3_SECRET_KEY": secret,
        "COMFYFLEET_LOG_LEVEL": "debug",
        "REDIS_URL": "",
        "HUB_PORT": "",
    }


def test_a_job_brings_a_picture_and_leaves_one_by_way_of_the_storage_alone(
    server: S3Server, tmp_path: Path
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    env = settings(server, data)
    workflow = written(tmp_path / "workflow.json", picture_workflow())
    edit = written(
        tmp_path / "edit.json",
        {
            "10": {"class_type": "LoadImage", "inputs": {"image": "x.png"}},
            "11": {"class_type": "SaveImage", "inputs": {"images": ["10", 0], "filename_prefix": "edited"}},
        },
    )
    with ExitStack() as stack:
        up = stack.enter_context(started(*CLI, "up", "--fake", "1", env=env))
        lines = read_until(up, lambda line: line.endswith(": online"))
        assert f"  files: s3://{server.bucket.name}/of-acceptance" in lines
        first = run_cli("submit", workflow, "--watch", "--out", out, env=env)
        assert first.returncode == 0, first.stderr
        (picture,) = out.glob("*.png")
        second = run_cli("submit", edit, "--attach", f"10.image={picture}", "--watch", "--out", out, env=env)
        assert second.returncode == 0, second.stderr
        assert len(list(out.glob("*.png"))) == 2
        up.terminate()
        output, errors = up.communicate(timeout=60)
        for text in (*lines, output, errors, first.stdout, first.stderr, second.stdout, second.stderr):
            assert CREDENTIALS.secret_key not in text and "X-Amz-Signature" not in text
    assert not (data / "files").exists()


def test_a_storage_that_refuses_its_hub_is_told_at_once(server: S3Server, tmp_path: Path) -> None:
    ended = run_cli("hub", env=settings(server, tmp_path / "data", "guessed"))
    assert ended.returncode == 2
    assert "'assets'" in ended.stderr and "credentials" in ended.stderr and "guessed" not in ended.stderr
    assert run_cli("config", "check", env={"COMFYFLEET_ASSETS": "s3://fleet"}).returncode == 2
