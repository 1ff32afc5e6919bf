"""Reads every setting: from a flag, the environment or a TOML file. The first of them wins.

A setting has one name in all three places (`--log-level`, `COMFYFLEET_LOG_LEVEL`, `log_level`). An error names the
setting and its source. Only this module reads the environment for settings.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.options import flag_of, level_of
from comfyfleet.cli.setting_errors import misfit
from comfyfleet.cli.settings_schema import (
    ADDRESSES,
    CONNECTORS,
    CREDENTIALS,
    DATABASE_KINDS,
    DATABASE_NAME,
    DATABASES,
    ELSEWHERE,
    FILE_NAME,
    LISTS,
    OLD_DATABASES,
    OLD_NAMES,
    OTHERS,
    PASSWORD,
    PREFIX,
    RETENTION_RULES,
    SECRET,
    SECRET_FILE,
    TABLES,
    TOGETHER,
    EncryptionSettings,
    S3Settings,
    Settings,
)
from comfyfleet.cli.settings_schema import CAPS as CAPS
from comfyfleet.client.discovery import default_data_folder
from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.hub.http.proxies import TrustedProxies
from comfyfleet.policy.rules import DAY_S, RULES, Retention, Rules, problem_of

if TYPE_CHECKING:
    from comfyfleet.net.url_guard import AllowedHosts
    from comfyfleet.worker.connectors.comfyui import ComfyUISettings


def proxies_of(resolved: ResolvedSettings) -> TrustedProxies:
    try:
        return TrustedProxies(resolved.values.trusted_proxies)
    except ValueError as error:
        raise resolved.wrong("trusted_proxies", str(error)) from error


_FLAG = 3


class Origin(msgspec.Struct, frozen=True, order=True):
    """The source of a value; a higher rank wins."""

    rank: int
    place: str

    @property
    def is_flag(self) -> bool:
        return self.rank == _FLAG


DEFAULT = Origin(0, "default")


class ResolvedSettings(msgspec.Struct, frozen=True):
    values: Settings
    origins: dict[str, Origin]
    """By name; in a table as `limits.max_depth`. A setting that is not here has its default."""
    unknown_variables: tuple[str, ...] = ()
    """Variables that begin with COMFYFLEET_ and are not a setting."""

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, DEFAULT)

    def limits(self) -> HubLimits:
        limits = {name: value for name, value in self.values.limits.items() if name not in CAPS}
        return msgspec.convert(limits, HubLimits)

    def rules(self) -> Rules:
        # As in a pool: a run that does not start or make progress for this long is stuck.
        usual = {"start_timeout_s": 600.0, "stall_timeout_s": 600.0}
        caps = {name: value for name, value in self.values.limits.items() if name in CAPS}
        kept = {RULES[name]: days * DAY_S for name, days in self.values.retention.items() if name in RULES}
        rules = msgspec.convert(usual | self.values.rules | caps | kept, Rules)
        if (problem := problem_of(rules)) is not None:
            raise self.wrong(f"rules.{problem[0]}", problem[1])
        return rules

    def allowed(self) -> AllowedHosts:
        from comfyfleet.net.url_guard import AllowedHosts

        try:
            return AllowedHosts(self.values.webhook_allow)
        except ValueError as error:
            raise self.wrong("webhook_allow", str(error)) from error

    def s3(self) -> S3Settings:
        return msgspec.convert(self.values.s3, S3Settings)

    def retention(self) -> Retention:
        return msgspec.convert(self.values.retention, Retention)

    def comfyui(self) -> ComfyUISettings:
        from comfyfleet.worker.connectors.comfyui import ComfyUISettings

        return ComfyUISettings(**self.values.comfyui)

    def connector(self, name: str) -> dict[str, Any]:
        """The settings of one connector. `SETTING_file` is the file with the value of SETTING."""
        given = self.values.connectors.get(name, {})
        found = {key: value for key, value in given.items() if not key.endswith(SECRET_FILE)}
        for key in given.keys() - found.keys():
            full, setting = f"{CONNECTORS}.{name}.{key}", key.removesuffix(SECRET_FILE)
            if setting in found:
                raise self.wrong(full, f"{setting!r} is given too. Give only one of them.")
            found[setting] = _read_secret(given[key], partial(self.wrong, full))
        # The limits of every ComfyUI server.
        return self.values.comfyui | found if name == "comfyui" else found

    def check_connectors(self) -> None:
        """Refuse a table of a connector that this machine does not have."""
        from comfyfleet.worker.connectors.registry import names

        for name in self.values.connectors.keys() - set(names()):
            full = next(each for each in self.origins if each.startswith(f"{CONNECTORS}.{name}."))
            raise self.wrong(
                full,
                f"there is no connector {name!r} here{nearest(name, list(names()))}. Is its package missing?",
            )

    def fakes(self) -> dict[str, int]:
        """How many fake servers to start, by connector."""
        found: dict[str, int] = {}
        for text in self.values.fake:
            name, _, count = text.rpartition("=")
            found[name or "comfyui"] = found.get(name or "comfyui", 0) + int(count)
        return found

    def encryption(self) -> EncryptionSettings:
        return msgspec.convert(self.values.encryption, EncryptionSettings)

    @property
    def data(self) -> Path:
        return Path(self.values.data)

    def wrong(self, name: str, why: str) -> CommandFailed:
        """The error about a setting that is found to be wrong later."""
        return _wrong(name, self.origin(name), why)

    def shown(self) -> Iterator[tuple[str, Any, str]]:
        """Each setting with its value, without secrets, and its source."""
        for name in Settings.__struct_fields__:
            value = getattr(self.values, name)
            if name in TABLES:
                value = self._whole_table(name)
            if name in TABLES or name == DATABASES:
                for field in sorted(value):
                    full = f"{name}.{field}"
                    yield full, masked(full, value[field]), self.origin(full).place
                continue
            if name == CONNECTORS:
                for connector, table in sorted(value.items()):
                    for key in sorted(table):
                        full = f"{CONNECTORS}.{connector}.{key}"
                        yield full, masked(full, table[key]), self.origin(full).place
                continue
            yield name, masked(name, value), self.origin(name).place

    def _whole_table(self, table: str) -> dict[str, Any]:
        """The given values and the defaults."""
        usual = {each.name: each.default for each in msgspec.structs.fields(TABLES[table])}
        if table in ("rules", "limits"):
            usual |= msgspec.structs.asdict(self.rules())
        given = getattr(self.values, table)
        return {name: msgspec.to_builtins(given.get(name, usual[name])) for name in _fields(table)}


def masked(name: str, value: Any) -> Any:
    if value is None or value in ("", (), []):
        return None
    if name in SECRET:
        return "…"
    if name.startswith(f"{CONNECTORS}."):
        # Only its package knows which of its settings are secret.
        return value if isinstance(value, int | float) or name.endswith(SECRET_FILE) else "…"
    if isinstance(value, tuple):
        return [masked(name, each) for each in value]
    if name not in ADDRESSES and name.partition(".")[0] != DATABASES:
        return value
    return PASSWORD.sub(r"\1…", CREDENTIALS.sub(r"\1…@", value))


def variable_of(name: str) -> str:
    return PREFIX + name.replace(".", "_").upper()


def read_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    old_store: bool = True,
    mistakes: list[CommandFailed] | None = None,
) -> ResolvedSettings:
    """`flags` that are None or empty were not given. `config` is the file; by default COMFYFLEET_CONFIG, then the file
    in the current folder. `old_store`: whether variables such as REDIS_URL may name the store. `mistakes` collects all
    mistakes, and wrong settings keep their defaults; without it the first mistake is raised."""
    environment = os.environ if environment is None else environment
    found = _Found(mistakes)
    path = _file(config, environment)
    if path is not None:
        found.take_file(path)
    unknown = _take_environment(found, environment, old_store)
    for name, value in (flags or {}).items():
        if value is not None and value != ():
            found.put(name, value, Origin(_FLAG, f"flag {flag_of(name)}"))
    values = found.values
    if values.get("assets"):
        _take_others(found, environment)
    if not values.get("data"):
        values["data"] = str(default_data_folder(environment))
    resolved = ResolvedSettings(msgspec.convert(values, Settings), found.origins, unknown)
    values_ = resolved.values
    checks = (
        (values_.webhook_allow, resolved.allowed),
        (values_.rules, resolved.rules),
        (values_.trusted_proxies, lambda: proxies_of(resolved)),
    )
    for is_given, check in checks:
        if is_given:
            with found.collecting():
                check()
    return resolved


class _Found:
    """The values so far. A later one replaces an earlier one."""

    def __init__(self, mistakes: list[CommandFailed] | None) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self._database_tables: dict[str, Origin] = {}
        self._mistakes = mistakes

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except CommandFailed as mistake:
            if self._mistakes is None:
                raise
            self._mistakes.append(mistake)

    def take_file(self, path: Path) -> None:
        origin = Origin(1, f"file {path}")
        with self.collecting():
            for name, value in _read_file(path).items():
                if name == CONNECTORS:
                    self._take_connectors(value, origin)
                elif name not in (*TABLES, DATABASES, OLD_DATABASES):
                    self.put(name, value, origin)
                elif isinstance(value, dict):
                    for field, each in value.items():
                        self.put(f"{name}.{field}", each, origin)
                else:
                    with self.collecting():
                        raise _wrong(
                            name, origin, f"it is a table. Write [{name}] and its settings below it."
                        )

    def _take_connectors(self, tables: Any, origin: Origin) -> None:
        for connector, table in tables.items() if isinstance(tables, dict) else [("NAME", tables)]:
            if isinstance(table, dict):
                for key, value in table.items():
                    self.put_connector(connector, key, value, origin)
                continue
            with self.collecting():
                full = f"{CONNECTORS}.{connector}"
                raise _wrong(full, origin, f"it is a table. Write [{full}] and its settings below it.")

    def put_connector(self, connector: str, key: str, value: Any, origin: Origin) -> None:
        self.values.setdefault(CONNECTORS, {}).setdefault(connector, {})[key] = value
        self.origins[f"{CONNECTORS}.{connector}.{key}"] = origin

    def put(self, name: str, value: Any, origin: Origin) -> None:
        with self.collecting():
            table, _, field = name.rpartition(".")
            if name in (DATABASES, OLD_DATABASES):
                self._put_databases(name, value, origin)
                return
            if table in (DATABASES, OLD_DATABASES):
                self._check_one_table(table, origin)
                _check_database(field, value, origin)
                self.values.setdefault(DATABASES, {})[field] = value
                self.origins[f"{DATABASES}.{field}"] = origin
                return
            fields = _fields(table)
            if (table and table not in TABLES) or field not in fields or name in (*TABLES, CONNECTORS):
                raise _unknown(name, origin)
            if name == "hub" and isinstance(value, str):
                value = value.replace(",", " ").split()
            if name == "log_level":
                value = level_of(value)
            if name == "fake":
                value = _fake_counts(value, origin)
            # A variable is text and is converted; values of a file and a flag have types.
            is_text = origin.rank == 2
            try:
                value = msgspec.convert(value, fields[field], strict=not is_text)
            except msgspec.ValidationError as error:
                given = tuple(map(str, value)) if isinstance(value, list) else str(value)
                why = misfit(masked(name, given) or "", fields[field], str(error))
                raise _wrong(name, origin, why) from error
            if table:
                self.values.setdefault(table, {})[field] = value
            else:
                self.values[name] = value
            self.origins[name] = origin

    def _put_databases(self, table: str, given: Iterable[str], origin: Origin) -> None:
        for each in given:
            name, equals, address = each.partition("=")
            if not equals:
                raise _wrong(table, origin, f"{masked('store', each)!r} has no name. Write NAME=URL.")
            self.put(f"{table}.{name}", address, origin)

    def _check_one_table(self, table: str, origin: Origin) -> None:
        """The file and the environment use the new name or the old one. Flags add to either."""
        if not origin.is_flag and table not in self._database_tables:
            self._database_tables[table] = origin
            if len(self._database_tables) > 1:
                both = " and ".join(f"{name!r} ({at.place})" for name, at in self._database_tables.items())
                why = f"{OLD_DATABASES!r} is the old name of {DATABASES!r}. Give only {DATABASES!r}."
                raise CommandFailed(f"the settings {both} are the same: {why}", ExitCode.USAGE)


def _fake_counts(given: Any, origin: Origin) -> list[str]:
    """A number, or several with the names of their connectors. What is none needs no fake."""
    texts = [str(each) for each in given] if isinstance(given, list | tuple) else str(given).split()
    for text in texts:
        if isinstance(given, bool) or not re.fullmatch(r"([a-z0-9_-]+=)?[0-9]{1,3}", text):
            raise _wrong(
                "fake", origin, f"{text!r} is neither a number below 1000 nor NAME=NUMBER, such as a1111=1"
            )
    return [text for text in texts if int(text.rpartition("=")[2])]


def _check_database(name: str, address: Any, origin: Origin) -> None:
    if not DATABASE_NAME.fullmatch(name):
        raise _wrong(DATABASES, origin, f"{name!r} is not a valid name. Use letters, digits, _ and -.")
    if not isinstance(address, str) or address.partition(":")[0] not in DATABASE_KINDS:
        raise _wrong(f"{DATABASES}.{name}", origin, 'write "sqlite:///…" or "postgresql://…"')


def _read_secret(path: Any, wrong: Callable[[str], CommandFailed]) -> str:
    if not isinstance(path, str) or not path:
        raise wrong("it is not the path of a file")
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise wrong(f"cannot read {path}: {cause}") from error


def _file(config: str | Path | None, environment: Mapping[str, str]) -> Path | None:
    given = config or environment.get(f"{PREFIX}CONFIG")
    if given:
        return Path(given)
    here = Path(FILE_NAME)
    return here if here.is_file() else None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandFailed(
            f"cannot read the settings in {path}: {error.strerror}", ExitCode.USAGE
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{path} is not valid TOML: {error}", ExitCode.USAGE) from error


def _take_environment(found: _Found, environment: Mapping[str, str], old_store: bool) -> tuple[str, ...]:
    by_variable = {variable_of(name): name for name in (*_names(), OLD_DATABASES)}
    for name, olds in OLD_NAMES.items():
        if name == "store" and not old_store:
            continue
        # The first of them wins; COMFYFLEET_… wins over all.
        for old in reversed(olds):
            if environment.get(old):
                found.put(name, environment[old], Origin(2, f"environment {old}"))
    unknown = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in ELSEWHERE or not text:
            continue
        if (
            variable.startswith(CONNECTOR_PREFIX)
            and (place := _connector_setting(found, variable)) is not None
        ):
            found.put_connector(*place, text, Origin(2, f"environment {variable}"))
            continue
        if variable not in by_variable:
            unknown.append(variable)
            continue
        name = by_variable[variable]
        value: Any = text.replace(",", " ").split() if name in LISTS else text
        if name in (DATABASES, OLD_DATABASES):
            # A URL may contain commas, between hosts.
            value = re.split(r"[\s,]+(?=[\w-]+=)", text.strip())
        found.put(name, value, Origin(2, f"environment {variable}"))
    return tuple(unknown)


CONNECTOR_PREFIX = variable_of(f"{CONNECTORS}.")


def _connector_setting(found: _Found, variable: str) -> tuple[str, str] | None:
    """The connector and its setting. The name of a connector may contain '_', so the longest name wins."""
    from comfyfleet.worker.connectors.registry import names

    known = {*names(), *found.values.get(CONNECTORS, {})}
    for name in sorted(known, key=len, reverse=True):
        start = f"{CONNECTOR_PREFIX}{name.replace('-', '_').upper()}_"
        if variable.startswith(start) and len(variable) > len(start):
            return name, variable.removeprefix(start).lower()
    return None


def _take_others(found: _Found, environment: Mapping[str, str]) -> None:
    """Takes AWS_… variables for storage settings that are not given. Credentials are taken together or not at all:
    parts of two do not work."""
    own = frozenset(found.values.get("s3", {}))
    has_own = not TOGETHER.isdisjoint(own)
    for field, names in OTHERS.items():
        if field in own or (has_own and field in TOGETHER):
            continue
        for variable in names:
            if environment.get(variable):
                origin = Origin(2, f"environment {variable}")
                found.put(f"s3.{field}", environment[variable], origin)
                break


def _names() -> list[str]:
    plain = [name for name in Settings.__struct_fields__ if name not in (*TABLES, CONNECTORS)]
    return plain + [f"{table}.{field}" for table in TABLES for field in _fields(table)]


def _fields(table: str) -> dict[str, Any]:
    """The settings of a table with their types. The empty name means the settings outside tables."""
    fields = {each.name: each.type for each in msgspec.structs.fields(TABLES.get(table, Settings))}
    if table == "rules":
        return {name: kind for name, kind in fields.items() if name not in CAPS | RETENTION_RULES}
    if table == "limits":
        fields |= {each.name: each.type for each in msgspec.structs.fields(Rules) if each.name in CAPS}
    return fields


def variables() -> list[str]:
    return [variable_of(name) for name in _names()]


def nearest(name: str, known: list[str], prefix: str = "", *, lists_all: bool = True) -> str:
    """The end of a message about an unknown name: the most similar name, or all names. All begin with `prefix`."""
    by_rest = {each.removeprefix(prefix): each for each in known}
    found = difflib.get_close_matches(name.removeprefix(prefix), by_rest, 1, cutoff=0.5)
    if found:
        return f"; did you mean {by_rest[found[0]]!r}?"
    if not lists_all:
        return "; `comfyfleet config show` lists the settings"
    return f"; known: {', '.join(known)}"


def _unknown(name: str, origin: Origin) -> CommandFailed:
    known = [each for each in _names() if "." not in each or name.partition(".")[0] in TABLES]
    return CommandFailed(f"{name!r} ({origin.place}) is not a setting{nearest(name, known)}", ExitCode.USAGE)


def _wrong(name: str, origin: Origin, why: str) -> CommandFailed:
    return CommandFailed(f"the setting {name!r} ({origin.place}) is not valid: {why}", ExitCode.USAGE)
