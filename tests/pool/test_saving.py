"""Outputs are saved under names of their own, inside the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pool._fleet import fleet, text_to_image

from comfyfleet import OutputFile
from comfyfleet.pool.output_files import safe_name, write_new


async def test_results_of_several_jobs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    async with fleet() as it:
        graph = text_to_image()
        graph["10"] = {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "cat"}}
        results = [await it.pool.run(graph, timeout=60) for _ in range(2)]
        saved = [path for result in results for path in await it.pool.save(result, tmp_path / "new")]
        assert len({result.files[0].filename for result in results}) == 1, "the names are the same"
        assert sorted(saved) == sorted((tmp_path / "new").iterdir())
        assert len(saved) == 4
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in saved)
        one = await it.pool.save(results[0].files[0], tmp_path / "one")
        assert [path.name for path in one] == [results[0].files[0].filename]


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ("../../evil.png", "evil.png"),
        ("..\\evil.png", "evil.png"),
        ("/etc/passwd", "passwd"),
        ("C:evil.png", "C_evil.png"),
        ("..", "output"),
        ("", "output"),
        ("a/", "output"),
        ("a\x00b.png", "a_b.png"),
        ("a\x9b2Jb\x7f.png", "a_2Jb_.png"),
        ("a\u202egnp.exe", "a_gnp.exe"),
    ],
)
async def test_a_servers_name_never_leads_out_of_the_folder(given: str, saved: str, tmp_path: Path) -> None:
    assert safe_name(given) == saved
    for _ in range(2):
        path = await write_new(tmp_path / "in", OutputFile("1", "images", given), b"x")
        assert path.parent == tmp_path / "in"
    assert len(list((tmp_path / "in").iterdir())) == 2
    assert not (tmp_path / "evil.png").exists()
