"""`format("penstock")`: streams and tables as an ordinary Spark data source.

    spark.read.format("penstock").option("log", "penstock.db").load("orders")

Spark finds it through the package `pyspark_penstock`, and calls these classes with PySpark's own
parameter names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.app.running.splits import parts
from penstock.app.tasks.task import Range
from penstock.errors import DamagedError, OffsetGoneError, UnknownObjectError, UsageError
from penstock.log.api import Log, Offsets
from penstock.log.batch import stream_columns
from penstock.log.declaring.objects import Stream
from penstock.log.reading.read import read_past
from penstock.log.reading.table import unpacker
from penstock.records.arrow import codec_of_schema
from penstock.records.event import DATA, DELETED, ENVELOPE
from penstock.records.schema import Record
from penstock.spark import options as source_options
from penstock.spark.columns import arrow_schema_of, for_spark, spark_schema
from penstock.spark.options import SourceOptions, offsets_of
from penstock.spark.worker import quiet_log, worker_log
from penstock.spark.writer import BatchWriter, StreamWriter


class RangePartition(InputPartition):
    """The offsets of one partition that one task reads."""

    def __init__(self, partition: int, start: int, end: int) -> None:
        self.partition = partition
        self.start = start
        self.end = end


class PenstockSource(DataSource):
    """Created by Spark for each read or write, in a process of its own."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._options = source_options.parse({k: str(v) for k, v in options.items()})

    def schema(self) -> StructType:
        options = self._options
        with quiet_log(options.log, options.for_log) as log:
            columns = _columns_offered(log.stream(options.stream), options)
        return spark_schema(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        with quiet_log(self._options.log, self._options.for_log) as log:
            is_table = log.stream(self._options.stream).spec.table
        if is_table and not self._options.changes:
            return SnapshotReader(self._options, schema)
        return BatchReader(self._options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self._options.end != "latest":
            raise UsageError("a streaming read has no end: omit the option end")
        return StreamReader(self._options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        del schema
        if overwrite:
            raise UsageError("a stream can only be appended to: use mode('append')")
        return BatchWriter(self._options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        del schema
        if overwrite:
            raise UsageError("a stream can only be appended to: use outputMode append or update")
        return StreamWriter(self._options)


def _columns_offered(stream: Stream, options: SourceOptions) -> pa.Schema:
    columns = stream_columns(stream)
    if options.columns is None:
        return columns
    missing = [name for name in options.columns if name not in columns.names]
    if missing:
        raise UsageError(
            f"stream {stream.name} has no column {missing[0]!r}; it has {', '.join(columns.names)}"
        )
    return pa.schema([columns.field(name) for name in options.columns])


def splits(
    log: Log, stream: str, start: Mapping[int, int], end: Mapping[int, int], split_rows: int
) -> list[RangePartition]:
    """The ranges that tasks read between two sets of offsets."""
    return [
        RangePartition(part.partition, part.start, part.end)
        for partition in sorted(end)
        for part in parts(
            log, Range(stream, partition, start.get(partition, 0), end[partition]), split_rows
        )
    ]


class _RangeReader:
    """Reads a range in a task, as Arrow batches in the order they are stored."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangePartition):
            return  # made by Spark for a batch without partitions
        wanted = arrow_schema_of(self._schema)
        log = worker_log(self._options.log, self._options.for_log)
        start, end = partition.start, partition.end
        while start < end:
            try:
                place = (self._options.stream, partition.partition)
                for batch in read_past(log, *place, start, end, self._note):
                    yield for_spark(batch, wanted)
                return
            except OffsetGoneError as gone:
                if self._options.on_gone == "fail":
                    raise
                start = end if self._options.on_gone == "latest" else gone.earliest

    def _note(self, damage: DamagedError) -> None:
        if self._options.on_damage == "fail":
            raise damage

    def _check_start(self, log: Log, start: Mapping[int, int]) -> dict[int, int]:
        """The start, if its events are still there; otherwise what `on_gone` says."""
        made = {}
        for partition, offsets in log.offsets(self._options.stream).items():
            at = start.get(partition, offsets.first)
            made[partition] = at if at >= offsets.first else self._instead(partition, at, offsets)
        return made

    def _instead(self, partition: int, at: int, offsets: Offsets) -> int:
        if self._options.on_gone == "fail":
            raise OffsetGoneError(
                f"stream {self._options.stream}, partition {partition}: retention has removed "
                f"offset {at}; the earliest is now {offsets.first}: set the option on_gone to "
                "earliest or latest to continue from there",
                offsets.first,
            )
        return offsets.first if self._options.on_gone == "earliest" else offsets.next


class BatchReader(_RangeReader, DataSourceReader):
    """`spark.read`: reads from start to end, both fixed when the query is planned."""

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with quiet_log(options.log, options.for_log) as log:
            start = offsets_of(log, options.stream, options.start, "start")
            end = offsets_of(log, options.stream, options.end, "end")
            known = {p: o.next for p, o in log.offsets(options.stream).items()}
            bound = {p: min(offset, known[p]) for p, offset in end.items()}
            first = self._check_start(log, start)
            return splits(log, options.stream, first, bound, options.split_rows)


class SnapshotReader(DataSourceReader):
    """`spark.read` of a table: its entries as of one moment, read in one transaction."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        del partition
        wanted = arrow_schema_of(self._schema)
        log = worker_log(self._options.log, self._options.for_log)
        stream = log.stream(self._options.stream)
        unpack = unpacker(stream)
        for entries in log.snapshot(self._options.stream):
            values = [unpack(entry.value) for entry in entries]
            yield entry_columns(stream, entries, values, wanted)


def entry_columns(
    stream: Stream, entries: Sequence[Any], values: Sequence[Any], wanted: pa.Schema
) -> pa.RecordBatch:
    """Entries as rows: data, key, partition and offset; entries have no other envelope columns."""
    columns: dict[str, pa.Array] = {
        "_key": pa.array([entry.key for entry in entries], pa.binary()),
        "_partition": pa.array([entry.partition for entry in entries], pa.int32()),
        "_offset": pa.array([entry.offset for entry in entries], pa.int64()),
    }
    if stream.spec.entries != "value":
        columns["action"] = pa.array(["set"] * len(values), pa.string())
        if "values" in wanted.names:
            lists = [sorted(v, key=repr) if isinstance(v, set) else v for v in values]
            columns["values"] = pa.array(lists, wanted.field("values").type)
    elif stream.record is not None:
        records: list[Record | None] = list(values)
        data = codec_of_schema(stream.record).to_arrow(records)
        columns.update({name: data.column(name) for name in data.schema.names})
    else:
        columns[DATA] = pa.array([entry.value for entry in entries], pa.binary())
        if stream.spec.content == "json":
            columns[DATA] = columns[DATA].cast(pa.string())
    arrays = []
    for field in wanted:
        column = columns.get(field.name)
        if column is None:
            column = _absent(field, len(entries))
        arrays.append(column if column.type.equals(field.type) else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _absent(field: pa.Field, rows: int) -> pa.Array:
    if field.name == DELETED:
        return pa.repeat(pa.scalar(False), rows)
    if field.name in ENVELOPE.names and not field.nullable:
        empty = "" if pa.types.is_string(field.type) else 0
        return pa.repeat(pa.scalar(empty, pa.string() if empty == "" else pa.int64()), rows)
    return pa.nulls(rows, field.type)


class StreamReader(_RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`: micro-batches with a limit on rows or bytes."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._log: Log | None = None
        self._target: dict[int, int] | None = None
        self._id: int | None = None
        self._row_bytes: float | None = None

    def _open_log(self) -> Log:
        if self._log is None:
            self._log = quiet_log(self._options.log, self._options.for_log)
        return self._log

    def initialOffset(self) -> dict[str, int]:
        return _show_offsets(
            offsets_of(self._open_log(), self._options.stream, self._options.start, "start")
        )

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.batch_rows is None and options.batch_bytes is None:
            return ReadMaxRows(options.default_batch_rows)
        limits = [options.batch_rows] if options.batch_rows is not None else []
        if options.batch_bytes is not None:
            limits.append(max(1, int(options.batch_bytes / self._bytes_of_a_row())))
        return ReadMaxRows(min(limits))

    def _bytes_of_a_row(self) -> float:
        """The approximate size of a row, judged by the first batch in the stream."""
        if self._row_bytes is None:
            log, stream = self._open_log(), self._options.stream
            for partition, offsets in log.offsets(stream).items():
                first = next(log.read(stream, partition, offsets.first), None)
                if first is not None:
                    self._row_bytes = max(1.0, first.data().nbytes / len(first))
                    break
        return self._row_bytes or 100.0

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ends()

    def _ends(self) -> dict[int, int]:
        return {p: o.next for p, o in self._open_log().offsets(self._options.stream).items()}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """How far the next batch may go. With `wait_ms`, waits up to that long for new events."""
        at = {int(p): offset for p, offset in start.items()}
        log, stream = self._open_log(), self._options.stream
        self._check_same(log.stream(stream).id)
        if self._options.wait_ms and self._target is None:
            positions = {p: at.get(p, 0) for p in range(log.stream(stream).partitions)}
            log.wait({stream: positions}, self._options.wait_ms / 1000)
        ends = self._target if self._target is not None else self._ends()
        self._check_reached(at, ends)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if not isinstance(limit, ReadMaxRows | ReadAllAvailable):
            raise UsageError(f"the read limit {limit!r} is not supported")
        return _show_offsets(bound_rows(log, stream, at, ends, rows))

    def _check_same(self, found: int) -> None:
        if self._id not in (None, found):
            raise _error_made_anew(self._options.stream)
        self._id = found

    def _check_reached(self, at: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Raise if the stream ends before what was read: offsets only grow, so it was replaced."""
        if any(at.get(partition, 0) > end for partition, end in ends.items()):
            raise _error_made_anew(self._options.stream)

    def reportLatestOffset(self) -> dict[str, int]:
        return _show_offsets(self._ends())

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        log = self._open_log()
        first = self._check_start(log, {int(p): o for p, o in start.items()})
        last = {int(p): o for p, o in end.items()}
        return splits(log, self._options.stream, first, last, self._options.split_rows)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to do: events stay until retention removes them."""

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def __getstate__(self) -> dict[str, object]:
        # Sent to the tasks, which open a log of their own.
        return {**self.__dict__, "_log": None}


def _error_made_anew(stream: str) -> UnknownObjectError:
    return UnknownObjectError(
        f"stream {stream} was dropped and created again since it was read: restart the query with "
        "a new checkpoint, to read the new stream from its beginning"
    )


def _show_offsets(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): offset for partition, offset in sorted(offsets.items())}


def bound_rows(
    log: Log, stream: str, start: Mapping[int, int], end: Mapping[int, int], rows_max: int | None
) -> dict[int, int]:
    """Offsets towards `end`, at most `rows_max` rows ahead, with a fair share per partition."""
    at = {p: start.get(p, 0) for p in end}
    waiting = {p: log.count(stream, p, at[p], end[p]).events for p in end}
    if rows_max is None or sum(waiting.values()) <= rows_max:
        return {p: max(end[p], at[p]) for p in end}
    left = rows_max
    ordered = sorted(waiting, key=lambda p: waiting[p])
    for index, partition in enumerate(ordered):
        share = min(waiting[partition], left // (len(ordered) - index))
        at[partition] = log.advance(stream, partition, at[partition], share)
        left -= share
    return at
