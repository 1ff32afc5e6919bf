"""`comfyfleet store`: check a store, shrink it, copy it or move it.

The work is done by `stores/` and `engine/store_move.py`; this module reads arguments and prints answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from comfyfleet.cli.command import group
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, run
from comfyfleet.cli.options import as_json
from comfyfleet.cli.output import echo, plain, print_json, print_pairs

if TYPE_CHECKING:
    from comfyfleet.engine.store_move import MoveProgress
    from comfyfleet.ports import TransferableStore
    from comfyfleet.stores.factory import StoreCheck


_SHOWN = 20
_ELSEWHERE = (
    "Copy tenants' databases (the schema comfyfleet_tenants of each database in [databases]; tenants.db), files (the "
    "folder 'files' of the data folder, or the bucket) and master keys separately."
)


@group("store")
def store_command() -> None:
    """Check, shrink, copy or move a store.

    Name a store by its URL: sqlite:///fleet.db, redis://host:6379/0, postgresql://user@host/database.
    """


@store_command.command("check")
@click.argument("url")
@as_json
def check(url: str, as_json: bool) -> None:
    """Check the store at URL, and count what it holds.

    Changes nothing, and is safe while the store is in use. Exit code 1 means that something is wrong.
    """
    from comfyfleet.stores.factory import examine

    found = run(examine(url))
    if as_json:
        print_json(found)
    else:
        _print_check(found)
    if found.problems:
        raise CommandFailed(f"{_number(len(found.problems), 'problem')} found in {found.store}")


@store_command.command("vacuum")
@click.argument("url")
@as_json
def vacuum(url: str, as_json: bool) -> None:
    """Return the space of purged jobs to the disk (SQLite).

    No program may have the store open. Needs free space of up to the size of the file.
    """
    from comfyfleet.stores.factory import kind_of, sqlite_path
    from comfyfleet.stores.sqlite import maintenance

    match kind_of(url):
        case "redis":
            _refuse("a Redis store needs no vacuum. `redis-cli MEMORY PURGE` returns memory to the system.")
        case "postgresql":
            _refuse(
                "PostgreSQL does this by itself (autovacuum). By hand: psql -c 'VACUUM (ANALYZE)', or pg_repack."
            )
    path = sqlite_path(url)
    before = path.stat().st_size if path.is_file() else 0
    maintenance.vacuum(path)
    after = path.stat().st_size
    if as_json:
        print_json({"store": str(path), "bytes_before": before, "bytes_after": after})
    else:
        echo(f"{path}: {_size(before)} before, {_size(after)} now")


@store_command.command("backup")
@click.argument("url")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--queue-only",
    is_flag=True,
    help="Copy only the store, although tenants' databases or files are not in the copy.",
)
@as_json
def backup(url: str, file: Path, queue_only: bool, as_json: bool) -> None:
    """Copy the store at URL to FILE while it is in use (SQLite).

    The copy is a complete store as of one moment. No file is overwritten. It does not contain tenants' databases, files
    or master keys: if the hub has any, the command refuses without --queue-only.
    """
    from comfyfleet.stores.factory import kind_of, sqlite_path
    from comfyfleet.stores.sqlite import maintenance

    match kind_of(url):
        case "redis":
            _refuse(
                "`store backup` cannot copy Redis. `redis-cli --rdb FILE` takes a snapshot of one moment; the folder "
                "of the append-only file (appenddirname) has everything up to the last write. "
                f"Both contain only the queue. {_ELSEWHERE}"
            )
        case "postgresql":
            _refuse(
                "`store backup` cannot copy PostgreSQL. `pg_dump --schema=comfyfleet --file=FILE` copies only the "
                f"queue as of one moment, `pg_basebackup` all databases of that server. {_ELSEWHERE}"
            )
    path = sqlite_path(url)
    left_out = _left_out(path)
    if left_out and not queue_only:
        _refuse(
            f"nothing was copied: {path} is only a part of this hub's data. The copy would not contain "
            f"{', '.join(left_out.values())}. Copy those separately, and add --queue-only to copy the store."
        )
    maintenance.backup(path, file)
    size = file.stat().st_size
    holds, _ = maintenance.describe(file)
    if as_json:
        print_json(
            {"store": str(path), "file": str(file), "bytes": size, "holds": holds, "left_out": left_out}
        )
        return
    echo(f"{path} copied to {file} ({_size(size)})")
    found = ", ".join(f"{name} {number}" for name, number in holds.items() if number)
    echo(f"copied: {found or 'an empty store'}")
    echo(f"not copied: {', '.join([*left_out.values(), 'master keys, if the store is encrypted'])}")


def _left_out(path: Path) -> dict[str, str]:
    """What belongs to the hub but is not in this store, by kind."""
    import msgspec

    from comfyfleet.files.record_store import COLLECTION as FILES
    from comfyfleet.model.tenant import Tenant
    from comfyfleet.stores.sqlite import maintenance
    from comfyfleet.tenancy.tenants import COLLECTION as TENANTS

    found: dict[str, str] = {}
    tenants = [msgspec.json.decode(body, type=Tenant) for body in maintenance.read_documents(path, TENANTS)]
    if tenants:
        databases = ", ".join(sorted({tenant.database for tenant in tenants}))
        found["tenants"] = (
            f"the jobs, ledgers and file records of {_number(len(tenants), 'tenant')} (in the databases {databases})"
        )
    files = maintenance.count_documents(path).get(FILES, 0)
    if files:
        found["files"] = f"{_number(files, 'file')} (in the folder 'files' of the data folder, or in storage)"
    return found


@store_command.command("move")
@click.argument("source")
@click.argument("target")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="Wait this long until running jobs end or their leases expire. Without it, running jobs stop the move.",
)
@click.option("--dry-run", is_flag=True, help="Show what would move, and change nothing.")
@as_json
def move(source: str, target: str, wait_s: float, dry_run: bool, as_json: bool) -> None:
    """Move everything from the store SOURCE to the store TARGET.

    Jobs move with payload, result, facts and attempts, in order, behind the jobs of the target. Blocks, workflow
    statistics and the hub's documents (keys, audit log) move too. The source is paused first and stays paused. Each job
    is removed from the source once the target has it, so run the same command again after an interruption. A job whose
    reference the target already has stays, and the command lists it.
    """
    from comfyfleet.stores.factory import kind_of

    for url in (source, target):
        kind_of(url)
    moved = run(_move(source, target, wait_s, dry_run, is_quiet=as_json))
    if as_json:
        print_json({"is_dry_run": dry_run, **plain(moved)})
    else:
        _print_move(moved, dry_run)
    if moved.stayed:
        verb = "would stay" if dry_run else "stayed"
        raise CommandFailed(f"{_number(len(moved.stayed), 'job')} {verb} at the source")


async def _move(source: str, target: str, wait_s: float, dry_run: bool, *, is_quiet: bool) -> MoveProgress:
    from contextlib import AsyncExitStack

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from comfyfleet.engine.store_move import StoreMove
    from comfyfleet.engine.system import SystemClock, SystemRandom
    from comfyfleet.stores.factory import is_there
    from comfyfleet.stores.memory import MemoryStore

    if not await is_there(source):
        _refuse("there is no store at SOURCE. Check the URL.")
    async with AsyncExitStack() as stack:
        from_store = await _opened(stack, source)
        # A dry run treats a missing target as an empty one.
        is_target_missing = dry_run and not await is_there(target)
        to_store = MemoryStore(SystemClock()) if is_target_missing else await _opened(stack, target)
        total = sum((await from_store.counts()).by_phase.values())
        console = Console(stderr=True, highlight=False, quiet=is_quiet)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("checking" if dry_run else "moving", total=total)

            def update(moved: MoveProgress) -> None:
                bar.update(task, completed=moved.jobs + len(moved.stayed))

            work = StoreMove(from_store, to_store, token=SystemRandom().token(), on_progress=update)
            return await (work.dry_run() if dry_run else work.run(wait_s))


async def _opened(stack: Any, url: str) -> TransferableStore:
    from typing import cast

    from comfyfleet.engine.system import SystemClock
    from comfyfleet.stores.factory import open_store

    store = cast("TransferableStore", open_store(url, SystemClock()))
    stack.push_async_callback(store.close)
    await store.open()
    return store


def _refuse(message: str) -> NoReturn:
    raise CommandFailed(message, ExitCode.REFUSED)


def _print_check(found: StoreCheck) -> None:
    pairs: list[tuple[str, object]] = [("store", found.store)]
    for name, value in found.settings.items():
        shown = (
            ", ".join(f"{kind} {number}" for kind, number in value.items())
            if isinstance(value, dict)
            else value
        )
        pairs.append((name.replace("_", " "), _size(value) if name.endswith("bytes") else shown))
    pairs += found.holds.items()
    pairs += [("problem", problem) for problem in found.problems]
    print_pairs(pairs)
    if not found.problems:
        echo("no problems")


def _print_move(moved: MoveProgress, is_dry_run: bool) -> None:
    for stayed in moved.stayed[:_SHOWN]:
        match stayed.why:
            case "reference":
                reason = (
                    f"the target has a job under its reference {stayed.reference!r}: {stayed.other_job_id}"
                )
            case "changed":
                reason = "both stores changed it: an engine still uses the source"
            case _:
                reason = "it is running"
        echo(f"stays  {stayed.job_id}  {reason}")
    if len(moved.stayed) > _SHOWN:
        echo(f"stay   {len(moved.stayed) - _SHOWN} more; --json names them all")
    phases = ", ".join(f"{number} {phase}" for phase, number in moved.by_phase.items())
    verb = "would move" if is_dry_run else "moved"
    others = (
        (moved.blocks, "block"),
        (moved.workflow_stats, "workflow statistic"),
        (moved.documents, "document"),
    )
    rest = ", ".join(_number(number, noun) for number, noun in others)
    echo(f"{_number(moved.jobs, 'job')} {verb}{f' ({phases})' if phases else ''}, {rest}")
    if not is_dry_run:
        echo("The source is paused. Now start hubs and workers with the target.")


def _size(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.0f} KiB" if size < 2**20 else f"{size / 2**20:.1f} MiB"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
