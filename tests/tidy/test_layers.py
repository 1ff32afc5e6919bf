"""The tree keeps its shape: imports run downwards, modules stay small, the public names exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import comfyfleet

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "comfyfleet"

# Each part may import itself and the parts named here. What is not named is not known.
ALLOWED: dict[str, set[str]] = {
    "model": set(),
    "policy": {"model"},
    "tracing": {"model"},
    "private_files": set(),
    "blocking_facade": set(),
    "ports": {"model"},
    "paginator": {"model", "ports"},
    "stores": {"model", "ports", "paginator", "private_files"},
    "engine": {"model", "policy", "ports", "paginator", "tracing"},
    "wire": {"model"},
    "net": {"model", "wire"},
    "worker": {"model", "ports", "wire", "net", "tracing"},
    "tenancy": {"model", "policy", "ports", "paginator", "stores", "tracing"},
    "files": {"model", "ports", "paginator", "private_files"},
    "hub": {"model", "policy", "ports", "paginator", "engine", "wire", "tenancy", "files", "net", "tracing"},
    "client": {"model", "wire", "net", "blocking_facade"},
    # Fleets on simulated time, with the real engine.
    "simulation": {"model", "policy", "ports", "stores", "engine"},
    "pool": {"model", "policy", "ports", "stores", "engine", "worker", "blocking_facade"},
    # For users' own tests. The product imports it only in the commands that start fake servers.
    "testing": {"model", "policy", "ports", "stores", "tenancy"},
    "cli": {
        "model",
        "policy",
        "ports",
        "pool",
        "simulation",
        "testing",
        "worker",
        "stores",
        "engine",
        "wire",
        "tenancy",
        "hub",
        "files",
        "net",
        "client",
        "tracing",
        "private_files",
    },
    "__init__": {"model", "policy", "pool", "client"},
}
# Parts below the shell do no I/O and read no clock.
PURE = ("model", "policy")
IMPURE_MODULES = {
    "asyncio",
    "time",
    "random",
    "secrets",
    "socket",
    "os",
    "threading",
    "aiohttp",
    "subprocess",
}

MAX_LINES = 500


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        yield part, path, ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            if node.module == "comfyfleet":
                yield from (f"comfyfleet.{alias.name}" for alias in node.names)


def test_every_part_of_the_tree_has_its_layer() -> None:
    assert {part for part, _, _ in modules()} == ALLOWED.keys()


def test_imports_run_downwards_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for part, path, tree in modules()
        for name in imports(tree)
        if name.startswith("comfyfleet.")
        and (used := name.split(".")[1]) != part
        and used in ALLOWED
        and used not in ALLOWED[part]
    ]
    assert wrong == []


def test_connectors_know_no_agent() -> None:
    folder = SOURCE / "worker" / "connectors"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in folder.rglob("*.py")
        for name in imports(ast.parse(path.read_text()))
        if name.startswith("comfyfleet.worker.") and not name.startswith("comfyfleet.worker.connectors")
    ]
    assert wrong == []


def test_the_fake_servers_know_nothing_of_what_they_test() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (SOURCE / "testing").glob("fake_*/**/*.py")
        for name in imports(ast.parse(path.read_text()))
        if name.startswith("comfyfleet.") and not name.startswith("comfyfleet.testing.fake_")
    ]
    assert wrong == []


def test_policy_and_model_do_no_io_and_have_no_clock() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for part, path, tree in modules()
        if part in PURE
        for name in imports(tree)
        if name.split(".")[0] in IMPURE_MODULES
    ]
    assert wrong == []


def test_stores_do_not_decide() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for part, path, tree in modules()
        if part == "stores"
        for name in imports(tree)
        if name.startswith("comfyfleet.policy")
    ]
    assert wrong == []


def test_the_hub_reads_the_queue_and_changes_it_through_the_engine_only() -> None:
    """`hub/app.py` hands the engine's store to the tenants' services; `engine.reader` serves everything else."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} reaches for a store"
        for part, path, tree in modules()
        if part == "hub" and path.name != "app.py"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "store")
        or (isinstance(node, ast.alias) and node.name in {"Store", "TransferableStore"})
    ]
    assert wrong == []


def test_two_modules_know_uvicorns_protocols() -> None:
    """Decision 0054 says why, and which members they use."""
    knows = {
        str(path.relative_to(SOURCE))
        for _, path, tree in modules()
        if any(name.startswith("uvicorn.protocols") for name in imports(tree))
    }
    assert knows == {"hub/http/connections.py", "hub/websocket/connection.py"}


def test_no_module_is_longer_than_it_should_be() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_every_module_says_what_it_owns() -> None:
    silent = [str(path.relative_to(ROOT)) for _, path, tree in modules() if not ast.get_docstring(tree)]
    assert silent == []


def test_every_public_name_can_be_used() -> None:
    for name in comfyfleet.__all__:
        assert getattr(comfyfleet, name) is not None
