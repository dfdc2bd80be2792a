"""Apps on Kafka: agents, tables and their changelogs, and Spark programs that read and write."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock import (
    App,
    AppStream,
    AppTable,
    CreateStream,
    DeadLetter,
    Entry,
    Log,
    Producer,
    Record,
    Table,
    declare,
    read_events,
)
from penstock import open as open_log
from penstock.errors import QueryFailedError
from penstock.testing.apps import AppTest
from penstock.testing.brokers import Brokers
from tests.app.shop import Order, Shop, some_orders
from tests.kafka.test_interop import Client


class Join(Record):
    topic: str
    account: str
    leave: bool = False


@pytest.mark.row("F11", engine="kafka")
@pytest.mark.parametrize("kind", [set[str], list[str]])
def test_a_table_is_made_again_from_its_changelog(url: str, tmp_path: Path, kind: Any) -> None:
    """Sets and lists are told by what was done to them; whoever has no file replays it."""
    app = App("chat")
    joins = app.stream("joins", Join, key="topic")
    members = app.table("members", value=kind)

    @app.agent(joins, state=members)
    def follow(join: Join, members: Entry[Any]) -> None:
        if join.leave:
            members.value.remove(join.account)
        elif isinstance(members.value, set):
            members.value.add(join.account)
        else:
            members.value.append(join.account)

    with AppTest(app, tmp_path, log=url) as run:
        for n in range(6):
            run.send(joins, Join("tea", f"a{n}"), Join("milk", f"b{n}"))
            run.until_idle()
        run.send(joins, Join("tea", "a3", leave=True))
        run.until_idle()
        told = [e.data.action for e in run.whole_events(members)]
        assert told.count("add") == 12
        found = run.table(members)
    wanted = {"tea": ["a0", "a1", "a2", "a4", "a5"], "milk": [f"b{n}" for n in range(6)]}
    assert {key: sorted(value) for key, value in found.items()} == wanted
    with open_log(url, cache=str(tmp_path / "empty")) as log:
        again: Table[Any] = Table(log, "members")
        assert {key.decode(): value for key, value in again.items()} == found


@pytest.mark.row("X2", engine="kafka")
def test_a_spark_program_reads_tables_and_times(
    kafka: Log, spark: SparkSession, tmp_path: Path
) -> None:
    kafka.apply([CreateStream(declare("people", Order, key="user", table=True, partitions=2))])
    with Producer(kafka) as producer:
        for order in some_orders(40):
            producer.send("people", order)
        producer.send("people", None, key="u0").result()
    users = {order.user for order in some_orders(40)} - {"u0"}

    def read(**options: str) -> DataFrame:
        return spark.read.format("penstock").options(log=kafka.url, **options).load("people")

    assert {row.user for row in read().collect()} == users
    assert read(changes="true").count() == 41
    later = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).isoformat()
    assert read(changes="true", start=later).count() == 0
    assert read(changes="true", end=later).count() == 41

    def follow() -> None:
        frame = spark.readStream.format("penstock").option("log", kafka.url).load("people")
        query = (
            frame.select("user", "_deleted").writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "cp"))
            .option("path", str(tmp_path / "out"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination(120)

    follow()
    follow()
    assert spark.read.parquet(str(tmp_path / "out")).where("not _deleted").count() == 40


@pytest.mark.row("X3", engine="kafka")
def test_a_spark_program_copies_each_event_once(
    kafka: Log, spark: SparkSession, tmp_path: Path
) -> None:
    kafka.apply([
        CreateStream(declare("orders", Order, key="user", partitions=3)),
        CreateStream(declare("copies", Order, key="user", partitions=2)),
    ])  # fmt: skip

    def copy(checkpoint: str = "cp") -> None:
        reader = spark.readStream.format("penstock").option("log", kafka.url)
        frame = reader.option("batch_rows", "40").load("orders").where("amount % 2 = 0")
        query = (
            frame.withColumn("item", F.expr("uuid()")).writeStream.format("penstock")
            .option("log", kafka.url).option("stream", "copies").option("producer", "copier")
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination(120)

    with Producer(kafka) as producer:
        for order in some_orders(100):
            producer.send("orders", order)
    copy()
    first = [event.data for event in read_events(kafka, "copies", Order)]
    with Producer(kafka) as producer:
        for order in some_orders(40):
            producer.send("orders", order)
    copy()
    copy()
    found = [event.data for event in read_events(kafka, "copies", Order)]
    wanted = [o.amount for o in [*some_orders(100), *some_orders(40)] if o.amount % 2 == 0]
    assert sorted(order.amount for order in found) == sorted(wanted)
    assert {order.item for order in first} <= {order.item for order in found}
    rows = spark.read.format("penstock").option("log", kafka.url).load("copies")
    assert rows.count() == len(wanted)
    assert rows.select("_offset").distinct().count() <= len(wanted)


def test_a_bad_message_stops_an_app_and_is_named(url: str, broker: Brokers, tmp_path: Path) -> None:
    shop = Shop()
    with AppTest(shop.app, tmp_path, log=url, tries_max=1) as run:
        run.send(shop.orders, *some_orders(3))
        run.until_idle()
        client = Client("kcat", broker, f"{url.rpartition('/')[2]}.default.orders")
        client.write("no json")
        failure = run.until_failed()
        assert isinstance(failure, QueryFailedError)
        assert "is not a valid Order" in str(failure)
        assert "offset" in str(failure)


@pytest.mark.row("X3", engine="kafka")
def test_bad_messages_become_dead_letters(
    url: str, broker: Brokers, spark: SparkSession, tmp_path: Path
) -> None:
    """Whatever reads the stream goes on without them; one letter tells of each."""
    app = App("shop")
    orders = app.stream("orders", Order, key="user", on_damage="dead-letter")
    spent = app.table("spent", value=int, default=0)

    @app.agent(orders, state=spent)
    def spend(order: Order, spent: Entry[int]) -> None:
        spent.value += order.amount

    @app.derive(orders, key="user", record=Order)
    def copied(orders: DataFrame) -> DataFrame:
        return orders.select("user", "item", "amount")

    @app.derive_table(orders, key="user")
    def counted(orders: DataFrame) -> DataFrame:
        return orders.groupBy("user").count()

    client = Client("kcat", broker, f"{url.rpartition('/')[2]}.default.orders")
    good = '{"user": "ada", "item": "tea", "amount": %d}'

    def write(*values: str) -> None:
        client.write(*(f"ada|{value}" for value in values), keys=True)

    with AppTest(app, tmp_path, spark, log=url) as run:
        write("no json", "[]", good % 1, good % 2, "{}", good % 4)
        run.until_idle()
        write("null")
        run.until_idle()
    with AppTest(app, tmp_path, spark, log=url) as run:
        write(good % 8, '{"user": 3}')
        run.until_idle()
        assert run.table(spent) == {"ada": 15}
        assert [order.amount for order in run.events(copied)] == [1, 2, 4, 8]
        counts = run.table(cast(AppTable[Any], counted))
        assert {key: row.count for key, row in counts.items()} == {"ada": 4}
        letters = run.events(cast(AppStream[DeadLetter], app.streams["orders_dead"]))
    assert [(letter.offset, letter.data) for letter in letters] == [
        (0, "no json"), (1, "[]"), (4, "{}"), (6, "null"), (8, '{"user": 3}')
    ]  # fmt: skip
    assert all("is not a valid Order" in letter.error and letter.key == "ada" for letter in letters)


def test_spark_leaves_bad_messages_out_if_told(
    kafka: Log, url: str, broker: Brokers, spark: SparkSession
) -> None:
    kafka.apply([CreateStream(declare("orders", Order, key="user"))])
    client = Client("kcat", broker, f"{url.rpartition('/')[2]}.default.orders")
    good = '{"user": "a", "item": "tea", "amount": %d}'
    client.write(good % 1, "no json", good % 2, "{}", good % 3)
    reader = spark.read.format("penstock").option("log", kafka.url)
    with pytest.raises(Exception, match="offset 1 is not a valid Order"):
        reader.load("orders").count()
    rows = reader.option("on_damage", "skip").load("orders").collect()
    assert [row.amount for row in rows] == [1, 2, 3]
