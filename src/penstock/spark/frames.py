"""DataFrames of an app: how streams are read as DataFrames, and how results are staged."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from pyspark.sql.types import BinaryType, StructField, StructType

from penstock.app.tasks.task import BatchOrder, Outcome, Split, log_failure, read_range, this_worker
from penstock.errors import PenstockError, UsageError
from penstock.log import OptionValue
from penstock.log.api import Log
from penstock.log.batch import in_order_of_commit
from penstock.log.reading.table import unpacker
from penstock.spark.columns import arrow_schema_of, for_spark, spark_schema
from penstock.spark.source import entry_columns
from penstock.spark.worker import worker_log
from penstock.spark.writer import stage_batches

Options = Mapping[str, OptionValue]
ORDER = "penstock.order"
_STAGED = StructType([StructField("outcome", BinaryType())])


def read_stream(
    spark: SparkSession, url: str, options: Options, stream: str, columns: pa.Schema, tasks: int
) -> DataFrame:
    """The events of the current batch, as a DataFrame of these columns.

    Tasks learn from `give_order` which batch that is, so the same DataFrame serves all batches.
    """
    schema = spark_schema(columns)

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = arrow_schema_of(schema)
        log = worker_log(url, options)
        order = current_order()
        mine = [number for batch in numbers for number in batch.column(0).to_pylist()]
        for index, split in enumerate(order.splits):
            # Adjacent splits go to one task, so that what it stages is in order.
            if index * tasks // len(order.splits) in mine:
                yield from _read(log, order, split, stream, wanted)

    return spark.range(0, tasks, 1, tasks).mapInArrow(read, schema)


def _read(
    log: Log, order: BatchOrder, split: Split, stream: str, wanted: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The events of a stream in a split: range by range, or in the order of their commits."""
    ranges = [range_ for range_ in split.ranges if range_.stream == stream]
    found = (batch for range_ in ranges for batch in read_range(log, order, range_, []))
    if len(ranges) < 2 or not split.as_stored:
        yield from (for_spark(batch, wanted) for batch in found)
    elif batches := list(found):
        yield in_order_of_commit(batches, [for_spark(batch, wanted) for batch in batches])


def read_table(
    spark: SparkSession, url: str, options: Options, table: str, columns: pa.Schema
) -> DataFrame:
    """The entries of a table at the moment that the batch has pinned, as a DataFrame."""
    schema = spark_schema(columns)

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = arrow_schema_of(schema)
        log = worker_log(url, options)
        stream, pin = log.stream(table), current_order().pin
        unpack = unpacker(stream)
        for _ in numbers:
            after: bytes | None = None
            while entries := log.page(table, after, log.limits.page_rows_max, pin):
                values = [unpack(entry.value) for entry in entries]
                yield entry_columns(stream, entries, values, wanted)
                after = entries[-1].key

    return spark.range(0, 1, 1, 1).mapInArrow(read, schema)


def stage_frame(
    frame: DataFrame, url: str, options: Options, stream: str, source: str
) -> DataFrame:
    """A DataFrame that stages the rows when it is collected, and gives one outcome per task."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        order = current_order()
        log = worker_log(url, options)
        try:
            pieces = stage_batches(log, order.holder, order.sequence, stream, batches, source)
            rows = sum(piece.rows for piece in pieces)
            outcome = Outcome(pieces=tuple(pieces), rows_out=rows, worker=this_worker())
        except PenstockError as error:
            outcome = Outcome(failure=log_failure(source, error), worker=this_worker())
        packed = pa.array([msgspec.msgpack.encode(outcome)], pa.binary())
        yield pa.RecordBatch.from_arrays([packed], names=["outcome"])

    return frame.mapInArrow(stage, _STAGED)


def with_absent(frame: DataFrame, offered: pa.Schema) -> DataFrame:
    """The frame with every column that is offered; those that are not used are null.

    A function may name a column whose value is not needed: producing it would cost time, but
    naming it must not fail.
    """
    if frame.columns == offered.names:
        return frame
    schema = spark_schema(offered)
    present = set(frame.columns)
    return frame.select(
        [
            F.col(field.name)
            if field.name in present
            else F.lit(None).cast(field.dataType).alias(field.name)
            for field in schema.fields
        ]
    )


@contextlib.contextmanager
def give_order(spark: SparkSession, order: BatchOrder) -> Iterator[None]:
    """Pass the order of the batch to the tasks that this thread starts."""
    context = spark.sparkContext
    context.setLocalProperty(ORDER, msgspec.json.encode(order).decode())
    try:
        yield
    finally:
        context.setLocalProperty(ORDER, None)  # type: ignore[arg-type]


def current_order() -> BatchOrder:
    """In a task: the batch that it belongs to."""
    context = TaskContext.get()
    text = None if context is None else context.getLocalProperty(ORDER)
    if text is None:
        raise UsageError(
            "a DataFrame of an app cannot be collected or shown by the app itself: only its query "
            "can run it; return it instead"
        )
    return _order(text)


@functools.lru_cache(maxsize=4)
def _order(text: str) -> BatchOrder:
    return msgspec.json.decode(text, type=BatchOrder)


def collect_staged(frame: DataFrame) -> list[Outcome]:
    decode = msgspec.msgpack.Decoder(Outcome).decode
    return [decode(bytes(row.outcome)) for row in frame.collect()]
