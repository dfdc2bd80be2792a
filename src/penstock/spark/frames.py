"""DataFrames of an app: how streams become them, and how what comes of them is staged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from penstock.app.definitions import Definition, Derivation, StreamJoin
from penstock.app.streams import AppStream
from penstock.app.tables import AppTable
from penstock.app.task import BatchOrder, Outcome, Range, this_worker
from penstock.app.windows import Windows
from penstock.errors import AppError
from penstock.log import OptionValue
from penstock.log.api import Holder, Log, Pin
from penstock.log.objects import Stream, StreamSpec
from penstock.log.table import unpacker
from penstock.records.event import DELETED
from penstock.spark.columns import exchanged, for_spark, record_of, spark_schema, stream_columns
from penstock.spark.sink import stage_batches
from penstock.spark.source import entry_columns
from penstock.spark.worker import worker_log

Options = Mapping[str, OptionValue]
_STAGED = StructType([StructField("outcome", BinaryType())])
#: nodes of Spark's plans that keep something from one batch to the next
STATEFUL = (
    "Aggregate", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "Except", "Intersect",
    "FlatMapGroupsInPandasWithState", "FlatMapGroupsWithState", "TransformWithState",
    "TransformWithStateInPySpark", "TransformWithStateInPandas", "GlobalLimit", "Sort", "Window",
    "FlatMapGroupsInPandas", "FlatMapGroupsInArrow",
)  # fmt: skip


def read_ranges(
    spark: SparkSession, url: str, options: Options, ranges: Sequence[Range], columns: pa.Schema
) -> DataFrame:
    """Events as a DataFrame of these columns, one task for each range."""
    schema = spark_schema(columns)
    if not ranges:
        return spark.createDataFrame([], schema)
    places = [tuple(range_) for range_ in ranges]

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = exchanged(schema)
        log = worker_log(url, options)
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for found in log.read(*places[number]):
                    yield for_spark(found, wanted)

    count = len(places)
    return spark.range(0, count, 1, count).mapInArrow(read, schema)


def read_table(
    spark: SparkSession, url: str, options: Options, table: str, pin: Pin, columns: pa.Schema
) -> DataFrame:
    """The entries of a table at a pinned moment as a DataFrame."""
    schema = spark_schema(columns)

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = exchanged(schema)
        log = worker_log(url, options)
        stream = log.stream(table)
        unpack = unpacker(stream)
        for _ in numbers:
            after: bytes | None = None
            while entries := log.page(table, after, log.limits.page_rows_max, pin):
                values = [unpack(entry.value) for entry in entries]
                yield entry_columns(stream, entries, values, wanted)
                after = entries[-1].key

    return spark.range(0, 1, 1, 1).mapInArrow(read, schema)


def stage_frame(
    frame: DataFrame, url: str, options: Options, holder: Holder, sequence: int, stream: str,
    source: str,
) -> DataFrame:  # fmt: skip
    """A DataFrame that, when collected, has staged its rows: one outcome for each task."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pieces = stage_batches(worker_log(url, options), holder, sequence, stream, batches, source)
        rows = sum(piece.rows for piece in pieces)
        outcome = Outcome(pieces=tuple(pieces), rows_out=rows, worker=this_worker())
        packed = pa.array([msgspec.msgpack.encode(outcome)], pa.binary())
        yield pa.RecordBatch.from_arrays([packed], names=["outcome"])

    return frame.mapInArrow(stage, _STAGED)


def collect_staged(frame: DataFrame) -> list[Outcome]:
    decode = msgspec.msgpack.Decoder(Outcome).decode
    return [decode(bytes(row.outcome)) for row in frame.collect()]


class Shape:
    """What Spark finds when it looks at a definition: its columns, and whether it keeps state."""

    def __init__(self, log: Log, spark: SparkSession, definition: Definition) -> None:
        self.definition = definition
        self.streams: list[AppStream[Any]] = [
            place for place in definition.inputs if isinstance(place, AppStream)
        ]
        if not self.streams:
            raise AppError(
                f"{definition.location}: {definition.name} reads only tables: read the changes of "
                "one of them, table.changes"
            )
        self.tables: list[AppTable[Any]] = [
            place for place in definition.inputs if isinstance(place, AppTable)
        ]
        self._found = {place.name: log.stream(place.name) for place in definition.inputs}
        self.columns = {name: stream_columns(stream) for name, stream in self._found.items()}
        sample = {name: self._sample(spark, name) for name in self._found}
        result = self.applied(sample)
        plan = result._jdf.queryExecution().analyzed()
        nodes = _nodes(plan)
        joins = [n for n in nodes if str(n.nodeName()) == "Join"]
        self.is_stateful = any(_is_stateful(n) for n in nodes) or (
            len(self.streams) > 1 and bool(joins)
        )
        self.output = output_spec(definition, result.schema, self._found)
        self.result_columns = result.columns
        self.plan = stateful_plan(nodes) if self.is_stateful else ""
        self._prune(self.prepared(result), sample)

    def _sample(self, spark: SparkSession, name: str) -> DataFrame:
        # Never run: it is there to be looked at.
        return read_ranges(spark, "", {}, [Range(name, 0, 0, 0)], self.columns[name])

    def applied(self, frames: Mapping[str, DataFrame]) -> DataFrame:
        """What the definition makes of its inputs."""
        definition = self.definition
        given = [frames[place.name] for place in definition.inputs]
        if isinstance(definition, StreamJoin):
            return join_frames(definition, *given)
        assert isinstance(definition, Derivation)  # noqa: S101  the other kind made of frames
        extra = [] if definition.windows is None else [self._window(definition.windows)]
        made = definition.function(*given, *extra)
        if not isinstance(made, DataFrame):
            raise AppError(
                f"{definition.location}: {definition.name} gives {type(made).__name__}; it must "
                "give a DataFrame"
            )
        return made

    def _window(self, windows: Windows) -> Column:
        time = F.col(str(self.streams[0].time))
        size = f"{windows.size_us} microseconds"
        match windows.kind:
            case "tumbling":
                return F.window(time, size).alias("window")
            case "hopping":
                return F.window(time, size, f"{windows.step_us} microseconds").alias("window")
            case "session":
                return F.session_window(time, size).alias("window")

    def prepared(self, frame: DataFrame) -> DataFrame:
        """The result with the columns that its stream or table has, and its key."""
        return with_key(frame, self.definition, self.output)

    def _prune(self, result: DataFrame, sample: Mapping[str, DataFrame]) -> None:
        """Leave out columns that nobody asks for: making and moving them is most of the cost."""
        plan = result._jdf.queryExecution().optimizedPlan()
        used = {_expression_id(a) for a in _items(plan.output())}
        for node in _nodes(plan):
            used |= {_expression_id(a) for a in _items(node.references().toSeq())}
        for name, frame in sample.items():
            output = _items(frame._jdf.queryExecution().analyzed().output())
            kept = [str(a.name()) for a in output if _expression_id(a) in used]
            time = next((s.time for s in self.streams if s.name == name and s.watermark_us), None)
            if time and time not in kept:
                kept.append(time)
            if not kept:
                kept = ["_offset"]
            columns = self.columns[name]
            self.columns[name] = pa.schema([columns.field(c) for c in columns.names if c in kept])


def _is_stateful(node: Any) -> bool:
    return str(node.nodeName()) in STATEFUL


def _nodes(plan: Any) -> list[Any]:
    found = [plan]
    for child in _items(plan.children()):
        found += _nodes(child)
    return found


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


def _expression_id(attribute: Any) -> int:
    return int(attribute.exprId().id())


def stateful_plan(nodes: Sequence[Any]) -> str:
    """What the kept state depends on, in words that stay the same from run to run."""
    lines = []
    for node in nodes:
        if _is_stateful(node) or str(node.nodeName()) in ("Join", "EventTimeWatermark"):
            text = str(node.simpleString(10_000))
            lines.append(re.sub(r"#\d+L?", "", text))
    return "\n".join(lines)


def join_frames(definition: StreamJoin, left: DataFrame, right: DataFrame) -> DataFrame:
    """Pairs within a time of each other; fields of both, those of the right after the left's."""
    one, other = definition.inputs
    assert isinstance(one, AppStream)  # noqa: S101  a join of streams
    assert isinstance(other, AppStream)  # noqa: S101
    within = F.expr(f"INTERVAL {definition.within_us} MICROSECONDS")
    left = left.select([c for c in left.columns if not c.startswith("_")]).alias("left")
    right = right.select([c for c in right.columns if not c.startswith("_")]).alias("right")
    left_time, right_time = F.col(f"left.{one.time}"), F.col(f"right.{other.time}")
    condition = (
        (F.col(f"left.{definition.on}") == F.col(f"right.{definition.on}"))
        & (right_time >= left_time - within)
        & (right_time <= left_time + within)
    )
    joined = left.join(right, condition, {"outer": "full"}.get(definition.how, definition.how))
    key = F.coalesce(F.col(f"left.{definition.on}"), F.col(f"right.{definition.on}"))
    columns = [key.alias(definition.on)]
    taken = {definition.on}
    for side, frame, name in (("left", left, one.name), ("right", right, other.name)):
        for column in frame.columns:
            if column == definition.on:
                continue
            shown = column if column not in taken else f"{name}_{column}"
            taken.add(shown)
            columns.append(F.col(f"{side}.{column}").alias(shown))
    return joined.select(columns)


def _simple(kind: object) -> bool:
    return str(kind) in ("StringType()", "LongType()", "IntegerType()", "BinaryType()")


def output_spec(
    definition: Definition, schema: StructType, inputs: Mapping[str, Stream]
) -> StreamSpec:
    """How the stream or table that a DataFrame fills is declared."""
    output = definition.outputs[0]
    if output.spec is not None:
        return output.spec
    data = StructType([f for f in schema.fields if not f.name.startswith("_")])
    keys = (output.key,) if isinstance(output.key, str) else output.key or ()
    missing = [key for key in keys if key not in data.names]
    if missing:
        raise AppError(
            f"{definition.location}: {definition.name} has the key {missing[0]}, which is no "
            f"column of what it gives: {', '.join(data.names)}"
        )
    if not data.fields:
        raise AppError(f"{definition.location}: {definition.name} gives no columns")
    name = "".join(part.title() for part in output.name.replace("-", "_").split("_"))
    is_table = isinstance(output, AppTable)
    field = keys[0] if len(keys) == 1 and _simple(data[keys[0]].dataType) else None
    partitions = None
    if isinstance(output, AppStream):
        partitions = output.settings.get("partitions") or max(
            stream.partitions for stream in inputs.values()
        )
    return StreamSpec(
        name=output.name,
        record=record_of(name, data, required=keys),
        content="record",
        key=field,
        time=output.time if isinstance(output, AppStream) else None,
        table=is_table,
        partitions=int(partitions) if partitions is not None else None,  # type: ignore[call-overload]
    )


def with_key(frame: DataFrame, definition: Definition, spec: StreamSpec) -> DataFrame:
    """The columns that are written: the record's, `_key` where it is no field, and the time."""
    output = definition.outputs[0]
    assert spec.record is not None  # noqa: S101  what is derived has a record
    names = [field.name for field in spec.record.fields]
    columns = [F.col(name) for name in names if name in frame.columns]
    keys = (output.key,) if isinstance(output.key, str) else output.key or ()
    if keys and spec.key is None:
        parts = [_key_text(frame.schema[key].dataType, key) for key in keys]
        columns.append(F.to_json(F.array(*parts)).cast(BinaryType()).alias("_key"))
    elif spec.key is None and "_key" in frame.columns and not keys:
        columns.append(F.col("_key"))
    if spec.time is None and "_time" in frame.columns:
        columns.append(F.col("_time"))
    if spec.table and DELETED in frame.columns:
        columns.append(F.col(DELETED))
    return frame.select(columns)


def _key_text(kind: object, name: str) -> Column:
    if isinstance(kind, StructType) and "start" in kind.names:
        return F.date_format(F.col(f"{name}.start"), "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'")
    return F.col(name).cast(StringType())


class FrameExecutor:
    """Runs a definition without state as one Spark job per batch: read, transform, stage."""

    def __init__(
        self, spark: SparkSession, url: str, options: Options, app: str, shape: Shape
    ) -> None:
        self._spark = spark
        self._url = url
        self._options = dict(options)
        self._shape = shape
        self._source = f"{app}.{shape.definition.name}"

    def run(self, batch: BatchOrder) -> list[Outcome]:
        shape = self._shape
        ranges = [range_ for split in batch.splits for range_ in split.ranges]
        frames: dict[str, DataFrame] = {}
        for stream in shape.streams:
            mine = [r for r in ranges if r.stream == stream.name]
            frames[stream.name] = read_ranges(
                self._spark, self._url, self._options, mine, shape.columns[stream.name]
            )
        for table in shape.tables:
            assert batch.pin is not None  # noqa: S101  a query that reads tables pins them
            frames[table.name] = read_table(
                self._spark, self._url, self._options, table.name, batch.pin,
                shape.columns[table.name],
            )  # fmt: skip
        result = shape.prepared(shape.applied(frames))
        staged = stage_frame(
            result, self._url, self._options, batch.holder, batch.sequence, shape.output.name,
            self._source,
        )  # fmt: skip
        outcomes = collect_staged(staged)
        return [*outcomes, Outcome(rows_in=sum(r.end - r.start for r in ranges))]

    def close(self) -> None:
        pass
