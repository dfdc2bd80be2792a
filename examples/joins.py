"""The three joins: stream and table, table and table, stream and stream.

    python examples/joins.py

Expected output:

    order 1 of Ada from Paris
    order 2 of nobody we know
    Ada (ada) has 20 points
    order 1 was paid with 30
    order 2 was not paid
"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
from pathlib import Path
from typing import Any

import penstock
from penstock.spark import running

app = penstock.App("joins")


class Order(penstock.Record):
    order: int
    user: str
    at: dt.datetime


class Payment(penstock.Record):
    order: int
    paid: int
    at: dt.datetime


class Customer(penstock.Record):
    name: str
    city: str


orders = app.stream("orders", Order, key="user", time="at", watermark="1 minute")
payments = app.stream("payments", Payment, key="order", time="at", watermark="1 minute")
customers = app.table("customers", value=Customer)
points = app.table("points", value=int)

enriched = orders.lookup(customers)
profiles = customers.join(points, how="left")
paid = orders.join(payments, on="order", within="1 hour", how="left")


def at(minutes: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC) + dt.timedelta(minutes=minutes)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        penstock.open(os.environ.get("PENSTOCK_LOG") or Path(folder, "joins.db")) as log,
    ):
        with (
            running(app, log, checkpoints=Path(folder, "spark")) as runner,
            penstock.Producer(log) as producer,
        ):
            producer.send("customers", Customer("Ada", "Paris"), key="ada")
            producer.send("points", {"value": 20}, key="ada")
            producer.flush()
            producer.send("orders", Order(1, "ada", at(0)))
            producer.send("orders", Order(2, "bob", at(1)))
            producer.send("payments", Payment(1, 30, at(2)))
            producer.flush()
            runner.until_idle(120)
            # Two hours later: order 2 can no longer be paid in time.
            producer.send("orders", Order(3, "eve", at(120)))
            producer.send("payments", Payment(3, 0, at(120)))
            producer.flush()
            runner.until_idle(120)
        for event in penstock.read_events(log, enriched.name):
            row: Any = event.data
            if row.order < 3:
                known = row.customers
                whose = f"{known.name} from {known.city}" if known else "nobody we know"
                print(f"order {row.order} of {whose}")
        for key, row in penstock.Table[Any](log, profiles.name).items():
            print(f"{row.customers.name} ({key.decode()}) has {row.points} points")
        pairs: list[Any] = [event.data for event in penstock.read_events(log, paid.name)]
        for row in sorted(pairs, key=lambda row: row.order)[:2]:
            print(f"order {row.order} was {f'paid with {row.paid}' if row.paid else 'not paid'}")


if __name__ == "__main__":
    main()
