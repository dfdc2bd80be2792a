"""`penstock run`, `reset` and `agent list`, as a user types them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from penstock import App, Producer, Table
from penstock import open as open_log
from penstock.app.declaring.plan import plan
from penstock.app.running.loading import load_app
from penstock.app.running.reports import agent_rows
from penstock.app.running.streams import make_streams
from penstock.cli.apps import LINES_S, view
from penstock.testing.apps import AppTest
from penstock.testing.processes import wait_until
from tests.cli.conftest import Run

SHOP = """
import penstock
from penstock import Entry
from pyspark.sql import functions as F

app = penstock.App("shop")

class Order(penstock.Record):
    user: str
    amount: int

orders = app.stream("orders", Order, key="user", partitions=2)
totals = app.table("totals", value=int, default=0)

@app.agent(orders, state=totals)
def add_up(order: Order, total: Entry[int]) -> None:
    total.value += order.amount

@app.derive_table(orders, key="user")
def counts(orders):
    return orders.groupBy("user").count()
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def penstock(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments, "--log", "shop.db"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=180,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip


def send(folder: Path, count: int) -> None:
    sys.path.insert(0, str(folder))
    try:
        import shop  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("shop", None)
    with open_log(folder / "shop.db") as log:
        make_streams(log, plan(shop.app))
        with Producer(log) as producer:
            for n in range(count):
                producer.send("orders", shop.Order(f"u{n % 3}", n))


@pytest.mark.row("F10", engine="embedded")
@pytest.mark.row("F14", engine="embedded")
@pytest.mark.row("H7", engine="embedded")
@pytest.mark.timeout(600)
def test_run_until_idle_then_look(shop: Path) -> None:
    """One story, since each start of Spark takes a while."""
    send(shop, 300)
    done = penstock(shop, "run", "shop.py", "--until-idle", "--json")
    assert done.returncode == 0, done.stderr
    queries = json.loads(done.stdout.splitlines()[-1])["queries"]
    assert {q["name"]: q["rows_in"] for q in queries} == {"add_up": 300, "counts": 300}
    assert "WARN" not in done.stderr
    assert "INFO" not in done.stderr

    listed = penstock(shop, "agent", "list", "--json")
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    mine = [row for row in rows if row["agent"] == "add_up"]
    assert [row["partition"] for row in mine] == [0, 1]
    assert sum(row["offset"] for row in mine) == 300
    assert {(row["lag"], row["state"]) for row in rows} == {(0, "not running")}
    assert any(":" in row["worker"] for row in mine)

    read = penstock(shop, "read", "_system.metrics", "--json")
    metrics = [json.loads(line)["data"] for line in read.stdout.splitlines()]
    hops = {m["labels"]["query"]: m["value"] for m in metrics if m["name"] == "query.hop_ms"}
    assert set(hops) == {"add_up", "counts"}
    assert all(value > 0 for value in hops.values())
    for query in ("add_up", "counts"):
        rows_in = [
            m["value"] for m in metrics
            if m["name"] == "query.rows_in" and m["labels"]["query"] == query
        ]  # fmt: skip
        assert sum(rows_in) == 300

    asked = penstock(shop, "reset", "shop.py", "counts", "--output", "clear")
    assert asked.returncode == 2
    assert "this would empty counts. Nothing was changed: use --yes" in asked.stderr
    both = penstock(shop, "reset", "shop.py", "add_up+counts", "--from", "latest")
    assert sorted(both.stdout.splitlines()) == [
        f"reset {name} to latest" for name in ("add_up", "counts")
    ]
    assert (
        penstock(shop, "reset", "shop.py", "counts", "--output", "clear", "--yes").returncode == 0
    )
    assert penstock(shop, "reset", "shop.py", "add_up", "--from", "latest").returncode == 0
    again = penstock(shop, "run", "shop.py", "--until-idle")
    assert again.returncode == 0, again.stderr
    with open_log(shop / "shop.db") as log:
        counts = {k.decode(): v.count for k, v in Table[Any](log, "counts").items()}
        totals = {k.decode(): v.value for k, v in Table[Any](log, "totals").items()}
    assert counts == {"u0": 100, "u1": 100, "u2": 100}
    assert totals == {f"u{u}": sum(range(u, 300, 3)) for u in range(3)}, "read once, not twice"


@pytest.mark.timeout(300)
def test_a_signal_ends_it_in_order(shop: Path) -> None:
    """And what is seen of it meanwhile, from outside and in its output."""
    stop = threading.Event()
    send(shop, 10)
    command = [
        sys.executable, "-m", "penstock.cli", "run", "shop.py", "--log", "shop.db", "--only",
        "add_up",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=shop, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as runner:
        with open_log(shop / "shop.db") as log:
            wait_until(lambda: Table(log, "totals").get("u1"), 120, "a total")

            def states() -> set[str]:
                return {row.state for row in agent_rows(log)}

            wait_until(lambda: states() == {"running"}, 30, "the runner being seen")
            stop.wait(LINES_S)  # a line for each query, where there is no terminal
            runner.send_signal(signal.SIGTERM)
            _, told = runner.communicate(timeout=60)
            assert states() == {"not running"}
        assert runner.returncode == 0, told
    assert "waiting for each query to finish its batch" in told
    assert re.search(r"add_up: running, [\d,]+ events/s, lag 0, batch [\d,]+ ms, hop", told), told
    assert "Traceback" not in told


def test_mistakes_are_usage_errors(shop: Path, run: Run) -> None:
    for arguments, message in (
        (["run", "nothing.py"], "there is no file nothing.py"),
        (["run", "nothing"], "there is no module nothing"),
        (["run", "shop.py:nobody"], "has no app 'nobody'"),
        (
            ["run", "shop.py", "--only", "nobody"],
            "has no definition nobody: it defines add_up, counts",
        ),
        (["reset", "shop.py", "nobody"], "has no definition nobody"),
        (["reset", "shop.py", "add_up+nobody"], "has no definition nobody"),
        (["run", "shop.py", "--setting", "x"], "write NAME=VALUE"),
        (["run", "shop.py", "--only", "ad_up"], "did you mean add_up?"),
        (["reset", "shop.py", "count"], "did you mean counts?"),
    ):
        done = run(*arguments, "--log", "shop.db")
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (shop / "shop.db").exists()


def load_anew(module: Path) -> App:
    sys.modules.pop(module.stem, None)
    try:
        return load_app(str(module))
    finally:
        sys.modules.pop(module.stem, None)


def test_a_definition_is_renamed_or_forgotten(tmp_path: Path, run: Run) -> None:
    module = tmp_path / "shop.py"
    before = SHOP.partition("@app.derive_table")[0]
    after = before.replace("def add_up", "def spend")
    module.write_text(before)
    app = load_anew(module)
    orders, record = app.streams["orders"], cast(Any, app.streams["orders"].record)
    with AppTest(app, tmp_path) as test:
        test.send(orders, *(record(user="ada", amount=n) for n in range(5)))
        test.until_idle()
    there = ("--log", "test.db")
    still = run("rename", "shop.py", "other", "add_up", *there)
    assert (still.returncode, "has never run a definition other" in still.stderr) == (2, True)
    module.write_text(after)
    refused = run("run", "shop.py", *there)
    assert (refused.returncode, "`penstock rename APP add_up spend`" in refused.stderr) == (2, True)
    done = run("rename", "shop.py", "add_up", "spend", "--json", *there)
    assert json.loads(done.stdout) == {"app": "shop", "old": "add_up", "new": "spend", "timers": 0}
    with AppTest(load_anew(module), tmp_path) as test:
        test.until_idle()
        assert test.table(test.app.tables["totals"]) == {"ada": 10}
    module.write_text(before)
    asked = run("reset", "shop.py", "spend", "--output", "clear", *there)
    assert (asked.returncode, "would empty totals" in asked.stderr) == (2, True)
    done = run("reset", "shop.py", "spend", "--output", "clear", "--yes", *there)
    assert done.stdout == "discarded spend; emptied totals\n"
    with AppTest(load_anew(module), tmp_path) as test:
        test.until_idle()
        assert test.table(test.app.tables["totals"]) == {"ada": 10}


def test_the_live_view_has_a_line_for_each_query(tmp_path: Path) -> None:
    module = tmp_path / "shop.py"
    module.write_text(SHOP.partition("@app.derive_table")[0])
    app = load_app(str(module))
    with AppTest(app, tmp_path) as run:
        record = app.streams["orders"].record
        assert record is not None
        run.send(app.streams["orders"], record(user="ada", amount=3))
        run.until_idle()
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(view(run.runner))
        shown = console.export_text()
    assert re.search(r"query +state +in +out +events/s +lag +batch +hop", shown)
    assert re.search(r"add_up +\w+ +1 +\d+ ", shown), shown


@pytest.mark.parametrize(
    ("master", "why"),
    [
        ("sparkk://x:1", "Could not parse Master URL"),
        ("spark://127.0.0.1:1", "no Spark master answers at spark://127.0.0.1:1"),
    ],
)
def test_a_wrong_master_says_so(shop: Path, master: str, why: str) -> None:
    done = penstock(shop, "run", "shop.py", "--master", master)
    assert done.returncode != 0
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_java_home_says_so(shop: Path, tmp_path: Path) -> None:
    done = penstock(shop, "run", "shop.py", environment={"JAVA_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert f"JAVA_HOME is {tmp_path}, but there is no program" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_java_that_does_not_run_says_why(shop: Path, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'Error: this Java is too old' >&2\nexit 1\n")
    java.chmod(0o755)
    done = penstock(shop, "run", "shop.py", environment={"JAVA_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert "Spark cannot start: Error: this Java is too old" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_module_shows_its_own_traceback(shop: Path) -> None:
    (shop / "broken.py").write_text("import penstock\n1 / 0\n")
    done = penstock(shop, "run", "broken.py")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert "broken.py" in done.stderr
    assert "importlib" not in done.stderr
