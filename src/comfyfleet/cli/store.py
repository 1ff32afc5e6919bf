"""`comfyfleet store`: what an operator does to a store: look whether it is sound, make it small, copy it, move it.

Each is a short composition over `stores/` and `engine/store_move.py`; here arguments are read and answers printed.

`comfyfleet encryption`: master keys and data keys of a store whose jobs are sealed at rest.

Works on the store itself: beside running hubs on Redis and PostgreSQL, and on a SQLite file while no hub has it open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from comfyfleet.cli.command_help import group
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode, run
from comfyfleet.cli.options import as_json, settings
from comfyfleet.cli.output import echo

if TYPE_CHECKING:
    from comfyfleet.engine.store_move import MoveProgress
    from comfyfleet.ports import TransferableStore
    from comfyfleet.stores.check import StoreCheck
    from comfyfleet.stores.crypto.keyring import KeyCounts, Keyring


_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_SHOWN = 20
_ELSEWHERE = (
    "Tenants' databases (the schema comfyfleet_tenants of each database in [pools]; tenants.db) and files (the folder "
    "'files' of the data folder, or the bucket) are to be copied by themselves, and so are the master keys"
)


@group("store")
def store_command() -> None:
    """Check, shrink, copy or move a store.

    A store is named by its URL: sqlite:///fleet.db, redis://host:6379/0, postgresql://user@host/database.
    """


@store_command.command("check")
@click.argument("url")
@_AS_JSON
def check(url: str, as_json: bool) -> None:
    """Say whether the store at URL is sound, and what it holds.

    Changes nothing and is safe while others work on it. The exit code is 1 if something is wrong.
    """
    from comfyfleet.stores.check import examine

    found = run(examine(url))
    if as_json:
        _print_json(found)
    else:
        _show_check(found)
    if found.problems:
        raise CommandFailed(f"{_number(len(found.problems), 'problem')} found in {found.store}")


@store_command.command("vacuum")
@click.argument("url")
@_AS_JSON
def vacuum(url: str, as_json: bool) -> None:
    """Give the room of what was purged back to the disk (SQLite).

    Nobody may have the store open meanwhile. Needs up to the size of the file beside it.
    """
    from comfyfleet.stores.check import kind_of
    from comfyfleet.stores.factory import sqlite_path
    from comfyfleet.stores.sqlite import maintenance

    match kind_of(url):
        case "redis":
            _refuse(
                "a Redis store needs no vacuum: what is purged is gone. `redis-cli MEMORY PURGE` returns pages"
            )
        case "postgresql":
            _refuse(
                "PostgreSQL does this by itself (autovacuum); by hand: psql -c 'VACUUM (ANALYZE)', or pg_repack"
            )
    path = sqlite_path(url)
    before = path.stat().st_size if path.is_file() else 0
    maintenance.vacuum(path)
    after = path.stat().st_size
    if as_json:
        _print_json({"store": str(path), "bytes_before": before, "bytes_after": after})
    else:
        echo(f"{path}: {_size(before)} before, {_size(after)} now")


@store_command.command("backup")
@click.argument("url")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--queue-only",
    is_flag=True,
    help="Copy the store alone, although tenants have databases, or files lie elsewhere, that are not in the copy.",
)
@_AS_JSON
def backup(url: str, file: Path, queue_only: bool, as_json: bool) -> None:
    """Copy the store at URL to FILE while it is in use (SQLite).

    The copy is of one moment, and complete or not there at all. It is a store itself. No file is overwritten. It holds
    the store alone: not the databases of tenants, not files, not master keys. Where there are such, it is refused
    without --queue-only.
    """
    from comfyfleet.stores.check import kind_of
    from comfyfleet.stores.factory import sqlite_path
    from comfyfleet.stores.sqlite import maintenance

    match kind_of(url):
        case "redis":
            _refuse(
                "`store backup` copies no Redis. `redis-cli --rdb FILE` takes a snapshot of one moment; keep the "
                "folder of its append-only file (appenddirname) for everything up to the last write. "
                f"Both hold the queue alone. {_ELSEWHERE}"
            )
        case "postgresql":
            _refuse(
                "`store backup` copies no PostgreSQL. `pg_dump --schema=comfyfleet --file=FILE` copies the queue alone "
                f"as of one moment, `pg_basebackup` all databases of that one server. {_ELSEWHERE}"
            )
    path = sqlite_path(url)
    left_out = _left_out(path)
    if left_out and not queue_only:
        _refuse(
            f"nothing was copied: {path} is a part of what this hub keeps. The copy would be without "
            f"{', '.join(left_out.values())}. Copy those by their own means, and say --queue-only for the store itself"
        )
    maintenance.backup(path, file)
    size = file.stat().st_size
    holds, _ = maintenance.describe(file)
    if as_json:
        _print_json(
            {"store": str(path), "file": str(file), "bytes": size, "holds": holds, "left_out": left_out}
        )
        return
    echo(f"{path} copied to {file} ({_size(size)})")
    found = ", ".join(f"{name} {number}" for name, number in holds.items() if number)
    echo(f"copied: {found or 'an empty store'}")
    echo(f"not copied: {', '.join([*left_out.values(), 'master keys, where it is encrypted'])}")


def _left_out(path: Path) -> dict[str, str]:
    """What this store tells of and does not hold, in words, by kind."""
    import msgspec

    from comfyfleet.files.record_store import COLLECTION as FILES
    from comfyfleet.model.tenant import Tenant
    from comfyfleet.stores.sqlite import maintenance
    from comfyfleet.tenancy.tenants import COLLECTION as TENANTS

    found: dict[str, str] = {}
    tenants = [msgspec.json.decode(body, type=Tenant) for body in maintenance.read_documents(path, TENANTS)]
    if tenants:
        pools = ", ".join(sorted({tenant.pool for tenant in tenants}))
        found["tenants"] = (
            f"the jobs, books and file records of {_number(len(tenants), 'tenant')} (in the databases of {pools})"
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
    help="Wait so long for running jobs to end or their leases to run out; without it, they make the move refuse.",
)
@click.option("--dry-run", is_flag=True, help="Say what would move, and change nothing.")
@_AS_JSON
def move(source: str, target: str, wait_s: float, dry_run: bool, as_json: bool) -> None:
    """Move everything from the store SOURCE to the store TARGET.

    Jobs go with payload, result, facts and attempts, in their order, behind what is at the target; blocks, lessons and
    the hub's documents (keys, audit log) too. The source is paused first and stays paused. A job is removed there once
    the target has it, so a move that was interrupted is begun again with the same command. A job whose reference the
    target knows already stays, and is told.
    """
    from comfyfleet.stores.check import kind_of

    for url in (source, target):
        kind_of(url)
    moved = run(_move(source, target, wait_s, dry_run, is_quiet=as_json))
    if as_json:
        _print_json({"is_dry_run": dry_run, **_plain(moved)})
    else:
        _tell(moved, dry_run)
    if moved.stayed:
        verb = "would stay" if dry_run else "stayed"
        raise CommandFailed(f"{_number(len(moved.stayed), 'job')} {verb} at the source")


async def _move(source: str, target: str, wait_s: float, dry_run: bool, *, is_quiet: bool) -> MoveProgress:
    from contextlib import AsyncExitStack

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from comfyfleet.engine.store_move import StoreMove
    from comfyfleet.engine.system import SystemClock, SystemRandom
    from comfyfleet.stores.check import is_there
    from comfyfleet.stores.memory import MemoryStore

    if not await is_there(source):
        _refuse("there is no store at SOURCE: nobody has opened one there yet. Look at its URL")
    async with AsyncExitStack() as stack:
        from_store = await _opened(stack, source)
        # To rehearse, a target that is not there is as good as an empty one.
        is_rehearsed_alone = dry_run and not await is_there(target)
        to_store = MemoryStore(SystemClock()) if is_rehearsed_alone else await _opened(stack, target)
        total = sum((await from_store.counts()).by_phase.values())
        console = Console(stderr=True, highlight=False, quiet=is_quiet)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("looking" if dry_run else "moving", total=total)

            def tell(moved: MoveProgress) -> None:
                bar.update(task, completed=moved.jobs + len(moved.stayed))

            work = StoreMove(from_store, to_store, token=SystemRandom().token(), tell=tell)
            return await (work.rehearse() if dry_run else work.run(wait_s))


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


def _plain(moved: MoveProgress) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(moved)
    return plain


def _print_json(value: object) -> None:
    import msgspec

    echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def _show_check(found: StoreCheck) -> None:
    from comfyfleet.cli.hub_connection import print_pairs

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
        echo("sound")


def _tell(moved: MoveProgress, is_dry_run: bool) -> None:
    for stayed in moved.stayed[:_SHOWN]:
        match stayed.why:
            case "reference":
                reason = (
                    f"the target has a job under its reference {stayed.reference!r}: {stayed.other_job_id}"
                )
            case "changed":
                reason = "both stores have gone on with it: an engine still works on the source"
            case _:
                reason = "it runs"
        echo(f"stays  {stayed.job_id}  {reason}")
    if len(moved.stayed) > _SHOWN:
        echo(f"stay   {len(moved.stayed) - _SHOWN} more; --json names them all")
    phases = ", ".join(f"{number} {phase}" for phase, number in moved.by_phase.items())
    verb = "would move" if is_dry_run else "moved"
    others = ((moved.blocks, "block"), (moved.workflow_stats, "lesson"), (moved.documents, "document"))
    rest = ", ".join(_number(number, noun) for number, noun in others)
    echo(f"{_number(moved.jobs, 'job')} {verb}{f' ({phases})' if phases else ''}, {rest}")
    if not is_dry_run:
        echo("the source is paused; let hubs and workers open the target now")


def _size(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.0f} KiB" if size < 2**20 else f"{size / 2**20:.1f} MiB"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


T = TypeVar("T")


@group("encryption")
def encryption_command() -> None:
    """Keys with which jobs are sealed at rest."""


@encryption_command.command("new-key")
@click.argument("key_id", metavar="ID")
def new_key(key_id: str) -> None:
    """Print a new master key as a line for the key file.

    Whoever has it opens every job; without it, none opens. Keep a copy apart from the store's backups.
    """
    import base64
    import secrets

    from comfyfleet.stores.crypto.keyring import read_master_keys

    line = f"{key_id}={base64.b64encode(secrets.token_bytes(32)).decode()}"
    try:
        read_master_keys([line])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ID") from error
    echo(line)


@encryption_command.command("status")
@as_json
@settings("store", "data", "config")
def status(as_json: bool, **flags: Any) -> None:
    """How many data keys there are, and which master keys have wrapped them."""
    _show_keys(_with_keyring(flags, lambda keyring: keyring.tally()), as_json)


@encryption_command.command("rotate")
@click.option(
    "--data-keys", is_flag=True, help="Also give every tenant a new data key, for what comes from now on."
)
@as_json
@settings("store", "data", "config")
def rotate(data_keys: bool, as_json: bool, **flags: Any) -> None:
    """Wrap every data key with the current master key.

    Hubs do this by themselves. Once it is done the master keys before are not needed any more.
    """

    async def work(keyring: Keyring) -> KeyCounts:
        await keyring.rewrap()
        for tenant in await keyring.tenants() if data_keys else ():
            await keyring.renew(tenant)
        return await keyring.tally()

    _show_keys(_with_keyring(flags, work), as_json)


@encryption_command.command("shred")
@click.argument("tenant")
@click.option("--yes", is_flag=True, help="Do not ask.")
@settings("store", "data", "config")
def shred(tenant: str, yes: bool, **flags: Any) -> None:
    """Destroy the data keys of TENANT: nobody can read its sealed jobs any more.

    Nothing brings them back. Hubs that run forget a key within half a minute.
    """
    from comfyfleet.model.ids import TenantId

    if not yes:
        click.confirm(f"No sealed job of tenant {tenant!r} can be read ever after. Go on?", abort=True)
    destroyed = _with_keyring(flags, lambda keyring: keyring.shred(TenantId(tenant)))
    if not destroyed:
        raise CommandFailed(
            f"tenant {tenant!r} has no data key here: nothing was sealed for it", ExitCode.REFUSED
        )
    echo(f"{destroyed} data key{'s' if destroyed > 1 else ''} of tenant {tenant!r} destroyed")


def _with_keyring(flags: dict[str, Any], work: Callable[[Keyring], Awaitable[T]]) -> T:
    from comfyfleet.cli.bootstrap import embedded_store
    from comfyfleet.cli.encryption_keys import keyring_of
    from comfyfleet.cli.settings import read_settings
    from comfyfleet.engine.system import SystemClock
    from comfyfleet.stores.factory import open_store

    resolved = read_settings(flags, config=flags.pop("config", None))

    async def opened() -> T:
        clock = SystemClock()
        store = open_store(resolved.values.store or embedded_store(resolved.data), clock)
        keyring = keyring_of(resolved, store.documents, clock)
        if keyring is None:
            raise CommandFailed(
                "there is no master key in the settings: name it in [encryption]", ExitCode.USAGE
            )
        try:
            await store.open()
            await keyring.open()
            return await work(keyring)
        finally:
            await store.close()

    return run(opened())


def _show_keys(tally: KeyCounts, as_json: bool) -> None:
    from comfyfleet.cli.hub_connection import print_json, print_table

    if as_json:
        print_json(tally)
        return
    print_table(
        ["master key", "data keys"],
        [[master, str(number)] for master, number in sorted(tally.masters.items())],
        empty="nothing is sealed in this store yet",
    )
    if tally.destroyed:
        echo(f"{tally.destroyed} more were destroyed")
