"""An app on Spark, as a program: an agent with its table, and one that Spark keeps state for."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from pyspark.sql import DataFrame

import penstock
from penstock import App, Entry, Record
from penstock.app.running.runner import RunnerOptions
from penstock.spark.running import running

app = App("standing")


class Number(Record):
    key: str
    value: int


numbers = app.stream("numbers", Number, key="key", partitions=2)
totals = app.table("totals", value=int, default=0)


@app.agent(numbers, state=totals)
def add(number: Number, total: Entry[int]) -> None:
    total.value += number.value


@app.derive_table(numbers, key="key")
def counts(numbers: DataFrame) -> DataFrame:
    return numbers.groupBy("key").count()


def main(url: str, checkpoints: str, lease_ms: int) -> int:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def tell(what: str) -> None:
        print(what, flush=True)

    with penstock.open(url) as log:
        with running(
            app, log, master="local[2]", checkpoints=Path(checkpoints), tell=tell, stop=stop,
            options=RunnerOptions(lease_ms=lease_ms),
        ) as runner:  # fmt: skip
            while not stop.wait(0.1) and not runner.is_over() and runner.failure() is None:
                pass
            tell(f"restarts: {sum(status.restarts for status in runner.statuses())}")
        failure = runner.failure()
        if failure is not None:
            tell(f"{failure.code}: {failure}")
        return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
