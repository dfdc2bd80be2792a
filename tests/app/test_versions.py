"""Two versions of an app, and two apps, on one log."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from penstock import App, Entry, Record
from penstock.errors import AppError
from penstock.testing.apps import AppTest


class OldOrder(Record):
    user: str
    amount: int


class Order(Record):
    user: str
    amount: int
    note: str | None = None


class Customer(Record):
    name: str


def build(record: type[Record]) -> App:
    app = App("shop")
    orders = app.stream("orders", record, key="user")
    customers = app.table("customers", value=Customer)
    spent = app.table("spent", value=int, default=0)
    orders.group_by("amount")
    orders.lookup(customers)

    @app.agent(orders, state=spent)
    def add(order, spent: Entry[int]) -> None:  # type: ignore[no-untyped-def]
        spent.value += order.amount

    return app


def test_an_older_version_starts_again_beside_what_a_newer_one_wrote(tmp_path: Path) -> None:
    old, new = build(OldOrder), build(Order)
    with AppTest(old, tmp_path) as run:
        run.send(old.streams["orders"], OldOrder("ada", 1))
        run.until_idle()
    with AppTest(new, tmp_path) as run:
        run.send(new.streams["orders"], Order("ada", 2, "new"))
        run.until_idle()
    with AppTest(old, tmp_path) as run:
        run.send(old.streams["orders"], OldOrder("ada", 4))
        run.until_idle()
        assert run.table(old.tables["spent"]) == {"ada": 7}
        assert run.events(old.streams["orders"]) == [OldOrder("ada", n) for n in (1, 2, 4)]
        for name in ("orders_by_amount", "orders_with_customers"):
            assert [e.amount for e in run.events(old.streams[name])] == [1, 2, 4]  # type: ignore[attr-defined]
    with AppTest(new, tmp_path) as run:
        run.until_idle()
        notes = [e.note for e in run.events(new.streams["orders"])]  # type: ignore[attr-defined]
        assert notes == [None, "new", None]


def test_a_newer_input_and_an_older_output(tmp_path: Path) -> None:
    """Only the input has been brought up to date, by somebody else."""
    old, new = build(OldOrder), App("other")
    orders = new.stream("orders", Order, key="user")
    with AppTest(old, tmp_path) as run:
        run.until_idle()
    with AppTest(new, tmp_path) as run:
        run.send(orders, Order("ada", 2, "new"))
    with AppTest(old, tmp_path) as run:
        run.until_idle()
        for name in ("orders_by_amount", "orders_with_customers"):
            assert [e.amount for e in run.events(old.streams[name])] == [2]  # type: ignore[attr-defined]


class Timed(Record):
    user: str
    at: dt.datetime
    sent: dt.datetime


def test_another_app_takes_nothing_away_from_a_stream(tmp_path: Path) -> None:
    first, second, third = App("first"), App("second"), App("third")
    first.stream("orders", Timed, key="user", time="at", partitions=3, retention_ms=10**9)
    second.stream("orders", Timed)
    third.stream("orders", Timed, time="sent")
    with AppTest(first, tmp_path) as run:
        before = run.log.stream("orders")
    with AppTest(second, tmp_path) as run:
        assert run.log.stream("orders") == before
    with pytest.raises(AppError, match=r"test_versions.py:\d+: .*its events from 'at'"):
        AppTest(third, tmp_path).__enter__()


def test_a_time_may_be_said_later(tmp_path: Path) -> None:
    first, second = App("first"), App("second")
    first.stream("orders", Timed)
    second.stream("orders", Timed, time="at")
    with AppTest(first, tmp_path), AppTest(second, tmp_path) as run:
        assert run.log.stream("orders").spec.time == "at"
