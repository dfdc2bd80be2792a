"""An app that feeds a sink, and a program that runs it without Spark, to be killed."""

from __future__ import annotations

import os
import sys

from pyspark.sql import DataFrame

from penstock import App, Record
from penstock import open as open_log
from penstock.app.declaring.plan import plan
from penstock.app.running.backends import InlineBackend
from penstock.app.running.building import build
from penstock.app.running.query import QueryLimits
from penstock.app.running.runner import RunnerOptions


class Number(Record):
    key: str
    n: int


app = App("pushing")
numbers = app.stream("numbers", Number, key="key", partitions=3)


@app.derive(numbers, key="key", record=Number)
def even(numbers: DataFrame) -> DataFrame:
    return numbers.where("n % 2 = 0")


workers = int(os.environ.get("SINK_WORKERS") or 2)
address = os.environ.get("SINK_ADDRESS") or "127.0.0.1:9"
app.sink(numbers, address, workers=workers, timeout="10 seconds")
app.sink(even, address, workers=1, timeout="10 seconds")


def main(path: str) -> None:
    """Run the sink of the numbers until everything is through.

    Nothing else is written meanwhile: one that is stopped must not hold the log's lock.
    """
    with open_log(path, upkeep_interval_ms=0) as log:
        runner = build(
            log, plan(app).only(["numbers_sink"]), InlineBackend(),
            limits=QueryLimits(batch_rows_max=200),
            options=RunnerOptions(backoff_ms=20, metrics_interval_ms=0),
        )  # fmt: skip
        runner.start()
        try:
            assert runner.until_idle(60), runner.failure()
        finally:
            runner.stop()


if __name__ == "__main__":
    main(sys.argv[1])
