"""`penstock connect`: what is missing, or wrong, is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import CreateStream, declare, read_events
from penstock import open as open_log
from penstock.cli.main import main
from penstock.cli.options import parse_options, parse_setting
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.hosts.registry import records
from penstock.connect.hosts.sink_host import SinkOptions
from penstock.connect.hosts.spool import DeadMessage, Spool
from penstock.connect.hosts.targets import SinkMessage
from penstock.connect.protocol.marks import Mark


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        (["redis", "redis://localhost", "x"], "redis", "redis"),
        (["kafka-sink", "localhost:1", "x", "--state", "s"], "confluent_kafka", "kafka"),
        (["postgres", "postgresql://localhost", "x"], "psycopg", "postgres"),
    ],
)
def test_an_extra_that_is_missing_names_itself(command: list[str], module: str, extra: str) -> None:
    without = f"import sys; sys.modules[{module!r}] = None; import penstock.cli.__main__"
    given = [sys.executable, "-c", without, "connect", *command]
    done = subprocess.run(given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert f"pip install 'penstock[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        count = 2 if folder == "a" else 3
        text = "".join(f"{folder}{n}\n" for n in range(count))
        (tmp_path / folder / "orders.txt").write_text(text)
    with open_log(tmp_path / "log.db") as log:
        log.apply([CreateStream(declare("raw", content="bytes"))])
        with Listener(log, ListenerOptions(routes=[("file/*", "raw")])) as listener:
            to = "{}:{}".format(*listener.address)
            for folder in ("a", "b"):
                path = str(tmp_path / folder / "orders.txt")
                assert main(["connect", "file", path, "--until-idle", "--to", to]) == 0
        found = [event.data for event in read_events(log, "raw")]
        assert found == [b"a0", b"a1", b"b0", b"b1", b"b2"]
        assert len({record.name for record in records(log)}) == 2


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["redis", "redis://:secret@store:7000/2", "orders"], "redis/store:7000/2/orders"),
        (["redis", "redis://store", "orders"], "redis/store:6379/0/orders"),
        (["redis", "redis://localhost", "x", "--group", "g"], "redis/HERE:6379/0/group/g/x"),
        (["redis", "redis://store", "news", "--subscribe"], "redis/store:6379/0/channel/news"),
        (
            ["postgres", "postgresql://app:secret@store/shop", "c", "--table", "t"],
            "postgres/store:5432/shop/t",
        ),
        (["postgres", "host=/run/x dbname=shop port=1", "c"], "postgres/HERE:1/shop/channel/c"),
        (["file", "/var/log/a.txt"], "file/HERE/var/log/a.txt"),
        (["file", "a.txt", "--name", "mine"], "mine"),
    ],
)
def test_a_source_is_named_after_what_it_reads_and_where(
    command: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr("socket.gethostname", lambda: "HERE")
    monkeypatch.setattr(
        "penstock.cli.connect.run_source", lambda source, *rest: found.append(source.name)
    )
    assert main(["connect", *command]) == 0
    assert found == [name]


# Secrets

PARTS = ("hunter", "two", "s3cret")


@pytest.mark.parametrize(
    "command",
    [
        ["postgres", "postgresql://app:hunter/two@store/shop", "c"],
        ["postgres", "postgresql://app:123/hunter@store/shop", "c"],
        ["postgres", "postgresql://app:hunter@two@store/shop", "c"],
        ["postgres", "postgresql:/app:hunter@store/shop", "c"],
        ["postgres", "host=store password=hunter two", "c"],
        ["postgres-sink", "postgresql://app:%hunter@store/shop", "t", "--key", "k", "--state", "s"],
        ["postgres-sink", "postgresql://app:hunter", "t", "--key", "k", "--state", "s"],
        ["redis", "redis://:hunter/two@store", "x"],
        ["redis", "redis://:hunter:two", "x"],
        ["redis", "rediss//:hunter@store", "x"],
        ["redis-sink", "redis://:12/hunter@store", "--hash", "h", "--state", "s"],
        ["redis", "x", "y", "redis://:hunter@store/0"],
        ["kafka", "store:1", "t", "--group", "g", "--setting", "sasl.password:hunter"],
        ["kafka", "store:1", "t", "--group", "g", "--setting", "hunter"],
        ["kafka-sink", "store:1", "t", "--state", "s", "--setting", "=hunter"],
    ],
)
def test_what_is_mistyped_does_not_show_a_secret(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["connect", *command]) == 2
    said = "".join(capsys.readouterr())
    assert "penstock: " in said
    assert not [part for part in PARTS if part in said], said


@pytest.mark.parametrize(
    "address",
    ["postgres://app:hunter@store/shop", "postgresql://app:hunter/two@store/shop", "hunter"],
)
@pytest.mark.parametrize("command", ["create", "relay"])
def test_the_database_of_an_outbox_is_not_shown(
    command: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_log(tmp_path / "log.db").close()
    log = ["--log", str(tmp_path / "log.db")] if command == "relay" else []
    assert main(["outbox", command, address, *log]) == 2
    said = "".join(capsys.readouterr())
    assert not [part for part in PARTS if part in said], said


@pytest.mark.parametrize("given", ["@env:SECRET", "@file:{}", "itself"])
def test_a_secret_is_given_by_name(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same way wherever there is one: cookies, addresses, settings of Kafka."""
    (tmp_path / "secret").write_text("s3cret\n")
    monkeypatch.setenv("SECRET", "s3cret")
    secret = given.format(tmp_path / "secret")
    wanted = "itself" if given == "itself" else "s3cret"
    found: list[object] = []

    def note_source(source: object, to: str, cookie: str, *rest: object) -> None:
        found.extend([cookie, getattr(source, "_url", None)])

    def note_sink(make: object, state: Path, options: SinkOptions, *rest: object) -> None:
        found.append(options.cookie)

    monkeypatch.setattr("penstock.cli.connect.run_source", note_source)
    monkeypatch.setattr("penstock.cli.connect_sinks.run_sink", note_sink)
    assert main(["connect", "file", "x", "--cookie", secret]) == 0
    assert main(["connect", "file-sink", "x", "--cookie", secret]) == 0
    assert found == [wanted, None, wanted]
    monkeypatch.setenv("PENSTOCK_COOKIE", secret)
    assert main(["connect", "file", "x"]) == 0
    assert found[3:] == [wanted, None]
    assert parse_setting(f"sasl.password={secret}") == ("sasl.password", wanted)
    assert parse_options([f"sasl.password={secret}"]) == {"sasl.password": wanted}


def test_an_address_is_given_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(
        "penstock.cli.connect.run_source", lambda source, *rest: found.append(source.name)
    )
    (tmp_path / "url").write_text("redis://:s3cret@store:7000/2\n")
    assert main(["connect", "redis", f"@file:{tmp_path / 'url'}", "orders"]) == 0
    monkeypatch.setenv("SHOP", "postgresql://app:s3cret@store/shop")
    assert main(["connect", "postgres", "@env:SHOP", "c"]) == 0
    assert found == ["redis/store:7000/2/orders", "postgres/store:5432/shop/channel/c"]
    monkeypatch.setenv("PENSTOCK_DATABASE", f"@file:{tmp_path / 'database'}")
    (tmp_path / "database").write_text(f"sqlite:///{tmp_path / 'shop.db'}")
    assert main(["outbox", "create"]) == 0
    assert (tmp_path / "shop.db").exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("@env:NOBODY_SET_IT", "environment variable NOBODY_SET_IT is not set"),
        ("@file:{}/none", "none cannot be read: No such file"),
        ("@file:{}/large", "larger than 65,536 bytes"),
        ("@file:{}/odd", "not UTF-8"),
    ],
)
def test_a_secret_that_is_not_there_is_told(
    given: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large").write_bytes(b"x" * 70_000)
    (tmp_path / "odd").write_bytes(b"\xff")
    assert main(["connect", "file", "x", "--cookie", given.format(tmp_path)]) == 2
    assert why in capsys.readouterr().err


def test_the_state_of_a_file_source_has_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b", "state"):
        (tmp_path / folder).mkdir()
    with open_log(tmp_path / "log.db") as log:
        log.apply([CreateStream(declare("raw", content="bytes"))])
        with Listener(log, ListenerOptions(routes=[("file/*", "raw")])) as listener:
            to = "{}:{}".format(*listener.address)
            for text in ("1\n", "2\n"):
                for folder in ("a", "b"):  # two of one name
                    with (tmp_path / folder / "x.txt").open("a") as file:
                        file.write(text)
                    given = [
                        "--state",
                        str(tmp_path / "state"),
                        "--to",
                        to,
                        "--until-idle",
                        "--json",
                    ]
                    path = str(tmp_path / folder / "x.txt")
                    assert main(["connect", "file", path, *given]) == 0
                    (line,) = capsys.readouterr().out.splitlines()
                    assert json.loads(line)["sent"] == 1
        assert len(list(read_events(log, "raw"))) == 4
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.txt"]
    assert len(list((tmp_path / "state").iterdir())) == 2


@pytest.mark.row("X10", engine="any")
def test_what_a_sink_has_put_aside_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = Spool(tmp_path / "sink")
    spool.open()
    message = SinkMessage(b"ada", 0, b'{"amount": -1}')
    spool.bury(DeadMessage("shop-0", Mark(30, 7), 1_000, message, "ValueError: no"))
    try:
        assert main(["connect", "dead", str(tmp_path / "sink")]) == 0
        said = capsys.readouterr().out
        assert said == 'shop-0 message 7: ValueError: no\n  {"amount": -1}\n'
    finally:
        spool.close()
    assert main(["connect", "dead", str(tmp_path / "sink"), "--json"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row == {
        "worker": "shop-0", "message": 7, "offset": 30, "time_ms": 1000, "key": "ada",
        "data": '{"amount": -1}', "error": "ValueError: no",
    }  # fmt: skip
    assert main(["connect", "dead", str(tmp_path)]) == 2
    assert "is not a sink's folder" in capsys.readouterr().err
