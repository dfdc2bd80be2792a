"""Two runners of an app on Spark: the first stands still as a whole, and wakes up too late."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import penstock
from penstock import Log, Producer, Table
from penstock.app.declaring.plan import plan
from penstock.app.running.streams import make_streams
from penstock.testing.processes import SparkProcess, processes_of, wait_until
from tests.spark.standing import Number, app

LEASE_MS = 5_000
KEYS = 10


class Program(SparkProcess):
    def __init__(self, log: str, folder: Path, name: str) -> None:
        given = [log, str(folder / "checkpoints"), str(LEASE_MS)]
        self.out = folder / f"{name}.txt"
        super().__init__([sys.executable, "-m", "tests.spark.standing", *given], output=self.out)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.told() or not self.is_running(), 120, text)
        assert text in self.told(), self.told()

    def told(self) -> str:
        return self.out.read_text("utf-8") if self.out.exists() else ""

    def signal_all(self, number: signal.Signals) -> None:
        for pid in (self.process.pid, *(pid for pid, _ in processes_of(self.process.pid))):
            with contextlib.suppress(ProcessLookupError):  # a worker may end at any moment
                os.kill(pid, number)


def send(log: Log, count: int) -> None:
    with Producer(log) as producer:
        for n in range(count):
            producer.send("numbers", Number(f"k{n % KEYS}", 1))


def wait_for_counts(log: Log, sent: int) -> None:
    def found() -> list[list[int]]:
        kept = []
        for name, field in (("totals", "value"), ("counts", "count")):
            table: Table[Any] = Table(log, name)
            entries = [table.get(f"k{n}") for n in range(KEYS)]
            kept.append([0 if e is None else int(cast(Any, getattr(e, field))) for e in entries])
        return kept

    wanted = [[sent // KEYS] * KEYS] * 2
    wait_until(lambda: found() == wanted or max(map(max, found())) > sent // KEYS, 120, "counts")
    assert found() == wanted


@pytest.mark.row("X12", engine="embedded")
@pytest.mark.timeout(600)
def test_a_runner_that_stood_still_does_not_take_its_queries_back(tmp_path: Path) -> None:
    """Its workers are killed before it goes on, so that its queries fail, and would start again."""
    url = str(tmp_path / "log.db")
    with penstock.open(url, create=True) as log:
        make_streams(log, plan(app))
        with Program(url, tmp_path, "first") as first, Program(url, tmp_path, "second") as second:
            begun = "starting the queries"
            wait_until(lambda: begun in first.told() + second.told(), 120, "the start")
            at_work, waiting = (first, second) if begun in first.told() else (second, first)
            waiting.wait_for("standing by for add, counts: run by process")
            send(log, 200)
            wait_for_counts(log, 200)
            at_work.signal_all(signal.SIGSTOP)
            waiting.wait_for("starting the queries")
            send(log, 300)
            wait_for_counts(log, 500)
            for pid in at_work._members("worker"):
                os.kill(pid, signal.SIGKILL)
            at_work.signal_all(signal.SIGCONT)
            send(log, 200)
            assert at_work.wait(120) == 1, at_work.told()
            assert "claim_lost: app/standing: " in at_work.told()
            assert f"process {waiting.process.pid} on " in at_work.told()
            wait_for_counts(log, 700)
            waiting.process.send_signal(signal.SIGTERM)
            assert waiting.wait(60) == 0, waiting.told()
            assert "restarts: 0" in waiting.told()
