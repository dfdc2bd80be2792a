"""`format("penstock")` in an ordinary PySpark program."""

from __future__ import annotations

import datetime as dt
import functools
import json
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from penstock import (
    AlterStream,
    App,
    AppTable,
    Commit,
    CreateStream,
    Log,
    Producer,
    ReadOptions,
    Record,
    Table,
    declare,
    failpoints,
    read_events,
)
from penstock import open as open_log
from penstock.app.tasks.state import State
from penstock.errors import OffsetGoneError
from penstock.log.api import Part
from penstock.log.writing.compose import Composer
from penstock.records.arrow import codec_of
from penstock.spark.options import parse
from penstock.spark.source import BatchReader, RangePartition, bound_rows, splits
from penstock.spark.writer import BatchWriter

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Order(Record):
    user: str
    amount: int
    price: Decimal
    at: dt.datetime
    tags: list[str]
    note: str | None = None


def order(n: int) -> Order:
    return Order(
        user=f"u{n % 10}", amount=n, price=Decimal(n), at=START + dt.timedelta(seconds=n),
        tags=["a", str(n)], note=None if n % 2 else "even",
    )  # fmt: skip


class Place:
    """A log with orders, and how Spark reads and writes it."""

    def __init__(self, spark: SparkSession, log: Log, folder: Path) -> None:
        self.spark = spark
        self.log = log
        self.folder = folder

    def read(self, stream: str, **options: object) -> DataFrame:
        reader = self.spark.read.format("penstock").option("log", self.log.url)
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return reader.load(stream)

    def follow(self, stream: str, **options: object) -> DataFrame:
        reader = self.spark.readStream.format("penstock").option("log", self.log.url)
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return reader.load(stream)

    def copy(self, frame: DataFrame, to: str, producer: str, checkpoint: str = "cp") -> Any:
        """Write everything that is there to a stream; the query when it is done."""
        query = (
            frame.writeStream.format("penstock")
            .option("log", self.log.url)
            .option("stream", to)
            .option("producer", producer)
            .option("checkpointLocation", str(self.folder / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        return query

    def amounts(self, stream: str) -> list[int]:
        events = read_events(self.log, stream, Order, ReadOptions())
        return sorted(event.data.amount for event in events)


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Iterator[Place]:
    with open_log(tmp_path / "log.db") as log:
        for name in ("orders", "copies"):
            spec = declare(name, Order, key="user", time="at", partitions=3)
            log.apply([CreateStream(spec)])
        with Producer(log) as producer:
            for n in range(100):
                producer.send("orders", order(n))
        yield Place(spark, log, tmp_path)


@pytest.mark.row("X2", engine="embedded")
def test_a_stream_as_a_data_frame(place: Place) -> None:
    frame = place.read("orders")
    rows = frame.orderBy("amount").collect()
    assert len(rows) == 100
    first = rows[3]
    assert (first.user, first.price, first.tags, first.note) == ("u3", Decimal(3), ["a", "3"], None)
    assert first.at.replace(tzinfo=dt.UTC) == START + dt.timedelta(seconds=3)
    assert bytes(first._key) == b"u3"
    assert {row._partition for row in rows} <= {0, 1, 2}
    assert rows[3]._type == "Order"
    assert len({row._id for row in rows}) == 100
    assert frame.where("amount >= 90").count() == 10


def test_only_some_columns(place: Place) -> None:
    frame = place.read("orders", columns="user, amount,_offset")
    assert frame.columns == ["user", "amount", "_offset"]
    assert frame.agg(F.sum("amount")).collect()[0][0] == sum(range(100))


def test_from_and_to(place: Place) -> None:
    ends = {p: offsets.next for p, offsets in place.log.offsets("orders").items()}
    assert place.read("orders", start="latest").count() == 0
    some = place.read("orders", start=json.dumps({0: 2}), end=json.dumps({0: 5, 1: 0, 2: 0}))
    assert some.count() == 3
    assert place.read("orders", start=5).count() == sum(max(0, end - 5) for end in ends.values())
    later = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).isoformat()
    assert place.read("orders", start=later).count() == 0
    assert place.read("orders", end=later).count() == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"begin": "earliest"}, "no option 'begin'"),
        ({"start": "soon"}, "it must be earliest, latest, an offset"),
        ({"start": "2026-01-01T00:00:00"}, "no time zone"),
        ({"batch_rows": 0}, "must be positive"),
        ({"columns": "user,nobody"}, "no column 'nobody'"),
        ({"on_gone": "hope"}, "on_gone"),
    ],
)
def test_wrong_options_are_named(place: Place, options: dict[str, object], message: str) -> None:
    with pytest.raises(PySparkException, match=message):
        place.read("orders", **options).count()


def test_an_unknown_stream(place: Place) -> None:
    with pytest.raises(PySparkException, match="there is no stream nothing"):
        place.read("nothing").count()


@pytest.mark.row("X2", engine="embedded")
def test_a_batch_write_is_one_commit(place: Place) -> None:
    place.read("orders").where("amount < 50").write.format("penstock").option(
        "log", place.log.url
    ).option("stream", "copies").mode("append").save()
    assert place.amounts("copies") == list(range(50))
    commits = {batch.commit for p in range(3) for batch in place.log.read("copies", p, 0)}
    assert len(commits) == 1


def test_a_batch_write_that_fails_leaves_nothing(place: Place) -> None:
    broken = place.read("orders").withColumn(
        "amount", F.expr("if(amount = 70, cast(raise_error('no') as bigint), amount)")
    )
    with pytest.raises(PySparkException):
        broken.write.format("penstock").option("log", place.log.url).option(
            "stream", "copies"
        ).mode("append").save()
    assert place.amounts("copies") == []


def test_a_batch_write_asks_again_whether_it_was_committed(place: Place) -> None:
    writer = BatchWriter(parse({"log": place.log.url, "stream": "copies"}))
    staged = writer.write(iter([codec_of(Order).to_arrow([order(n) for n in range(3)])]))
    failpoints.arm("commit.committed", "raise")
    writer.commit([staged])
    assert place.amounts("copies") == [0, 1, 2]


def test_columns_that_do_not_fit_are_refused(place: Place) -> None:
    with pytest.raises(PySparkException, match="price"):
        place.read("orders").drop("price").write.format("penstock").option(
            "log", place.log.url
        ).option("stream", "copies").mode("append").save()
    with pytest.raises(PySparkException, match="can only be appended to"):
        place.read("orders").write.format("penstock").option("log", place.log.url).option(
            "stream", "copies"
        ).mode("overwrite").save()


@pytest.mark.row("X2", engine="embedded")
def test_a_streaming_copy_in_several_batches(place: Place) -> None:
    query = place.copy(place.follow("orders", batch_rows=30), "copies", "copier")
    assert place.amounts("copies") == list(range(100))
    progress = query.recentProgress
    assert len(progress) >= 4
    assert sum(p.numInputRows for p in progress) == 100
    ends = {str(p): offsets.next for p, offsets in place.log.offsets("orders").items()}
    assert json.loads(progress[-1].sources[0].latestOffset) == ends


def test_a_streaming_copy_goes_on_where_it_was(place: Place) -> None:
    place.copy(place.follow("orders"), "copies", "copier")
    with Producer(place.log) as producer:
        for n in range(100, 120):
            producer.send("orders", order(n))
    place.copy(place.follow("orders"), "copies", "copier")
    assert place.amounts("copies") == list(range(120))


@pytest.mark.row("X2", engine="embedded")
def test_a_batch_that_spark_runs_again_changes_nothing(place: Place) -> None:
    """As after a crash between our commit and Spark's own note of it."""
    place.copy(place.follow("orders", batch_rows=40), "copies", "copier")
    commits = place.folder / "cp" / "commits"
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    for file in commits.iterdir():
        if file.name.strip(".").split(".")[0] == str(last):
            file.unlink()
    place.copy(place.follow("orders", batch_rows=40), "copies", "copier")
    assert place.amounts("copies") == list(range(100))


def test_a_checkpoint_that_is_one_batch_old_is_refused(place: Place) -> None:
    """Its next batch has the number of the last one that was written, and other rows."""
    place.copy(place.follow("orders"), "copies", "copier")
    shutil.copytree(place.folder / "cp", place.folder / "old")
    for first in (100, 110):
        with Producer(place.log) as producer:
            for n in range(first, first + 10):
                producer.send("orders", order(n))
        if first == 100:
            place.copy(place.follow("orders"), "copies", "copier")
    with pytest.raises(PySparkException, match="the checkpoint is an old copy"):
        place.copy(place.follow("orders"), "copies", "copier", checkpoint="old")
    place.copy(place.follow("orders"), "copies", "copier")
    assert place.amounts("copies") == list(range(120))


def test_another_checkpoint_under_the_same_name_is_refused(place: Place) -> None:
    place.copy(place.follow("orders"), "copies", "copier")
    with pytest.raises(PySparkException, match="another checkpoint"):
        place.copy(place.follow("orders"), "copies", "copier", checkpoint="other")
    assert place.amounts("copies") == list(range(100))


def test_a_streaming_write_needs_a_name(place: Place) -> None:
    with pytest.raises(PySparkException, match="needs the option producer"):
        place.copy(place.follow("orders"), "copies", "")


def test_what_retention_removed(place: Place) -> None:
    stream = place.log.stream("orders")
    place.log.apply([AlterStream(msgspec.structs.replace(stream.spec, retention_bytes=1))])
    with Producer(place.log) as producer:
        for n in range(100, 200):
            producer.send("orders", order(n))
    for _ in range(5):
        place.log.maintain()
    gone = sum(offsets.first for offsets in place.log.offsets("orders").values())
    assert gone > 0
    with pytest.raises(PySparkException, match="removed"):
        place.read("orders", start=0).count()
    assert place.read("orders", start=0, on_gone="earliest").count() == 200 - gone
    assert place.read("orders", start=0, on_gone="latest").count() < 200 - gone

    # A task can meet it too: its range was there when the driver looked.
    schema = place.read("orders").schema
    partition, offsets = next((p, o) for p, o in place.log.offsets("orders").items() if o.first)

    def rows(on_gone: str) -> int:
        options = parse({"log": place.log.url, "stream": "orders", "on_gone": on_gone})
        task = RangePartition(partition, 0, offsets.next)
        return sum(batch.num_rows for batch in BatchReader(options, schema).read(task))

    with pytest.raises(OffsetGoneError):
        rows("fail")
    assert rows("earliest") == offsets.next - offsets.first
    assert rows("latest") == 0


def test_splits_and_bytes_are_as_asked(place: Place) -> None:
    assert place.read("orders").rdd.getNumPartitions() <= 4
    assert place.read("orders", split_rows=10).rdd.getNumPartitions() >= 10
    query = (
        place.follow("orders", batch_bytes="2 kB").writeStream.format("noop")
        .option("checkpointLocation", str(place.folder / "bytes"))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination(60)
    rows = [progress.numInputRows for progress in query.recentProgress]
    assert sum(rows) == 100
    assert max(rows) < 60


def test_a_table_of_sets_without_its_values(place: Place) -> None:
    table = App("any").table("tags", value=set[str])
    assert table.spec is not None
    place.log.apply([CreateStream(table.spec)])
    state = State(place.log, cast(AppTable[object], table))
    state.entry(b"ada").value = {"x", "y"}
    part = state.part(Composer("test", place.log.limits))
    place.log.commit(place.log.hold("test"), 0, Commit(parts=[cast(Part, part)]))
    assert place.read("tags").select("values").collect()[0].values == ["x", "y"]
    assert bytes(place.read("tags", columns="_key").collect()[0]._key) == b"ada"


def test_a_table_is_a_snapshot_and_its_changelog_a_stream(place: Place) -> None:
    place.log.apply([CreateStream(declare("people", Order, key="user", table=True))])
    with Producer(place.log) as producer:
        for n in range(20):
            producer.send("people", order(n))
        producer.send("people", None, key="u3")
    rows = place.read("people").orderBy("user").collect()
    assert [row.user for row in rows] == [f"u{n}" for n in range(10) if n != 3]
    assert [row.amount for row in rows] == [n for n in range(10, 20) if n != 13]
    assert place.read("people", changes="true").count() == 21
    assert Table(place.log, "people", Order).get("u3") is None
    frame = place.follow("people").select("user", "_deleted", "_key")
    query = frame.writeStream.format("memory").queryName("seen").trigger(availableNow=True).start()
    query.awaitTermination(60)
    seen = place.spark.sql("select * from seen").collect()
    assert len(seen) == 21
    assert [bytes(row._key) for row in seen if row._deleted] == [b"u3"]


def test_untyped_streams(place: Place) -> None:
    place.log.apply([CreateStream(declare("anything"))])
    with Producer(place.log) as producer:
        producer.send("anything", {"a": 1})
    (row,) = place.read("anything").collect()
    assert json.loads(row.data) == {"a": 1}


def test_a_read_ends_where_the_stream_did_when_it_was_planned(tmp_path: Path) -> None:
    """Also where more was asked for: what comes meanwhile is not part of it."""
    path = tmp_path / "log.db"
    with open_log(path, create=True) as log:
        log.apply([CreateStream(declare("s", content="json"))])
        with Producer(log) as producer:
            for n in range(3):
                producer.send("s", n)
    options = parse({"log": str(path), "path": "s", "end": '{"0": 99}'})
    found = BatchReader(options, StructType()).partitions()
    assert [(p.start, p.end) for p in found if isinstance(p, RangePartition)] == [(0, 3)]


def test_splits_are_a_function_of_the_offsets(place: Place) -> None:
    found = splits(place.log, "s", {0: 5, 1: 0}, {0: 25, 1: 3}, 10)
    assert [(s.partition, s.start, s.end) for s in found] == [
        (0, 5, 15), (0, 15, 25), (1, 0, 3),
    ]  # fmt: skip


def test_a_limit_is_shared_fairly(place: Place) -> None:
    limited = functools.partial(bound_rows, place.log, "s")
    assert limited({0: 0, 1: 0}, {0: 100, 1: 10}, 50) == {0: 40, 1: 10}
    assert limited({0: 5}, {0: 100, 1: 10}, None) == {0: 100, 1: 10}
    assert limited({}, dict.fromkeys(range(3), 100), 30) == dict.fromkeys(range(3), 10)
    assert sum(limited({}, dict.fromkeys(range(7), 10), 20).values()) == 20


def test_record_batches_go_through_unchanged(place: Place) -> None:
    table = pa.Table.from_batches(
        place.read("orders", columns="user,amount").toArrow().to_batches()
    )
    assert table.num_rows == 100
    assert sorted(table.column("amount").to_pylist()) == list(range(100))
