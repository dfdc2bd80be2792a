"""`penstock table`: entries by key, by page and by prefix, on the embedded log."""

from __future__ import annotations

import base64
import csv
import datetime as dt
import io
import json
from pathlib import Path

import pytest

import penstock
from penstock import App, Entry, Record, WindowedEntry
from penstock.testing.apps import AppTest
from tests.cli.conftest import Run, on_terminal, rows


class Visit(Record):
    user: str
    page: str


def visits_app() -> App:
    app = App("visits")
    visits = app.stream("visits", Visit, key="user")
    pages = app.table("pages", value=set[str])
    trail = app.table("trail", value=list[str])
    hourly = app.table("hourly", value=int, default=0, window=penstock.tumbling("1 hour"))

    @app.agent(visits, state=pages)
    def collect(visit: Visit, entry: Entry[set[str]]) -> None:
        entry.value.add(visit.page)

    @app.agent(visits, state=trail)
    def follow(visit: Visit, entry: Entry[list[str]]) -> None:
        entry.value.append(visit.page)

    @app.agent(visits, state=hourly)
    def count(visit: Visit, entry: WindowedEntry[int]) -> None:
        entry.current().value += 1

    return app


@pytest.fixture
def visited(run: Run, tmp_path: Path) -> Run:
    """A log with the tables of an app: a set, a list, and windows."""
    app = visits_app()
    with AppTest(app, tmp_path, log=str(tmp_path / "penstock.db")) as test:
        visits = app.streams["visits"]
        test.send(visits, Visit("ada", "b"), Visit("ada", "a"), Visit("bob", "a"))
        test.until_idle()
        test.send(visits, Visit("ada", "a"))
        test.until_idle()
    return run


@pytest.fixture
def customers(run: Run) -> Run:
    run("stream", "create", "customers", "--table", "-F", "name=str", "-F", "vip=bool", "--key",
        "name", "--partitions", "3")  # fmt: skip
    lines = "".join(f'{{"name": "c{n:03}", "vip": {json.dumps(n % 2 == 0)}}}\n' for n in range(250))
    run("pub", "customers", "-", stdin=lines)
    return run


def keys(done: object) -> list[object]:
    return [row["key"] for row in rows(done)]  # type: ignore[arg-type]


def test_tables_are_listed(visited: Run) -> None:
    found = {row["table"]: row for row in rows(visited("table", "list", "--json"))}
    assert {name: row["value"] for name, row in found.items()} == {
        "pages": "set[str]", "trail": "list[str]", "hourly": "Hourly",
    }  # fmt: skip
    assert "set[str]" in visited("table", "list").stdout
    assert visited("stream", "list").stdout.count("yes") == 3


def test_a_log_without_tables_says_so(run: Run) -> None:
    run("stream", "create", "s")
    assert "no tables" in run("table", "list").stderr


def test_values_by_key(visited: Run) -> None:
    assert visited("table", "get", "pages", "ada").stdout == '["a","b"]\n'
    assert visited("table", "get", "trail", "ada", "bob").stdout.splitlines() == [
        'ada\t["b","a","a"]', 'bob\t["a"]',
    ]  # fmt: skip
    assert rows(visited("table", "get", "trail", "ada", "--json")) == [
        {"key": "ada", "value": ["b", "a", "a"]}
    ]


def test_a_key_without_an_entry(visited: Run) -> None:
    done = visited("table", "get", "pages", "ada", "eve", "--json")
    assert done.returncode == 1
    assert [json.loads(line)["value"] for line in done.stdout.splitlines()] == [["a", "b"], None]
    assert "pages has no entry for 'eve'" in done.stderr
    refused = visited("table", "get", "visits", "ada")
    assert refused.returncode == 2
    assert "visits is a stream, not a table" in refused.stderr


def test_entries_of_windows(visited: Run) -> None:
    done = visited("table", "get", "hourly", "ada")
    assert done.returncode == 1
    assert "use --windows" in done.stderr
    found = rows(visited("table", "get", "hourly", "ada", "--windows", "--json"))
    assert sum(row["value"]["value"] for row in found) == 3  # type: ignore[index]
    start = str(found[0]["window"])
    assert dt.datetime.fromisoformat(start).minute == 0
    (one,) = rows(visited("table", "get", "hourly", "ada", "--window", start, "--json"))
    assert one == found[0]
    shown = rows(visited("table", "page", "hourly", "--windows", "--json"))
    assert {row["key"] for row in shown} == {"ada", "bob"}


def test_windows_of_a_key_are_not_those_of_one_that_begins_like_it(
    run: Run, tmp_path: Path
) -> None:
    app = visits_app()
    with AppTest(app, tmp_path, log=str(tmp_path / "penstock.db")) as test:
        test.send(app.streams["visits"], Visit("ada", "a"), Visit("ada@home", "a"))
        test.until_idle()
    for key in ("ada", "ada@home"):
        found = rows(run("table", "get", "hourly", key, "--windows", "--json"))
        assert [row["key"] for row in found] == [key]


def test_pages_in_order_of_key(customers: Run) -> None:
    first = customers("table", "page", "customers", "--limit", "3", "--json")
    assert keys(first) == ["c000", "c001", "c002"]
    assert first.stderr == "there are more entries: continue with --after c002\n"
    second = customers("table", "page", "customers", "-n", "2", "--after", "c002", "--json")
    assert keys(second) == ["c003", "c004"]
    last = customers("table", "page", "customers", "--after", "c248", "--json")
    assert (keys(last), last.stderr) == (["c249"], "")
    assert len(keys(customers("table", "page", "customers", "--all", "--json"))) == 250
    assert len(customers("table", "page", "customers").stdout.splitlines()) == 100


def test_keys_that_begin_alike(customers: Run) -> None:
    customers("pub", "customers", '{"name": "c1", "vip": true}')
    customers("pub", "customers", '{"name": "d", "vip": true}')
    found = keys(customers("table", "page", "customers", "--prefix", "c1", "--all", "--json"))
    assert found == ["c1", *(f"c{n}" for n in range(100, 200))]
    after = ["--prefix", "c1", "--after", "c197", "--json"]
    assert keys(customers("table", "page", "customers", *after)) == ["c198", "c199"]
    none = customers("table", "page", "customers", "--prefix", "x")
    assert (none.stdout, none.stderr) == ("", "customers has no matching entries\n")


def test_pages_in_other_forms(customers: Run, tmp_path: Path) -> None:
    done = customers("table", "page", "customers", "-n", "2", "--format", "csv")
    assert list(csv.DictReader(io.StringIO(done.stdout))) == [
        {"_key": "c000", "name": "c000", "vip": "true"},
        {"_key": "c001", "name": "c001", "vip": "false"},
    ]
    seen = on_terminal(tmp_path, "table", "page", "customers", "-n", "2", "--format", "table")
    assert seen.text.splitlines()[0].split() == ["key", "name", "vip"]


def test_keys_that_are_no_text(run: Run) -> None:
    run("stream", "create", "t", "--table")
    line = json.dumps({"data": 1, "key": {"base64": base64.b64encode(b"\xff\x01").decode()}})
    assert run("pub", "t", "-", "--events", stdin=line).returncode == 0
    (row,) = rows(run("table", "page", "t", "--json"))
    assert row == {"key": {"base64": "/wE="}, "value": 1}
    assert run("table", "get", "t", "/wE=", "--base64").stdout == "1\n"
    assert keys(run("table", "page", "t", "--prefix", "/w==", "--base64", "--json")) == [row["key"]]
    assert run("table", "get", "t", "no base64!", "--base64").returncode == 2


def test_a_table_that_may_not_be_written_is_read(customers: Run) -> None:
    only = ["--setting", "read_only=true"]
    assert len(keys(customers("table", "page", "customers", "--all", "--json", *only))) == 250
