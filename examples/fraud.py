"""Fraud alert: cards that spend too much within a minute, and payments that arrived too late.

    python examples/fraud.py

Expected output:

    card 7: 950 in the minute from 12:00
    too late to be counted: card 9, 400
"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  the usual name

import penstock
from penstock.spark import running

app = penstock.App("fraud")


class Payment(penstock.Record):
    card: int
    amount: int
    at: dt.datetime


payments = app.stream("payments", Payment, key="card", time="at", watermark="10 seconds")
late = app.stream("late", Payment, key="card", time="at")


@app.derive(payments, key="card", window=penstock.tumbling("1 minute"), late=late)
def alerts(payments: DataFrame, window: Column) -> DataFrame:
    spent = payments.groupBy("card", window).agg(F.sum("amount").alias("spent"))
    return spent.where("spent > 500")


def payment(card: int, amount: int, seconds: int) -> Payment:
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    return Payment(card, amount, noon + dt.timedelta(seconds=seconds))


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        penstock.open(os.environ.get("PENSTOCK_LOG") or Path(folder, "fraud.db")) as log,
    ):
        with (
            running(app, log, checkpoints=Path(folder, "spark")) as runner,
            penstock.Producer(log) as producer,
        ):
            for sent in (payment(7, 450, 5), payment(7, 500, 50), payment(9, 499, 58)):
                producer.send("payments", sent)
            producer.flush()
            runner.until_idle(120)
            # A later payment of another card advances the watermark, and closes the minute.
            producer.send("payments", payment(8, 1, 180))
            producer.flush()
            runner.until_idle(120)
            producer.send("payments", payment(9, 400, 59))
            producer.flush()
            runner.until_idle(120)
        for event in penstock.read_events(log, "alerts"):
            row: Any = event.data
            print(f"card {row.card}: {row.spent} in the minute from {row.window.start:%H:%M}")
        for event in penstock.read_events(log, "late"):
            row = event.data
            print(f"too late to be counted: card {row.card}, {row.amount}")


if __name__ == "__main__":
    main()
