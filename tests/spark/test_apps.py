"""Apps on Spark: DataFrames, windows and joins, with the result one expects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock import App, AppStream, Context, Entry, Record, hopping, session, tumbling
from penstock.testing.apps import AppTest
from tests.spark.shop import START, Alert, Customer, Order, Payment, Shop, at, entries, rows


def test_an_app_from_stream_to_stream(spark: SparkSession, tmp_path: Path) -> None:
    """Derived stream → agent with a table → derived table → derived stream of its changes."""
    shop = Shop()
    app, orders = shop.app, shop.orders
    alerts = app.stream("alerts", Alert, key="user")
    spent = app.table("spent", value=int, default=0)

    @app.derive(orders, key="user", record=Order, time="at")
    def big(orders: DataFrame) -> DataFrame:
        return orders.where("amount >= 10")

    @app.agent(big, state=spent, to=alerts)
    def watch(order: Order, spent: Entry[int], context: Context) -> Iterator[Alert]:
        spent.value += order.amount
        yield Alert(order.user, spent.value)

    @app.derive_table(alerts, key="user")
    def highest(alerts: DataFrame) -> DataFrame:
        return alerts.groupBy("user").agg(F.max("total").alias("total"))

    @app.derive(highest.changes, key="user")
    def rising(changes: DataFrame) -> DataFrame:
        return changes.select("user", "total")

    with AppTest(app, tmp_path, spark) as run:
        run.send(orders, *[Order(f"u{n % 3}", "tea", n, at(n)) for n in range(20)])
        run.until_idle()
        expected: dict[str, int] = {}
        for n in range(10, 20):
            expected[f"u{n % 3}"] = expected.get(f"u{n % 3}", 0) + n
        assert len(rows(run, big)) == 10
        assert entries(run, spent) == expected
        assert {k: v.total for k, v in entries(run, highest).items()} == expected
        last = {row.user: row.total for row in rows(run, rising)}
        assert last == expected


@pytest.mark.row("F7", engine="embedded")
def test_lookup(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    customers = shop.app.table("customers", value=Customer)
    wide = shop.orders.lookup(customers)
    known = shop.orders.lookup(customers, how="inner", name="known")
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(customers, Customer("Ada", "Paris"), key="ada")
        run.send(shop.orders, Order("ada", "tea", 1, at(0)), Order("bob", "jam", 2, at(1)))
        run.until_idle()
        found = {row.user: row.customers for row in rows(run, wide)}
        assert found["ada"].city == "Paris"
        assert found["bob"] is None
        assert [row.user for row in rows(run, known)] == ["ada"]


@pytest.mark.row("F7", engine="embedded")
def test_a_table_as_a_data_frame_beside_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    customers = shop.app.table("customers", value=Customer)

    @shop.app.derive(shop.orders, customers, key="city")
    def cities(orders: DataFrame, customers: DataFrame) -> DataFrame:
        keyed = customers.select(F.col("_key").cast("string").alias("user"), "city")
        return orders.join(keyed, "user").select("city", "amount")

    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(customers, Customer("Ada", "Paris"), key="ada")
        run.send(shop.orders, Order("ada", "tea", 7, at(0)), Order("bob", "jam", 2, at(1)))
        run.until_idle()
        run.send(customers, Customer("Ada", "Rome"), key="ada")
        run.send(shop.orders, Order("ada", "tea", 8, at(2)))
        run.until_idle()
        assert [(r.city, r.amount) for r in rows(run, cities)] == [("Paris", 7), ("Rome", 8)]


@pytest.mark.row("F6", engine="embedded")
@pytest.mark.parametrize("how", ["inner", "left", "right", "outer"])
def test_a_join_of_tables_follows_both_sides(tmp_path: Path, how: str) -> None:
    app = App("crm")
    customers = app.table("customers", value=Customer)
    balance = app.table("balance", value=int)
    joined = customers.join(balance, how=how)  # type: ignore[arg-type]
    ada, bob = Customer("Ada", "Paris"), Customer("Bob", "Rome")
    with AppTest(app, tmp_path) as run:

        def expect(people: dict[str, Customer], money: dict[str, int]) -> None:
            run.until_idle()
            keys = {
                "inner": people.keys() & money.keys(),
                "left": people.keys(),
                "right": money.keys(),
                "outer": people.keys() | money.keys(),
            }[how]
            found = {k: (v.customers, v.balance) for k, v in entries(run, joined).items()}
            assert {k: (c and c.name, b) for k, (c, b) in found.items()} == {
                k: (people[k].name if k in people else None, money.get(k)) for k in keys
            }

        run.send(customers, ada, key="ada")
        expect({"ada": ada}, {})
        run.send(balance, {"value": 5}, key="ada")
        run.send(balance, {"value": 7}, key="eve")
        expect({"ada": ada}, {"ada": 5, "eve": 7})
        run.send(customers, bob, key="bob")
        run.send(balance, {"value": 6}, key="ada")
        expect({"ada": ada, "bob": bob}, {"ada": 6, "eve": 7})
        run.send(customers, None, key="ada")
        expect({"bob": bob}, {"ada": 6, "eve": 7})
        run.send(balance, None, key="eve")
        run.send(customers, ada, key="ada")
        expect({"ada": ada, "bob": bob}, {"ada": 6})


@pytest.mark.row("F5", engine="embedded")
@pytest.mark.parametrize("how", ["inner", "left", "outer"])
def test_a_join_of_streams(spark: SparkSession, tmp_path: Path, how: str) -> None:
    shop = Shop()
    payments = shop.app.stream("payments", Payment, key="user", time="at", watermark="10 seconds")
    paid = shop.orders.join(payments, on="user", within="5 seconds", how=how)  # type: ignore[arg-type]
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("ada", "tea", 1, at(0)), Order("bob", "jam", 2, at(1)))
        run.send(payments, Payment("ada", 10, at(3)), Payment("eve", 20, at(2)))
        run.until_idle()
        assert [(r.user, r.item, r.paid) for r in rows(run, paid)] == [("ada", "tea", 10)]
        # Much later events of others: whoever has no partner by now will not get one.
        for second in (100, 200):
            run.send(shop.orders, Order("zoe", "x", 0, at(second)))
            run.send(payments, Payment("yan", 0, at(second)))
            run.until_idle()
        found = {(r.user, r.item, r.paid) for r in rows(run, paid)} - {
            ("zoe", "x", None), ("yan", None, 0),
        }  # fmt: skip
        expected: set[tuple[str, str | None, int | None]] = {("ada", "tea", 10)}
        if how in ("left", "outer"):
            expected.add(("bob", "jam", None))
        if how == "outer":
            expected.add(("eve", None, 20))
        assert found == expected


def windows_app(kind: str) -> tuple[Shop, AppStream[Any], AppStream[Order]]:
    shop = Shop()
    late = shop.app.stream("late", Order, key="user", time="at")
    cut = {
        "tumbling": tumbling("10 seconds"),
        "hopping": hopping("10 seconds", "5 seconds"),
        "session": session("10 seconds"),
    }[kind]

    @shop.app.derive(shop.orders, key="item", window=cut, late=late)
    def closed(orders: DataFrame, window: Column) -> DataFrame:
        return orders.groupBy("item", window).agg(F.sum("amount").alias("sum"))

    return shop, closed, late


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tumbling", [(0, 10, 3), (10, 20, 4)]),
        ("hopping", [(-5, 5, 1), (0, 10, 3), (5, 15, 6), (10, 20, 4), (15, 25, 0)]),
        ("session", [(1, 22, 7)]),
    ],
)
def test_windows_close_by_events_of_other_keys(
    spark: SparkSession, tmp_path: Path, kind: str, expected: list[tuple[int, int, int]]
) -> None:
    shop, closed, late = windows_app(kind)
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(
            shop.orders,
            Order("a", "tea", 1, at(1)), Order("b", "tea", 2, at(7)), Order("a", "tea", 4, at(12)),
        )  # fmt: skip
        run.until_idle()
        assert rows(run, closed) == []
        run.send(shop.orders, Order("z", "other", 0, at(100)))
        run.until_idle()
        found = sorted(
            (
                round((row.window.start - START).total_seconds()),
                round((row.window.end - START).total_seconds()),
                row.sum,
            )
            for row in rows(run, closed)
            if row.item == "tea"
        )
        assert found == [row for row in expected if row[2]]
        assert rows(run, late) == []
        run.send(shop.orders, Order("a", "tea", 99, at(2)), Order("a", "tea", 5, at(95)))
        run.until_idle()
        assert [row.amount for row in rows(run, late)] == [99]


def test_a_windowed_table_shows_open_windows(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.derive_table(shop.orders, key=["item", "window"], window=tumbling("10 seconds"))
    def counts(orders: DataFrame, window: Column) -> DataFrame:
        return orders.groupBy("item", window).count()

    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 1, at(1)))
        run.until_idle()
        run.send(shop.orders, Order("a", "tea", 1, at(2)), Order("a", "tea", 1, at(11)))
        run.until_idle()
        assert {k: v.count for k, v in entries(run, counts).items()} == {
            '["tea","2026-01-01T00:00:00.000Z"]': 2,
            '["tea","2026-01-01T00:00:10.000Z"]': 1,
        }


def test_uuids_differ_from_batch_to_batch(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.derive(shop.orders, key="user")
    def marked(orders: DataFrame) -> DataFrame:
        return orders.select("user", F.expr("uuid()").alias("mark"))

    with AppTest(shop.app, tmp_path, spark) as run:
        for n in range(3):
            run.send(shop.orders, Order("ada", "tea", n, at(n)))
            run.until_idle()
        assert len({row.mark for row in rows(run, marked)}) == 3


def test_late_events_that_are_only_counted(spark: SparkSession, tmp_path: Path) -> None:
    """In more batches than Spark remembers."""
    shop = Shop()

    @shop.app.derive(shop.orders, key="item", window=tumbling("10 seconds"))
    def closed(orders: DataFrame, window: Column) -> DataFrame:
        return orders.groupBy("item", window).agg(F.sum("amount").alias("sum"))

    with AppTest(shop.app, tmp_path, spark) as run:
        for seconds in (1, 100, *range(2, 10)):
            run.send(shop.orders, Order("a", "tea", 1, at(seconds)))
            run.until_idle()
        assert run.statuses()["closed"].rows_late == 8


def test_late_events_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    shop, _, late = windows_app("tumbling")
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 1, at(1)))
        run.until_idle()
        run.send(shop.orders, Order("a", "tea", 1, at(100)))
        run.until_idle()
        run.send(shop.orders, Order("a", "tea", 1, at(2)), Order("a", "tea", 1, at(3)))
        run.until_idle()
        assert len(rows(run, late)) == 2
        assert run.statuses()["closed"].rows_late == 2


def test_a_window_that_ends_at_the_watermark_is_closed(spark: SparkSession, tmp_path: Path) -> None:
    shop, closed, late = windows_app("tumbling")
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 1, at(1)))
        run.until_idle()
        run.send(shop.orders, Order("a", "tea", 1, at(100)))  # the watermark is at 90
        run.until_idle()
        run.send(shop.orders, Order("a", "tea", 7, at(89)), Order("a", "tea", 8, at(90)))
        run.until_idle()
        assert [row.amount for row in rows(run, late)] == [7]
        run.send(shop.orders, Order("a", "tea", 1, at(200)))
        run.until_idle()
        assert sorted(row.sum for row in rows(run, closed)) == [1, 1, 8]


def test_the_latest_row_is_the_one_that_was_committed_last(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Whatever partitions the rows of a key came from."""
    shop = Shop()

    @shop.app.derive_table(shop.orders, key="item")
    def latest(orders: DataFrame) -> DataFrame:
        return orders.select("item", "user", "amount")

    @shop.app.derive(shop.orders, key="item")
    def by_item(orders: DataFrame) -> DataFrame:
        return orders.select("item", "amount")

    with AppTest(shop.app, tmp_path, spark) as run:
        run.runner.stop()
        for n in range(60):
            run.send(shop.orders, Order(f"u{n * 7 % 5}", f"i{n % 3}", n, at(n)))
        run.restart()
        run.until_idle()
        found = {item: row.amount for item, row in entries(run, latest).items()}
        assert found == {"i0": 57, "i1": 58, "i2": 59}
        for item in found:
            amounts = [row.amount for row in rows(run, by_item) if row.item == item]
            assert amounts == sorted(amounts)


def test_duplicates_within_a_watermark(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.derive(shop.orders, key="user")
    def once(orders: DataFrame) -> DataFrame:
        return orders.dropDuplicatesWithinWatermark(["user", "item"]).select("user", "item")

    with AppTest(shop.app, tmp_path, spark) as run:
        for item in ("tea", "jam", "tea"):
            run.send(shop.orders, Order("ada", item, 1, at(1)))
            run.until_idle()
        assert [(row.user, row.item) for row in rows(run, once)] == [("ada", "tea"), ("ada", "jam")]


class OldOrder(Record):
    user: str
    amount: int


class NewOrder(Record):
    user: str
    amount: int
    note: str | None = None


def test_an_older_version_of_an_app_starts_again(spark: SparkSession, tmp_path: Path) -> None:
    def build(record: type[Record]) -> App:
        app = App("shop")
        orders = app.stream("orders", record, key="user")

        @app.derive(orders, key="user")
        def double(orders: DataFrame) -> DataFrame:
            return orders.select("user", (F.col("amount") * 2).alias("amount"))

        @app.derive_table(orders, key="user")
        def total(orders: DataFrame) -> DataFrame:
            return orders.groupBy("user").agg(F.sum("amount").alias("total"))

        return app

    apps = [build(OldOrder), build(NewOrder), build(OldOrder)]
    sent = [OldOrder("ada", 1), NewOrder("ada", 2, "new"), OldOrder("ada", 4)]
    for app, order in zip(apps, sent, strict=True):
        with AppTest(app, tmp_path, spark) as run:
            run.send(app.streams["orders"], order)
            run.until_idle()
            last = entries(run, app.tables["total"])["ada"].total
            doubled = [row.amount for row in rows(run, app.streams["double"])]
    assert (last, doubled) == (7, [2, 4, 8])
