"""What Spark finds when it analyzes a definition: its columns, its state, its output."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from pyspark.sql.types import BinaryType, StringType, StructType

from penstock.app.declaring.definitions import Definition, Derivation, StreamJoin
from penstock.app.declaring.streams import AppStream
from penstock.app.declaring.tables import AppTable
from penstock.app.declaring.windows import Windows
from penstock.errors import AppError
from penstock.log.api import Log
from penstock.log.batch import stream_columns
from penstock.log.declaring.objects import Stream, StreamSpec
from penstock.records.event import DELETED
from penstock.spark.columns import record_of
from penstock.spark.frames import read_stream

#: nodes of Spark's plans that keep state from one batch to the next
STATEFUL = (
    "Aggregate",
    "Deduplicate",
    "DeduplicateWithinWatermark",
    "Distinct",
    "Except",
    "Intersect",
    "FlatMapGroupsInPandasWithState",
    "FlatMapGroupsWithState",
    "TransformWithState",
    "TransformWithStateInPySpark",
    "TransformWithStateInPandas",
    "GlobalLimit",
    "Sort",
    "Window",
    "FlatMapGroupsInPandas",
    "FlatMapGroupsInArrow",
    "FlatMapCoGroupsInPandas",
    "FlatMapCoGroupsInArrow",
    "ExceptAll",
    "IntersectAll",
    "Offset",
    "Tail",
    "Pivot",
)


class Shape:
    """What Spark finds when it analyzes a definition: its columns, and whether it keeps state."""

    def __init__(self, log: Log, spark: SparkSession, definition: Definition) -> None:
        self.definition = definition
        self.streams: list[AppStream[object]] = [
            place for place in definition.inputs if isinstance(place, AppStream)
        ]
        if not self.streams:
            raise AppError(
                f"{definition.location}: {definition.name} reads only tables: use the changes of "
                "one of them (table.changes) as an input"
            )
        self.tables: list[AppTable[object]] = [
            place for place in definition.inputs if isinstance(place, AppTable)
        ]
        self._found = {place.name: log.stream(place.name) for place in definition.inputs}
        self.offered = {name: stream_columns(stream) for name, stream in self._found.items()}
        self.columns = dict(self.offered)
        sample = {name: self._sample(spark, name) for name in self._found}
        self._leaves = {
            _expression_id(attribute): name
            for name, frame in sample.items()
            for attribute in _items(frame._jdf.queryExecution().analyzed().output())
        }
        result = self.apply(sample)
        plan = result._jdf.queryExecution().analyzed()
        nodes = _nodes(plan)
        self.is_stateful = any(_is_stateful(n) for n in nodes)
        for join in (node for node in nodes if str(node.nodeName()) == "Join"):
            self.is_stateful = self._joins_streams(join) or self.is_stateful
        self.output = output_spec(definition, result.schema, self._found)
        order = [name for node in nodes for name in self._leaf(node)]
        self.plan = f"{stateful_plan(nodes)}\nof {', '.join(order)}" if self.is_stateful else ""
        self.is_deterministic = bool(plan.deterministic())
        if self.is_stateful:
            self._check_repeatable()
        self._prune(self.add_key(result), sample)

    def _joins_streams(self, join: Any) -> bool:
        """Whether both sides have events; refuses a join that would repeat rows of a table in each
        batch."""
        left, right = (self._sources(child) for child in _items(join.children()))
        streams = {stream.name for stream in self.streams}
        if left & streams and right & streams:
            return True
        kind = str(join.joinType().toString())
        kept = {"LeftOuter": [left], "LeftAnti": [left], "RightOuter": [right]}
        for side in kept.get(kind, [left, right] if kind == "FullOuter" else []):
            if side and not side & streams:
                raise AppError(
                    f"{self.definition.location}: {self.definition.name} would repeat, in every "
                    "batch, the rows of a table that match no event: join the other way round"
                )
        return False

    def _leaf(self, node: Any) -> list[str]:
        """The input that a leaf of the plan reads; Spark keeps offsets in the order of leaves."""
        if str(node.nodeName()) != "MapInArrow" or not node.output().size():
            return []
        name = self._leaves.get(_expression_id(node.output().apply(0)))
        return [] if name is None else [name]

    def _sources(self, plan: Any) -> set[str]:
        """The inputs that a part of a plan reads."""
        found = set()
        for node in _nodes(plan):
            for attribute in _items(node.output()):
                name = self._leaves.get(_expression_id(attribute))
                if name is not None:
                    found.add(name)
            if _is_copied_source(node) and not self._leaf(node):
                found |= {stream.name for stream in self.streams}
        return found

    def _check_repeatable(self) -> None:
        """Raise if repeating a batch, which rebuilds the state, could yield a different state."""
        where = f"{self.definition.location}: {self.definition.name} keeps state"
        if self.tables:
            raise AppError(
                f"{where} and reads table {self.tables[0].name}, which may have changed when a "
                "batch is repeated: look the table up first (stream.lookup), or join it afterwards"
            )
        if not self.is_deterministic:
            raise AppError(
                f"{where} and is not deterministic: derive a stream with the random part first, "
                "and keep state over that stream"
            )

    def _sample(self, spark: SparkSession, name: str) -> DataFrame:
        # Never run, only analyzed.
        return read_stream(spark, "", {}, name, self.columns[name], 1)

    def apply(self, frames: Mapping[str, DataFrame]) -> DataFrame:
        """The DataFrame that the definition makes from its inputs."""
        definition = self.definition
        given = [frames[place.name] for place in definition.inputs]
        if isinstance(definition, StreamJoin):
            return join_frames(definition, *given)
        assert isinstance(definition, Derivation)  # noqa: S101  the other kind made of frames
        extra = [] if definition.windows is None else [self._window(definition.windows)]
        made = definition.function(*given, *extra)
        if not isinstance(made, DataFrame):
            raise AppError(
                f"{definition.location}: {definition.name} returns {type(made).__name__}; it "
                "must return a DataFrame"
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

    def add_key(self, frame: DataFrame) -> DataFrame:
        """The result with the columns of its stream or table, and its key."""
        return with_key(frame, self.definition, self.output)

    def _prune(self, result: DataFrame, sample: Mapping[str, DataFrame]) -> None:
        """Omit columns that are not used: producing and moving them is most of the cost."""
        try:
            plan = result._jdf.queryExecution().optimizedPlan()
        except AnalysisException:
            return  # it has an operator that only streams can have: the used columns are unknown
        nodes = _nodes(plan)
        used = {_expression_id(a) for a in _items(plan.output())}
        for node in nodes:
            used |= {_expression_id(a) for a in _items(node.references().toSeq())}
        # If an input is used twice, the columns of the copy are known only by name.
        copied = {
            str(attribute.name())
            for node in nodes
            if _is_copied_source(node) and not self._leaf(node)
            for attribute in _items(node.output())
            if _expression_id(attribute) in used
        }
        for name, frame in sample.items():
            output = _items(frame._jdf.queryExecution().analyzed().output())
            kept = {str(a.name()) for a in output if _expression_id(a) in used} | copied
            if kept.isdisjoint(self.offered[name].names):
                kept = {"_offset"}
            columns = self.columns[name]
            self.columns[name] = pa.schema([columns.field(c) for c in columns.names if c in kept])


def _is_copied_source(node: Any) -> bool:
    """Whether a node is one of our sources; Spark gives the columns of a copy new ids."""
    below = [str(child.nodeName()) for child in _items(node.children())]
    return str(node.nodeName()) == "MapInArrow" and below == ["Range"]


def _is_stateful(node: Any) -> bool:
    return str(node.nodeName()) in STATEFUL


def _nodes(plan: Any) -> list[Any]:
    """The nodes of a plan, including those of its subqueries."""
    found = [plan]
    for child in [*_items(plan.children()), *_items(plan.subqueries())]:
        found += _nodes(child)
    return found


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


def _expression_id(attribute: Any) -> int:
    return int(attribute.exprId().id())


def stateful_plan(nodes: Sequence[Any]) -> str:
    """What the kept state depends on, as text that is the same in every run."""
    lines = []
    for node in nodes:
        if _is_stateful(node) or str(node.nodeName()) in ("Join", "EventTimeWatermark"):
            text = str(node.simpleString(10_000))
            lines.append(re.sub(r"#\d+L?", "", text))
    return "\n".join(lines)


def join_frames(definition: StreamJoin, left: DataFrame, right: DataFrame) -> DataFrame:
    """Pairs of rows within a time of each other; the fields of the left side, then the right."""
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
    """The declaration of the stream or table that a DataFrame fills."""
    output = definition.outputs[0]
    if output.spec is not None:
        return output.spec
    data = StructType([f for f in schema.fields if not f.name.startswith("_")])
    keys = (output.key,) if isinstance(output.key, str) else output.key or ()
    missing = [key for key in keys if key not in data.names]
    if missing:
        raise AppError(
            f"{definition.location}: {definition.name} has the key {missing[0]}, which is not "
            f"a column of the DataFrame that it returns: {', '.join(data.names)}"
        )
    wrong = [name for name in data.names if not name.isidentifier()]
    if wrong:
        raise AppError(
            f"{definition.location}: {definition.name} returns the column {wrong[0]!r}, which "
            "is not a valid name for a field: rename it with alias()"
        )
    if not data.fields:
        raise AppError(
            f"{definition.location}: {definition.name} returns no columns: select at least one"
        )
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
    """The columns to write: those of the record, `_key` if it is not a field, and the time."""
    output = definition.outputs[0]
    assert spec.record is not None  # noqa: S101  derived streams have one
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
