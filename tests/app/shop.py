"""The app that the tests of agents vary, and what they send to it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from penstock import (
    App,
    Entry,
    Record,
)

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Order(Record):
    user: str
    item: str
    amount: int = 1


class Alert(Record):
    user: str
    item: str


class Note(Record):
    text: str


class Shop:
    """The app that most of these tests vary."""

    def __init__(self, partitions: int = 2) -> None:
        self.app = App("shop")
        self.orders = self.app.stream("orders", Order, key="user", partitions=partitions)
        self.alerts = self.app.stream("alerts", Alert, key="user")
        self.seen = self.app.table("seen", value=set[str])

        @self.app.agent(self.orders, state=self.seen, to=self.alerts)
        def first_seen(order: Order, seen: Entry[set[str]]) -> Iterator[Alert]:
            if order.item not in seen.value:
                seen.value.add(order.item)
                yield Alert(order.user, order.item)


def some_orders(count: int) -> list[Order]:
    return [Order(f"u{n % 7}", f"i{n % 5}", n) for n in range(count)]
