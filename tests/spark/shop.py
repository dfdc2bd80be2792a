"""What the tests of apps on Spark share: records, a shop, and ways to look at results."""

from __future__ import annotations

import datetime as dt
from typing import Any

from penstock import App, AppStream, AppTable, Record
from penstock.testing.apps import AppTest

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def rows(run: AppTest, stream: AppStream[object]) -> list[Any]:
    """Data whose class only Spark knows."""
    return run.events(stream)


def entries(run: AppTest, table: AppTable[object]) -> dict[Any, Any]:
    return run.table(table)


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


class Order(Record):
    user: str
    item: str
    amount: int
    at: dt.datetime


class Payment(Record):
    user: str
    paid: int
    at: dt.datetime


class Customer(Record):
    name: str
    city: str


class Alert(Record):
    user: str
    total: int


class Shop:
    def __init__(self) -> None:
        self.app = App("shop")
        self.orders = self.app.stream(
            "orders", Order, key="user", time="at", watermark="10 seconds", partitions=2
        )
