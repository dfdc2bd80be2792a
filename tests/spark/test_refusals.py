"""Apps on Spark that start again, and what is refused before it could go wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

import penstock
from penstock import App, AppStream, AppTable, CreateStream, DropStream, Producer, declare
from penstock import open as open_log
from penstock.errors import AppError, PlanChangedError, SparkGoneError, UnknownObjectError
from penstock.spark.failures import spark_alive, user_failure, worker_traceback
from penstock.spark.options import parse
from penstock.spark.source import StreamReader
from penstock.spark.streaming import StatefulQuery
from penstock.testing.apps import AppTest
from penstock.testing.processes import wait_until
from tests.spark.shop import Customer, Order, Shop, at, entries, rows


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


@pytest.mark.parametrize("has_record", [True, False])
def test_a_changed_plan_is_refused(spark: SparkSession, tmp_path: Path, has_record: bool) -> None:
    """Earlier versions saved no record of a definition; its position tells of the plan too."""
    shop = Shop()
    sums(shop)
    with AppTest(shop.app, tmp_path, spark) as run:
        run.send(shop.orders, Order("a", "tea", 5, at(1)))
        run.until_idle()
        (file,) = tmp_path.glob("*.db")
    if not has_record:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
            database.execute("DELETE FROM progress WHERE key LIKE 'definition/%'")
    changed = Shop()

    @changed.app.derive_table(changed.orders, key="item")
    def total(orders: DataFrame) -> DataFrame:
        return orders.groupBy("item").agg(F.sum(F.col("amount") * 2).alias("total"))

    with pytest.raises(
        PlanChangedError, match=r"(?s)the plan of its state has changed.*penstock reset"
    ):
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
    assert Path(__file__).name in failure
    assert "py4j" not in failure.lower()
    assert "pyspark" not in failure


def test_a_wrong_column_is_found_before_anything_runs(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.derive(shop.orders, key="user")
    def wrong(orders: DataFrame) -> DataFrame:
        return orders.select("nobody")

    with pytest.raises(AppError, match=r"test_refusals\.py:\d+: wrong: .*nobody"):
        AppTest(shop.app, tmp_path, spark).__enter__()


def test_a_key_that_is_no_column(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.derive(shop.orders, key="nobody")
    def wrong(orders: DataFrame) -> DataFrame:
        return orders.select("user")

    with pytest.raises(AppError, match="has the key nobody, which is not a column"):
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

    with pytest.raises(AppError, match="keeps state and reads table limits"):
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
        with pytest.raises(PlanChangedError, match="the plan of its state has changed"):
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

    with pytest.raises(AppError, match="keeps state and reads table names"):
        AppTest(shop.app, tmp_path, spark).__enter__()
    other = Shop()

    @other.app.derive_table(other.orders, key="user")
    def marks(orders: DataFrame) -> DataFrame:
        marked = orders.withColumn("mark", F.expr("uuid()"))
        return marked.groupBy("user").agg(F.max("mark").alias("mark"))

    with pytest.raises(AppError, match="is not deterministic"):
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


def test_a_stop_waits_for_the_batch_that_runs(spark: SparkSession, tmp_path: Path) -> None:
    """What was begun is finished and committed, not thrown away."""
    shop = Shop()

    def slowly(amounts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in amounts:
            time.sleep(2)
            yield batch

    @shop.app.derive_table(shop.orders, key="item")
    def total(orders: DataFrame) -> DataFrame:
        slow = orders.select("item", "amount").mapInArrow(slowly, "item string, amount long")
        return slow.groupBy("item").agg(F.sum("amount").alias("total"))

    with AppTest(shop.app, tmp_path, spark) as run:
        (query,) = [kept.query for kept in run.runner._kept]
        assert isinstance(query, StatefulQuery)
        run.until_idle()
        run.send(shop.orders, Order("ada", "tea", 5, at(0)))
        wait_until(lambda: query._is_busy, 60, "the batch")
        run.runner.stop()
        assert {k: v.total for k, v in entries(run, total).items()} == {"tea": 5}


JAVA = """An error occurred while calling o5.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure
\tat org.apache.spark.scheduler.DAGScheduler.run(DAGScheduler.scala:1)
Caused by: java.io.IOException: the stream is closed
\tat java.base/java.io.ObjectInputStream.read(ObjectInputStream.java:1)
"""


def test_a_failure_of_spark_is_told_by_its_cause() -> None:
    told = {
        JAVA: "java.io.IOException: the stream is closed",
        "\n".join(JAVA.splitlines()[:3]): (
            "org.apache.spark.SparkException: Job aborted due to stage failure"
        ),
        "[SOME_CLASS] a plain error\nand more": "[SOME_CLASS] a plain error",
        "": "RuntimeError",
    }
    for text, expected in told.items():
        assert user_failure("total", RuntimeError(text)).error == expected


def test_frames_of_users_are_kept_whatever_their_folders_are_called() -> None:
    ours = [Path(str(module.__file__)).parent for module in (penstock, pyspark)]
    files = {
        f"{ours[0]}/app/tasks/task.py": False,
        f"{ours[1]}/worker.py": False,
        "/opt/env/lib/python3.11/site-packages/penstock/app/tasks/task.py": False,
        "/var/spark/work/shop.zip/penstock/app/tasks/task.py": False,
        "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py": False,
        "/home/ada/penstock/shop.py": True,
        "/home/ada/pyspark/penstock/apps/shop.py": True,
    }
    lines = ["Traceback (most recent call last):"]
    for file in files:
        lines += [f'  File "{file}", line 1, in f', f"    of {file}"]
    trace = worker_traceback("\n".join([*lines, "ValueError: no"]))
    assert trace is not None
    assert {file: f'"{file}"' in trace for file in files} == files
    assert trace.endswith("ValueError: no")


def test_a_worker_that_dies_is_told_in_words(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop()

    @shop.app.agent(shop.orders)
    def die(order: Order) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with AppTest(shop.app, tmp_path, spark, tries_max=1) as run:
        run.send(shop.orders, Order("a", "tea", 5, at(1)))
        told = str(run.until_failed())
    assert "a Spark worker process died: it was killed, or ran out of memory" in told
    assert "An error occurred while calling" not in told.splitlines()[0]


def test_a_stream_that_is_made_anew_under_a_query_with_state(
    spark: SparkSession, tmp_path: Path
) -> None:
    shop = Shop()
    sums(shop)
    with AppTest(shop.app, tmp_path, spark, tries_max=2) as run:
        for n in range(5):
            run.send(shop.orders, Order("a", "tea", n, at(n)))
        run.until_idle()
        spec = run.log.stream("orders").spec
        run.log.apply([DropStream("orders"), CreateStream(spec)])
        run._producer._streams.clear()
        run.send(shop.orders, Order("a", "tea", 100, at(9)))
        told = str(run.until_failed())
    assert "orders has been emptied or created again" in told
    assert "penstock reset APP total" in told


def test_a_plain_query_hears_of_a_stream_that_was_made_anew(
    spark: SparkSession, tmp_path: Path
) -> None:
    with open_log(tmp_path / "log.db") as log:
        log.apply([CreateStream(declare("s", Order, key="user"))])
        with Producer(log) as producer:
            for n in range(10):
                producer.send("s", Order("a", "tea", n, at(n)))
        reader = StreamReader(parse({"log": log.url, "path": "s"}), StructType())
        assert reader.latestOffset({"0": 0}, ReadAllAvailable()) == {"0": 10}
        log.apply([DropStream("s"), CreateStream(declare("s", Order, key="user"))])
        with pytest.raises(UnknownObjectError, match="dropped and created again"):
            reader.latestOffset({"0": 10}, ReadAllAvailable())
        again = StreamReader(parse({"log": log.url, "path": "s"}), StructType())
        with pytest.raises(UnknownObjectError, match="dropped and created again"):
            again.latestOffset({"0": 10}, ReadAllAvailable())


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(111, "refused"), Py4JNetworkError("gone")]
)
def test_that_spark_has_died_is_told_from_failures_that_are_worth_another_try(
    error: Exception,
) -> None:
    with pytest.raises(SparkGoneError, match="the Spark process has died"), spark_alive():
        raise error
    with pytest.raises(ZeroDivisionError), spark_alive():
        raise ZeroDivisionError
