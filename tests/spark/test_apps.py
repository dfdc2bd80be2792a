"""Apps on Spark: DataFrames, windows and joins, with the result one expects."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock import App, AppStream, AppTable, Context, Entry, Record, hopping, session, tumbling
from penstock.errors import AppError, PlanChangedError
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


# Restarts and refusals


def sums(shop: Shop, column: str = "item") -> None:
    @shop.app.derive_table(shop.orders, key=column)
    def total(orders: DataFrame) -> DataFrame:
        return orders.groupBy(column).agg(F.sum("amount").alias("total"))


def test_state_survives_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    sums(shop)
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 5, at(1)))
        run.until_idle()
        run.restart()
        run.send(shop.orders, Order("a", "tea", 6, at(2)))
        run.until_idle()
        assert {k: v.total for k, v in entries(run, shop.app.tables["total"]).items()} == {
            "tea": 11
        }


def test_a_changed_plan_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    sums(shop)
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 5, at(1)))
        run.until_idle()
    changed = Shop()

    @changed.app.derive_table(changed.orders, key="item")
    def total(orders: DataFrame) -> DataFrame:
        return orders.groupBy("item").agg(F.sum(F.col("amount") * 2).alias("total"))

    with pytest.raises(PlanChangedError, match=r"(?s)what it keeps has changed.*penstock reset"):
        AppTest(changed.app, tmp_path, spark).__enter__()


def test_a_missing_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    sums(shop)
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 5, at(1)))
        run.until_idle()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(PlanChangedError, match=r"(?s)checkpoint is not in.*penstock reset"):
        AppTest(shop.app, tmp_path, spark).__enter__()


def test_the_users_error_is_shown_not_sparks(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @F.udf("long")
    def half(amount):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("this is mine")

    @shop.app.derive(shop.orders, key="user")
    def halves(orders: DataFrame) -> DataFrame:
        return orders.select("user", half("amount").alias("half"))

    with AppTest(shop.app, tmp_path, spark, tries_max=1) as run:
        run.send(shop.orders, Order("a", "tea", 5, at(1)))
        failure = str(run.until_failed())
    assert "ZeroDivisionError: this is mine" in failure
    assert "test_apps.py" in failure
    assert "py4j" not in failure.lower()
    assert "pyspark" not in failure


def test_a_wrong_column_is_found_before_anything_runs(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.derive(shop.orders, key="user")
    def wrong(orders: DataFrame) -> DataFrame:
        return orders.select("nobody")

    with pytest.raises(AppError, match=r"test_apps\.py:\d+: wrong: .*nobody"):
        AppTest(shop.app, tmp_path, spark).__enter__()


def test_a_key_that_is_no_column(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.derive(shop.orders, key="nobody")
    def wrong(orders: DataFrame) -> DataFrame:
        return orders.select("user")

    with pytest.raises(AppError, match="has the key nobody, which is no column"):
        AppTest(shop.app, tmp_path, spark).__enter__()


def test_columns_that_are_named_but_not_needed(spark: SparkSession, tmp_path: Path) -> None:
    """Columns are left out where nobody looks at them; naming them still works."""
    shop = Shop()

    @shop.app.derive(shop.orders, key="user")
    def narrow(orders: DataFrame) -> DataFrame:
        return orders.select("user", "item", "amount").select("user", "amount")

    @shop.app.derive_table(shop.orders, key="user")
    def sums(orders: DataFrame) -> DataFrame:
        louder = orders.withColumn("loud", F.upper("item"))
        return louder.groupBy("user").agg(F.sum("amount").alias("total"))

    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("ada", "tea", 5, at(1)), Order("ada", "jam", 6, at(2)))
        run.until_idle()
        assert [(row.user, row.amount) for row in rows(run, narrow)] == [("ada", 5), ("ada", 6)]
        assert entries(run, sums)["ada"].total == 11


def test_columns_that_only_a_subquery_looks_at(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    limits = shop.app.table("limits", value=int)

    @shop.app.derive(shop.orders, limits, key="user")
    def small(orders: DataFrame, limits: DataFrame) -> DataFrame:
        highest = limits.select(F.max("value")).scalar()
        return orders.where(F.col("amount") <= highest).select("user", "amount")

    with pytest.raises(AppError, match="keeps state, and reads table limits"):
        AppTest(shop.app, tmp_path, spark).__enter__()


def test_a_join_that_would_tell_of_a_table_each_batch(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    names = shop.app.table("names", value=Customer)

    @shop.app.derive(shop.orders, names, key="name")
    def everyone(orders: DataFrame, names: DataFrame) -> DataFrame:
        return names.join(orders, names.name == orders.user, "left").select("name", "amount")

    with pytest.raises(AppError, match="join the other way round"):
        AppTest(shop.app, tmp_path, spark).__enter__()


def test_a_stream_joined_with_itself_keeps_state(spark: SparkSession, tmp_path: Path) -> None:
    """Columns that only one side looks at are there on both."""
    shop = Shop()

    @shop.app.derive(shop.orders, key="user")
    def pairs(orders: DataFrame) -> DataFrame:
        one, other = orders.alias("one"), orders.alias("other")
        same = F.col("one.user") == F.col("other.user")
        later = F.col("one.amount") < F.col("other.amount")
        return one.join(other, same & later).select(
            "one.user",
            F.col("one.amount").alias("first"),
            F.col("other.amount").alias("second"),
            F.col("other.item").alias("item"),
        )

    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("ada", "tea", 1, at(1)))
        run.until_idle()
        run.send(shop.orders, Order("ada", "jam", 2, at(2)))
        run.until_idle()
        assert [(row.first, row.second, row.item) for row in rows(run, pairs)] == [(1, 2, "jam")]


@pytest.mark.parametrize("turned", [False, True])
def test_sources_in_another_order_than_declared(
    spark: SparkSession, tmp_path: Path, turned: bool
) -> None:
    def build(swap: bool) -> tuple[App, AppStream[Order], AppStream[Order], AppTable[object]]:
        app = App("two")
        first = app.stream("first", Order, key="user", time="at", partitions=2)
        second = app.stream("second", Order, key="user", time="at")

        @app.derive_table(first, second, key="user")
        def sums(first: DataFrame, second: DataFrame) -> DataFrame:
            both = second.union(first) if swap else first.union(second)
            return both.groupBy("user").agg(F.sum("amount").alias("total"))

        return app, first, second, sums

    app, first, second, sums = build(True)
    with AppTest(app, tmp_path, spark) as run:
        run.send(first, *[Order("ada", "x", n, at(n)) for n in range(10)])
        run.send(second, Order("ada", "y", 100, at(0)))
        run.until_idle()
        assert entries(run, sums)["ada"].total == 145
        run.send(second, Order("ada", "y", 100, at(0)))
        run.until_idle()
        assert entries(run, sums)["ada"].total == 245
    again = build(not turned)
    if turned:
        with pytest.raises(PlanChangedError, match="what it keeps has changed"):
            AppTest(again[0], tmp_path, spark).__enter__()
    else:
        with AppTest(again[0], tmp_path, spark) as run:
            run.send(again[1], Order("ada", "x", 5, at(20)))
            run.until_idle()
            assert entries(run, again[3])["ada"].total == 250


def test_an_old_copy_of_a_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    sums(shop)
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 5, at(1)))
        run.until_idle()
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 6, at(2)))
        run.until_idle()
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "copy").rename(tmp_path / "checkpoints")
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 7, at(3)))
        assert "older than what the log holds" in str(run.until_failed())


def test_state_must_come_out_the_same(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()
    names = shop.app.table("names", value=Customer)

    @shop.app.derive_table(shop.orders, names, key="city")
    def cities(orders: DataFrame, names: DataFrame) -> DataFrame:
        return orders.join(names.select("city")).groupBy("city").count()

    with pytest.raises(AppError, match="keeps state, and reads table names"):
        AppTest(shop.app, tmp_path, spark).__enter__()
    other = Shop()

    @other.app.derive_table(other.orders, key="user")
    def marks(orders: DataFrame) -> DataFrame:
        marked = orders.withColumn("mark", F.expr("uuid()"))
        return marked.groupBy("user").agg(F.max("mark").alias("mark"))

    with pytest.raises(AppError, match="something random"):
        AppTest(other.app, tmp_path, spark).__enter__()


def test_a_column_must_have_a_name(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.derive_table(shop.orders, key="user")
    def total(orders: DataFrame) -> DataFrame:
        return orders.groupBy("user").sum("amount")

    with pytest.raises(AppError, match=r"the column 'sum\(amount\)'.*alias"):
        AppTest(shop.app, tmp_path, spark).__enter__()


def test_a_fenced_query_gives_up(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever comes later has it; the older one does not take it back."""
    shop = Shop()

    @shop.app.derive(shop.orders, key="user")
    def copies(orders: DataFrame) -> DataFrame:
        return orders.select("user", "amount")

    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 5, at(1)))
        run.until_idle()
        old = run.runner
        run._start()
        for n in range(3):
            run.send(shop.orders, Order("a", "tea", n, at(n)))
            run.until_idle()
        while old.failure() is None:
            run.send(shop.orders, Order("a", "tea", 9, at(9)))
            run.until_idle()
        old.stop()
        count = len(run.events(shop.orders))
        assert len(rows(run, copies)) == count
        assert run.statuses()["copies"].state == "running"


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
