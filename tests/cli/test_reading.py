"""`penstock read`: from where, until where, how much of it, and in which form."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.cli.reading import parse_end, parse_start
from tests.cli.conftest import PROGRAM, Done, Program, Run, data, environment, on_terminal, rows


@pytest.fixture
def orders(run: Run) -> Run:
    """A stream of two partitions with events 0 to 9, in commits of one each."""
    run("stream", "create", "orders", "-F", "user=str", "-F", "n=int", "--key", "user",
        "--partitions", "2")  # fmt: skip
    for n in range(10):
        run("pub", "orders", json.dumps({"user": f"u{n % 3}", "n": n}))
    return run


def numbers(done: Done) -> list[int]:
    return [row["n"] for row in data(done)]  # type: ignore[index]


def test_the_last_events_over_all_partitions(orders: Run) -> None:
    assert numbers(orders("read", "orders", "--last", "4", "--json")) == [6, 7, 8, 9]
    assert numbers(orders("read", "orders", "--last", "99", "--json")) == list(range(10))
    assert numbers(orders("read", "orders", "--last", "2", "--key", "u1", "--json")) == [4, 7]
    assert numbers(orders("read", "orders", "--last", "3", "-n", "1", "--json")) == [7]


def test_the_last_events_are_found_behind_many_others(run: Run) -> None:
    run("stream", "create", "s")
    run("pub", "s", "-", "--key", "rare", stdin="1\n2\n3\n")
    run("pub", "s", "-", "--key", "often", stdin="".join(f"{n}\n" for n in range(5000)))
    assert data(run("read", "s", "--last", "2", "--key", "rare", "--json")) == [2, 3]


def test_the_last_events_and_those_that_follow(orders: Run, tmp_path: Path) -> None:
    with Program(tmp_path, "read", "orders", "--last", "2", "-f", "--json") as program:
        seen = [json.loads(program.line())["data"]["n"] for _ in range(2)]
        orders("pub", "orders", '{"user": "ada", "n": 10}')
        seen.append(json.loads(program.line())["data"]["n"])
    assert seen == [8, 9, 10]


def test_reading_ends_before_an_offset_or_a_time(orders: Run) -> None:
    events = rows(orders("read", "orders", "--json"))
    assert {e["offset"] for e in rows(orders("read", "orders", "--until", "2", "--json"))} == {0, 1}
    middle = str(events[5]["time"])
    before = rows(orders("read", "orders", "--until", middle, "--json"))
    after = rows(orders("read", "orders", "--from", middle, "--json"))
    assert before + after == events
    assert before
    some = orders("read", "orders", "--until", middle, "--last", "1", "--json")
    assert rows(some) == before[-1:]


def test_a_time_without_a_zone_is_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the command runs."""
    wanted = dt.datetime(2026, 11, 15, 10, tzinfo=dt.UTC)
    for zone in ("Asia/Tokyo", "UTC"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert parse_start("2026-11-15T10:00:00") == wanted
        assert parse_end("2026-11-15T10:00") == wanted
        assert parse_end("2026-11-15T12:00+02:00") == wanted
    monkeypatch.undo()
    time.tzset()


def test_what_is_not_there_is_said(orders: Run) -> None:
    orders("stream", "create", "empty")
    for arguments, message in (
        (["orders", "--from", "9999"], "orders ends before the start given (its next offset is "),
        (
            ["orders", "--from", "2099-01-01"],
            "orders ends before the start given (its next offset is ",
        ),
        (["orders", "--key", "nobody"], "orders has no event with the key nobody"),
        (["orders", "--until", "2020-01-01"], "orders has no events in this range"),
        (["empty"], "empty holds no events"),
    ):
        done = orders("read", *arguments)
        assert (done.returncode, done.stdout) == (0, "")
        assert message in done.stderr


def test_who_waits_for_an_offset_far_off_is_told(orders: Run, tmp_path: Path) -> None:
    with Program(tmp_path, "read", "orders", "--from", "9999", "-f") as program:
        assert "has not reached that offset yet" in program.note()


def test_as_comma_separated_values(orders: Run) -> None:
    done = orders("read", "orders", "--last", "2", "--format", "csv")
    first, second = csv.DictReader(io.StringIO(done.stdout))
    assert (first["user"], first["n"], second["n"]) == ("u2", "8", "9")
    events = rows(orders("read", "orders", "--last", "2", "--json"))
    assert first["_id"] == events[0]["id"]
    assert (first["_partition"], first["_offset"]) == (
        str(events[0]["partition"]), str(events[0]["offset"]),
    )  # fmt: skip


def test_values_that_are_not_plain_are_json_in_csv(run: Run) -> None:
    run("stream", "create", "t", "--table", "--key", "k", "-F", "k=str", "-F", "tags=list[str]")
    run("pub", "t", '{"k": "a", "tags": ["x, y", "\\"z\\""]}')
    run("pub", "t", "--delete", "--key", "a")
    made, gone = csv.DictReader(io.StringIO(run("read", "t", "--format", "csv").stdout))
    assert json.loads(made["tags"]) == ["x, y", '"z"']
    assert (made["_deleted"], gone["_deleted"], gone["tags"]) == ("false", "true", "")
    run("stream", "create", "j")
    run("pub", "j", '{"a": [1, null]}')
    run("pub", "j", '"text"')
    whole = list(csv.DictReader(io.StringIO(run("read", "j", "--format", "csv").stdout)))
    assert [row["data"] for row in whole] == ['{"a":[1,null]}', "text"]


def test_as_arrow(orders: Run, tmp_path: Path) -> None:
    def read(*arguments: str) -> pa.Table:
        done = subprocess.run(
            [*PROGRAM, "read", "orders", "--format", "arrow", *arguments], cwd=tmp_path,
            capture_output=True, check=True, env=environment(), timeout=60,
        )  # fmt: skip
        return pa.ipc.open_stream(done.stdout).read_all()

    assert read("--last", "4").column("n").to_pylist() == [6, 7, 8, 9]
    assert read("--key", "u1", "-n", "2").column("n").to_pylist() == [1, 4]
    nothing = read("--from", "latest")
    assert nothing.num_rows == 0
    assert "_offset" in nothing.schema.names
    seen = on_terminal(tmp_path, "read", "orders", "--format", "arrow")
    assert seen.code == 2
    assert "cannot be shown on a terminal" in seen.text


def test_as_a_table_on_narrow_and_wide_terminals(orders: Run, tmp_path: Path) -> None:
    for columns in (80, 200):
        seen = on_terminal(
            tmp_path, "read", "orders", "--last", "2", "--format", "table", columns=columns
        )
        lines = seen.text.splitlines()
        assert lines[0].split() == ["place", "time", "key", "user", "n"]
        assert len(lines) == 3
        assert max(map(len, lines)) <= columns
    piped = orders("read", "orders", "--last", "2", "--format", "table").stdout
    assert piped.splitlines()[-1].split()[-1] == "9"


def test_options_that_contradict_each_other_are_refused(orders: Run) -> None:
    for arguments, message in (
        (["--last", "2", "--from", "3"], "--last determines where to start"),
        (["--until", "2", "--follow"], "--until and --follow cannot be combined"),
        (["--until", "monday"], "--until 'monday' is not an offset"),
        (["--last", "0"], "--last"),
        (["--last", "100001"], "at most 100000"),
        (["--json", "--format", "csv"], "--json means --format json"),
        (["--key", "a", "-p", "0"], "omit --partition"),
    ):
        done = orders("read", "orders", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert message in done.stderr, arguments


def test_a_log_that_may_not_be_written_is_read(orders: Run) -> None:
    for arguments in (
        ["read", "orders", "--json"],
        ["stream", "describe", "orders"],
        ["verify"],
        ["dead", "list"],
    ):
        assert orders(*arguments, "--setting", "read_only=true").returncode == 0, arguments
    done = orders("pub", "orders", '{"user": "x", "n": 1}', "--setting", "read_only=true")
    assert done.returncode == 1
    assert len(rows(orders("read", "orders", "--json"))) == 10
