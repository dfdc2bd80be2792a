"""`penstock connect`: what is missing, or wrong, is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock import CreateStream, declare, read_events
from penstock import open as open_log
from penstock.cli.main import main
from penstock.connect.listener import Listener, ListenerOptions
from penstock.connect.registry import records


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
                assert main(["connect", "file", path, "--until-end", "--to", to]) == 0
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
