"""The same commands on a log in Kafka: tables, dead letters, and reading from the end."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from penstock.testing.apps import AppTest
from penstock.testing.brokers import Brokers
from tests.cli.conftest import PROGRAM, Run, data, environment, rows
from tests.cli.test_dead import LETTERS, Order, amounts, shop
from tests.cli.test_tables import Visit, keys, visits_app


@pytest.fixture
def url(broker: Brokers, monkeypatch: pytest.MonkeyPatch, run: Run) -> str:
    """A new log, which commands use."""
    found = f"{broker.url}/t{secrets.token_hex(4)}"
    monkeypatch.setenv("PENSTOCK_LOG", found)
    return found


def test_reading_from_the_end_and_up_to_a_place(run: Run, url: str) -> None:
    run("stream", "create", "orders", "--key", "user", "--partitions", "2")
    for n in range(6):
        assert run("pub", "orders", json.dumps({"user": f"u{n % 3}", "n": n})).returncode == 0
    last = data(run("read", "orders", "--last", "4", "--json"))
    assert sorted(row["n"] for row in last) == [2, 3, 4, 5]  # type: ignore[index]
    (one,) = data(run("read", "orders", "--last", "1", "--key", "u1", "--json"))
    assert one == {"user": "u1", "n": 4}
    events = rows(run("read", "orders", "--json"))
    middle = sorted(str(event["time"]) for event in events)[3]
    before = rows(run("read", "orders", "--until", middle, "--json"))
    after = rows(run("read", "orders", "--from", middle, "--json"))
    assert Counter(map(str, before + after)) == Counter(map(str, events))
    past = run("read", "orders", "--from", "9999")
    assert (past.returncode, "orders ends before the start given" in past.stderr) == (0, True)


def test_streams_are_altered_and_dropped(run: Run, url: str) -> None:
    run("stream", "create", "s", "-F", "user=str", "--retention", "7 days")
    done = run("stream", "alter", "s", "--partitions", "2", "-F", "note=str | None")
    assert done.returncode == 0, done.stderr
    (found,) = rows(run("stream", "describe", "s", "--json"))
    assert found["fields"] == {"user": "str", "note": "str | None"}
    assert len(found["partitions"]) == 2  # type: ignore[arg-type]
    assert run("stream", "alter", "s", "--retention", "1 hour").returncode == 2
    assert run("stream", "alter", "s", "--retention", "1 hour", "--yes").returncode == 0
    assert run("stream", "drop", "s").returncode == 2
    assert run("stream", "drop", "s", "--yes").returncode == 0
    assert "did you mean" not in run("read", "s").stderr
    run("stream", "create", "clicks")
    missed = run("stream", "adopt", "click").stderr
    assert "there is no topic" in missed
    assert "default.clicks?" in missed


def test_tables(run: Run, url: str, tmp_path: Path) -> None:
    app = visits_app()
    with AppTest(app, tmp_path, log=url) as test:
        test.send(app.streams["visits"], *(Visit(f"u{n % 7}", f"p{n % 3}") for n in range(21)))
        test.until_idle()
    found = {row["table"]: row["value"] for row in rows(run("table", "list", "--json"))}
    assert found == {"pages": "set[str]", "trail": "list[str]", "hourly": "Hourly"}
    assert run("table", "get", "pages", "u1").stdout == '["p0","p1","p2"]\n'
    assert run("table", "get", "pages", "u1", "nobody").returncode == 1
    assert keys(run("table", "page", "trail", "-n", "2", "--after", "u2", "--json")) == ["u3", "u4"]
    assert keys(run("table", "page", "trail", "--prefix", "u6", "--json")) == ["u6"]
    assert len(keys(run("table", "page", "trail", "--all", "--json"))) == 7
    windows = rows(run("table", "get", "hourly", "u0", "--windows", "--json"))
    assert sum(row["value"]["value"] for row in windows) == 3  # type: ignore[index]


@pytest.mark.parametrize("failpoint", ["", "commit.begun=kill", "commit.committed=kill"])
def test_letters_are_sent_again_once(
    run: Run, url: str, tmp_path: Path, failpoint: str
) -> None:  # fmt: skip
    app = shop()
    with AppTest(app, tmp_path, log=url) as test:
        orders = [Order(f"u{n % 4}", -n if n % 3 == 2 else n) for n in range(3 * LETTERS)]
        test.send(app.streams["orders"], *orders)
        test.until_idle()
    assert len(rows(run("dead", "list", "--json"))) == LETTERS
    if failpoint:
        killed = subprocess.run(
            [*PROGRAM, "dead", "replay", "add_up", "--all"], check=False, timeout=120,
            capture_output=True, env=environment(PENSTOCK_FAILPOINTS=failpoint, PENSTOCK_LOG=url),
        )  # fmt: skip
        assert killed.returncode == -signal.SIGKILL
    assert run("dead", "replay", "add_up", "--all").returncode == 0
    assert run("dead", "replay", "add_up", "--all").stdout.startswith("replayed 0 letters")
    assert sorted(amounts(run)) == sorted(-n for n in range(2, 3 * LETTERS, 3))
    (letter,) = rows(run("dead", "show", "add_up", "0:1", "--json"))
    assert letter["sent_into"] == "orders"
