"""Settings from flags, environment and file: the nearest wins, and what cannot be understood is told by name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from comfyfleet.cli.bootstrap import RunningHub, database_urls, greet, storage
from comfyfleet.cli.exit_codes import CommandFailed, ExitCode
from comfyfleet.cli.hub_connection import LocalHub, read_hub, read_worker_key, write_hub, write_worker_key
from comfyfleet.cli.options import _OPTIONS, Level, flag_of
from comfyfleet.cli.servers import named, with_cleanup
from comfyfleet.cli.settings import DEFAULT, _fields, read_settings, variables
from comfyfleet.cli.settings_schema import TABLES, Settings
from comfyfleet.cli.up import warn_about_unused_store
from comfyfleet.files.s3_storage import S3Credentials
from comfyfleet.hub.http.limits import HubLimits


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "comfyfleet.toml"


def said(file: Path, content: str) -> Path:
    file.write_text(content)
    return file


@pytest.mark.parametrize(
    ("said_as", "means"), [("warn", "warning"), ("WARN", "warning"), ("Info", "info"), ("error", "error")]
)
def test_a_log_level_is_understood_as_others_write_it(file: Path, said_as: str, means: str) -> None:
    said(file, f'log_level = "{said_as}"\n')
    in_file = read_settings({}, config=file, environment={})
    in_environment = read_settings({}, environment={"COMFYFLEET_LOG_LEVEL": said_as})
    assert (in_file.values.log_level, in_environment.values.log_level) == (means, means)
    assert Level().convert(said_as, None, None) == means


def test_a_flag_wins_over_the_environment_and_that_over_the_file(file: Path) -> None:
    said(file, 'port = 1\nhost = "::1"\nlog_level = "info"\n')
    environment = {"COMFYFLEET_PORT": "2", "COMFYFLEET_HOST": "localhost"}
    found = read_settings({"port": 3, "host": None}, config=file, environment=environment)
    assert (found.values.port, found.values.host, found.values.log_level) == (3, "localhost", "info")
    assert [found.origin(name).place for name in ("port", "host", "log_level", "fake")] == [
        "flag --port",
        "environment COMFYFLEET_HOST",
        f"file {file}",
        DEFAULT.place,
    ]


def test_every_setting_has_its_variable_and_tables_too(file: Path) -> None:
    environment = {
        "COMFYFLEET_SERVERS": "http://a:1, http://b:2",
        "COMFYFLEET_WEBHOOK_ALLOW": "10.0.0.0/8 hooks.internal",
        "COMFYFLEET_OPEN": "true",
        "COMFYFLEET_FAKE": "2",
        "COMFYFLEET_GRACE_S": "1.5",
        "COMFYFLEET_LIMITS_MAX_DEPTH": "9",
        "COMFYFLEET_RULES_LEASE_TTL_S": "30",
    }
    found = read_settings(config=said(file, "[rules]\nmax_attempts = 7\n"), environment=environment)
    assert found.values.servers == ("http://a:1", "http://b:2")
    assert found.values.webhook_allow == ("10.0.0.0/8", "hooks.internal")
    assert (found.values.open, found.values.fake, found.values.grace_s) == (True, ("2",), 1.5)
    assert found.limits().max_depth == 9
    assert (found.rules().lease_ttl_s, found.rules().max_attempts) == (30.0, 7)


def test_the_caps_of_the_queue_are_limits_to_whoever_sets_them(file: Path) -> None:
    environment = {"COMFYFLEET_LIMITS_MAX_OPEN_BYTES": "1000"}
    found = read_settings(config=said(file, "[limits]\nmax_waiting = 7\n"), environment=environment)
    assert (found.rules().max_waiting, found.rules().max_open_bytes) == (7, 1000)
    assert found.limits() == HubLimits()


@pytest.mark.parametrize(
    ("variables", "store"),
    [
        ({"REDIS_URL": "redis://a"}, "redis://a"),
        ({"REDIS_URL": "redis://a", "HUB_REDIS_URL": "redis://b"}, "redis://b"),
        ({"HUB_REDIS_URL": "redis://b", "COMFYFLEET_STORE": "redis://c"}, "redis://c"),
    ],
)
def test_the_names_of_others_are_understood_and_our_own_wins(variables: dict[str, str], store: str) -> None:
    found = read_settings(environment={**variables, "HUB_PORT": "4000", "WS_PORT": "4001"}, config=os.devnull)
    assert (found.values.store, found.values.port, found.values.ws_port) == (store, 4000, 4001)
    assert found.origin("ws_port").place == "environment WS_PORT"
    alone = read_settings(
        environment={**variables, "COMFYFLEET_STORE": "", "HUB_PORT": "4000"},
        config=os.devnull,
        old_store=False,
    )
    assert (alone.values.store, alone.values.port) == (None, 4000)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot = 1", ["'prot'", "did you mean 'port'?"]),
        ("[limits]\nmax_debth = 1", ["'limits.max_debth'", "did you mean 'limits.max_depth'?"]),
        ("[rules]\nlease = 1", ["'rules.lease'"]),
        (
            "[rules]\nworker_lost_s = 10",
            ["'rules.worker_lost_s'", "at least 30 seconds", "heartbeat about every 15"],
        ),
        ("[rules]\nworker_lost_s = nan", ["'rules.worker_lost_s'", "at least 30 seconds"]),
        ("[rules]\nlease_ttl_s = 0", ["'rules.lease_ttl_s'", "more than 0"]),
        ("[rules]\nmax_waiting = 1", ["'rules.max_waiting'", "did you mean 'limits.max_waiting'?"]),
        ("port = 70000", ["'port'", "65535"]),
        ("[limits]\nmin_bytes_per_s = 0", ["'limits.min_bytes_per_s'", "a whole number of at least 1"]),
        ('port = "3001"', ["'port'", "'3001' is not a whole number. Write it without quotes"]),
        ('log_level = "loud"', ["'log_level'"]),
        ("limits = 5", ["'limits'", "[limits]"]),
        ("[hub]\nport = 1", ["'hub'"]),
        ("port =", ["is not valid TOML"]),
        ('webhook_allow = ["10.0.0.0/33"]', ["'webhook_allow'", "10.0.0.0/33"]),
        ('webhook_allow = ["http://hooks.internal/"]', ["'webhook_allow'", "nor a host name"]),
    ],
)
def test_what_the_file_says_wrong_is_told_with_its_name_and_place(
    file: Path, content: str, words: list[str]
) -> None:
    with pytest.raises(CommandFailed) as failed:
        read_settings(config=said(file, content), environment={})
    assert failed.value.code is ExitCode.USAGE
    for word in [*words, str(file)]:
        assert word in str(failed.value)


def test_what_the_environment_says_wrong_is_told_with_the_variable() -> None:
    with pytest.raises(CommandFailed, match=r"'port' \(environment HUB_PORT\)"):
        read_settings(config=os.devnull, environment={"HUB_PORT": "many"})
    found = read_settings(config=os.devnull, environment={"COMFYFLEET_PROT": "1", "COMFYFLEET_DEBUG": "1"})
    assert found.unknown_variables == ("COMFYFLEET_PROT",)


def test_up_says_that_it_does_not_keep_its_jobs_where_a_variable_of_others_points(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    others = {"REDIS_URL": "redis://me:secret@a"}
    for given, is_told in (({}, True), ({"store": "redis://b"}, False)):
        flags = {"data": str(tmp_path), **given}
        resolved = read_settings(flags, config=os.devnull, environment=others, old_store=False)
        warn_about_unused_store(resolved, others)
        told = capsys.readouterr().err
        assert ("does not use REDIS_URL" in told and str(tmp_path) in told) == is_told
        assert "secret" not in told


def test_several_hubs_are_named_in_each_place(file: Path) -> None:
    both = ("http://a:1", "http://b:1")
    assert read_settings({"hub": both}, config=os.devnull, environment={}).values.hub == both
    environment = {"COMFYFLEET_HUB": "http://a:1, http://b:1"}
    assert read_settings(config=os.devnull, environment=environment).values.hub == both
    assert (
        read_settings(config=said(file, 'hub = ["http://a:1", "http://b:1"]'), environment={}).values.hub
        == both
    )
    assert read_settings(config=said(file, 'hub = "http://a:1"'), environment={}).values.hub == both[:1]


def test_every_setting_is_shown_with_the_value_it_has(file: Path) -> None:
    said(file, "[limits]\nmax_waiting = 7\n[rules]\nlease_ttl_s = 30\n")
    environment = {"COMFYFLEET_RULES_MAX_ATTEMPTS": "9", "COMFYFLEET_ENCRYPTION_KEYS": "a=secret"}
    found = read_settings({"port": 1}, config=file, environment=environment).shown()
    shown = {name: (value, place) for name, value, place in found}
    assert shown["port"] == (1, "flag --port") and shown["host"] == ("127.0.0.1", "default")
    assert shown["limits.max_waiting"] == (7, f"file {file}")
    assert shown["rules.lease_ttl_s"] == (30.0, f"file {file}")
    assert shown["rules.max_attempts"] == (9, "environment COMFYFLEET_RULES_MAX_ATTEMPTS")
    assert shown["rules.start_timeout_s"] == (600.0, "default")
    assert shown["s3.region"] == ("us-east-1", "default") and shown["limits.max_depth"][1] == "default"
    assert shown["encryption.keys"][0] == "…" and shown["key"] == (None, "default")
    every = {f"{table}.{name}" for table in TABLES for name in _fields(table)}
    assert (
        every <= shown.keys()
        and set(Settings.__struct_fields__) - TABLES.keys() - {"databases", "connectors"} <= shown.keys()
    )


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="cannot read the settings"):
        read_settings(config=tmp_path / "nothing.toml", environment={})


def test_secrets_are_not_shown() -> None:
    environment = {
        "COMFYFLEET_KEY": "cfk_a_secret",
        "COMFYFLEET_ENROL": "cfe_a_secret",
        "COMFYFLEET_STORE": "redis://me:secret@host:1/0",
        "COMFYFLEET_SERVERS": "http://me:se=secret@gpu:1/comfy,me:secret@gpu:2,gpu:3",
        "COMFYFLEET_SERVICES": "comfyui=https://me:secret@gpu/x@y",
        "COMFYFLEET_S3_SECRET_KEY": "a secret",
        "COMFYFLEET_S3_SESSION_TOKEN": "a secret",
    }
    shown = {
        name: value for name, value, _ in read_settings(config=os.devnull, environment=environment).shown()
    }
    assert "secret" not in str(list(shown.values()))
    assert shown["store"] == "redis://…@host:1/0"
    assert shown["servers"] == ["http://…@gpu:1/comfy", "…@gpu:2", "gpu:3"]
    assert shown["services"] == ["comfyui=https://…@gpu/x@y"]


def test_a_storage_is_named_by_us_or_as_for_every_program_but_never_by_halves(file: Path) -> None:
    others = {
        "AWS_ACCESS_KEY_ID": "theirs",
        "AWS_SECRET_ACCESS_KEY": "their-secret",
        "AWS_SESSION_TOKEN": "their-token",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": "https://theirs.example",
    }
    found = read_settings({"assets": "s3://videos/a%20b/"}, config=os.devnull, environment=others)
    bucket, prefix, credentials = storage(found)
    assert (bucket.name, bucket.region, bucket.endpoint) == ("videos", "eu-west-1", "https://theirs.example")
    assert prefix == "a b" and credentials == S3Credentials("theirs", "their-secret", "their-token")
    said(
        file,
        'assets = "s3://videos"\n[s3]\nendpoint = "https://storage.example/"\npath_style = false\n'
        'access_key = "ours"\nsecret_key = "our-secret"\n',
    )
    bucket, prefix, credentials = storage(read_settings(config=file, environment=others))
    assert (bucket.host, bucket.region, prefix) == ("videos.storage.example", "eu-west-1", "")
    assert credentials == S3Credentials("ours", "our-secret"), "their token would not fit"
    assert read_settings(config=os.devnull, environment=others).values.s3 == {}, "nobody asked for a storage"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('assets = "/srv/files"', "'assets'"),
        ('assets = "s3://me:secret@videos"', "'assets'"),
        ('assets = "s3://videos"', "'s3.endpoint'"),
        ('assets = "s3://videos"\n[s3]\nendpoint = "storage.example"', "'s3.endpoint'"),
        ('assets = "s3://videos"\n[s3]\nendpoint = "https://storage.example"', "'s3.access_key'"),
    ],
)
def test_a_storage_that_cannot_be_understood_is_told_by_its_setting(
    file: Path, content: str, told: str
) -> None:
    with pytest.raises(CommandFailed, match=told) as failed:
        storage(read_settings(config=said(file, content), environment={}))
    assert failed.value.code is ExitCode.USAGE and "secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("postgresql://me:secret@db:5432/fleet", "postgresql://…@db:5432/fleet"),
        ("postgresql://db/fleet?user=me&password=secret", "postgresql://db/fleet?user=me&password=…"),
        ("postgresql://db/fleet?sslmode=require", "postgresql://db/fleet?sslmode=require"),
        ("sqlite:////srv/fleet.db", "sqlite:////srv/fleet.db"),
    ],
)
def test_a_hub_says_which_store_it_keeps_its_jobs_in_and_no_password(
    store: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = None
    running_hub = RunningHub(
        nothing, nothing, nothing, nothing, "http://127.0.0.1:1", "cfk_…", False, Path("/srv/hub.json")
    )
    greet(running_hub, read_settings({"store": store}, config=os.devnull, environment={}))
    assert f"  jobs: {shown}\n" in capsys.readouterr().out


def test_the_usual_data_folder_is_the_users() -> None:
    found = read_settings(config=os.devnull, environment={"HOME": "/home/me", "XDG_DATA_HOME": "/elsewhere"})
    assert found.values.data == "/elsewhere/comfyfleet"


def test_every_flag_is_a_settings() -> None:
    assert _OPTIONS.keys() - {"config"} == set(Settings.__struct_fields__) - TABLES.keys() - {"connectors"}
    assert flag_of("servers") == "--server"


# tenant databases


def test_databases_are_named_in_the_file_the_environment_and_by_flags(file: Path) -> None:
    found = read_settings(
        {"databases": ("c=sqlite:///c.db",)},
        config=said(file, '[databases]\na = "sqlite:///a.db"\nb = "sqlite:///file.db"\n'),
        environment={"COMFYFLEET_DATABASES": "b=postgresql://me:secret@one,two/b, d=sqlite:///d.db"},
    )
    assert found.values.databases == {
        "a": "sqlite:///a.db",
        "b": "postgresql://me:secret@one,two/b",
        "c": "sqlite:///c.db",
        "d": "sqlite:///d.db",
    }
    shown = {name: (value, place) for name, value, place in found.shown()}
    assert shown["databases.b"] == ("postgresql://…@one,two/b", "environment COMFYFLEET_DATABASES")
    assert shown["databases.c"] == ("sqlite:///c.db", "flag --database")
    assert database_urls(found) == found.values.databases


def test_databases_are_read_under_their_old_name_and_shown_under_the_new_one(file: Path) -> None:
    found = read_settings(
        {"databases": ("c=sqlite:///c.db",)},
        config=said(file, '[pools]\na = "sqlite:///a.db"\nb = "sqlite:///file.db"\n'),
        environment={"COMFYFLEET_POOLS": "b=postgresql://me:secret@one,two/b, d=sqlite:///d.db"},
    )
    assert found.values.databases == {
        "a": "sqlite:///a.db",
        "b": "postgresql://me:secret@one,two/b",
        "c": "sqlite:///c.db",
        "d": "sqlite:///d.db",
    }
    shown = {name: (value, place) for name, value, place in found.shown()}
    assert shown["databases.b"] == ("postgresql://…@one,two/b", "environment COMFYFLEET_POOLS")
    assert found.unknown_variables == () and not [name for name in shown if name.startswith("pools")]
    assert "COMFYFLEET_POOLS" not in variables()


@pytest.mark.parametrize(
    ("content", "environment"),
    [
        ('[pools]\na = "sqlite:///a.db"\n[databases]\na = "sqlite:///a.db"\nb = "sqlite:///b.db"\n', {}),
        ("", {"COMFYFLEET_POOLS": "a=sqlite:///a.db", "COMFYFLEET_DATABASES": "b=sqlite:///b.db"}),
        ('[pools]\na = "sqlite:///a.db"\n', {"COMFYFLEET_DATABASES": "b=sqlite:///b.db"}),
        ('[databases]\na = "sqlite:///a.db"\n', {"COMFYFLEET_POOLS": "b=sqlite:///b.db"}),
    ],
)
def test_databases_under_both_names_are_one_mistake_that_names_both(
    content: str, environment: dict[str, str], file: Path
) -> None:
    config = said(file, content)
    with pytest.raises(CommandFailed, match="old name of 'databases'") as failed:
        read_settings(config=config, environment=environment)
    places = [f"environment {name}" for name in environment] + ([f"file {file}"] if content else [])
    assert all(f"({place})" in str(failed.value) for place in places)
    assert "'pools' (" in str(failed.value) and "'databases' (" in str(failed.value)
    mistakes: list[CommandFailed] = []
    read_settings(config=config, environment=environment, mistakes=mistakes)
    assert [str(each) for each in mistakes] == [str(failed.value)]


@pytest.mark.parametrize(
    ("given", "said_of_it"),
    [
        ({"databases": ("nowhere",)}, "has no name"),
        ({"databases": ("a=redis://x",)}, "sqlite:///"),
        ({"databases": ("a b=sqlite:///x.db",)}, "not a valid name"),
    ],
)
def test_a_database_that_is_none_is_told_of(given: dict[str, Any], said_of_it: str, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=said_of_it):
        read_settings(given, environment={})


def test_beside_an_embedded_store_there_is_a_database_without_being_asked_for(tmp_path: Path) -> None:
    for store in (None, "sqlite:///elsewhere.db"):
        urls = database_urls(read_settings({"data": str(tmp_path), "store": store}, environment={}))
        assert urls == {"default": f"sqlite:///{tmp_path}/tenants.db"}
    assert database_urls(read_settings({"store": "redis://x"}, environment={})) == {}


def test_a_database_that_tenants_were_put_into_is_still_there_when_others_are_named(tmp_path: Path) -> None:
    named = {"data": str(tmp_path), "databases": ("eu=sqlite:///eu.db",)}
    assert database_urls(read_settings(named, environment={})) == {"eu": "sqlite:///eu.db"}
    (tmp_path / "tenants.db").touch()
    before = f"sqlite:///{tmp_path}/tenants.db"
    assert database_urls(read_settings(named, environment={})) == {"default": before, "eu": "sqlite:///eu.db"}
    # Whoever gives it an address means that one, and on a shared store nothing is guessed.
    another = named | {"databases": ("default=sqlite:///d.db",)}
    assert database_urls(read_settings(another, environment={})) == {"default": "sqlite:///d.db"}
    shared = named | {"store": "redis://x"}
    assert database_urls(read_settings(shared, environment={})) == {"eu": "sqlite:///eu.db"}


# what is kept for others of the same user


def test_the_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    path = write_hub(folder, LocalHub("http://127.0.0.1:3001", "cfk_a_b"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_hub(folder) == LocalHub("http://127.0.0.1:3001", "cfk_a_b")
    assert [each.name for each in folder.iterdir()] == ["hub.json"]
    path.chmod(0o640)
    with pytest.raises(CommandFailed, match="chmod 600"):
        read_hub(folder)


def test_a_key_file_that_is_none_says_what_to_do(tmp_path: Path) -> None:
    assert read_hub(tmp_path) is None
    path = write_hub(tmp_path, LocalHub("http://127.0.0.1:3001"))
    path.write_text("{")
    with pytest.raises(CommandFailed, match="remove it"):
        read_hub(tmp_path)


def test_a_key_that_cannot_be_written_names_its_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CommandFailed, match=r"cannot write .*hub\.json: No space left"):
        write_hub(tmp_path, LocalHub("http://127.0.0.1:3001"))
    assert list(tmp_path.iterdir()) == []


def test_a_workers_key_is_kept_by_hub_and_worker(tmp_path: Path) -> None:
    write_worker_key(tmp_path, "http://a", "gpu", "1")
    write_worker_key(tmp_path, "http://a", "other", "2")
    write_worker_key(tmp_path, "http://b", "gpu", "3")
    assert read_worker_key(tmp_path, "http://a", "gpu") == "1"
    assert read_worker_key(tmp_path, "http://b", "gpu") == "3"
    assert read_worker_key(tmp_path, "http://b", "other") is None


def test_the_folder_of_a_server_is_that_of_one_server_and_looks_like_one(tmp_path: Path) -> None:
    one, two = ("http://127.0.0.1:8188",), ("http://127.0.0.1:8188", "http://127.0.0.1:8189")
    for addresses, words in ((one, "has no folder 'output'"), (two, "a worker for each")):
        resolved = read_settings({"server_folder": str(tmp_path)}, environment={})
        with pytest.raises(CommandFailed, match=words):
            with_cleanup(named(addresses, None, 1), resolved)
    (tmp_path / "output").mkdir()
    resolved = read_settings({"server_folder": str(tmp_path), "clear_history": True}, environment={})
    (server,) = with_cleanup(named(one, None, 1), resolved)
    assert (server.folder, server.clears_history) == (tmp_path, True)
    (plain,) = with_cleanup(named(one, None, 1), read_settings({}, environment={}))
    assert (plain.folder, plain.clears_history) == (None, False), "nothing is removed unless it was asked for"
