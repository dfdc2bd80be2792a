"""Columns that a user appends: whether they are what the stream holds."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import RecordError, UsageError
from penstock.log.objects import Stream
from penstock.records.arrow import (
    UTC_MICROSECONDS,
    arrow_schema,
    conform,
    nullable,
)
from penstock.records.cloudevents import check_header
from penstock.records.event import (
    DATA,
    DELETED,
    ENVELOPE,
    key_column,
)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def data_arrays(stream: Stream, batch: pa.RecordBatch) -> tuple[list[pa.Array], list[pa.Field]]:
    plain = batch.select([name for name in batch.schema.names if not name.startswith("_")])
    deleted = DELETED in batch.schema.names
    if deleted and not stream.spec.table:
        raise RecordError(f"stream {stream.name} is not a table: leave the column {DELETED} out")
    if stream.record is None:
        kind = pa.binary() if stream.spec.content == "bytes" else pa.string()
        if plain.schema.names != [DATA] or plain.column(0).type != kind:
            raise RecordError(f"stream {stream.name} has one data column, {DATA}: {kind}")
        _check_json(stream, plain.column(0))
    elif deleted:
        return _table_arrays(stream, batch, plain)
    else:
        plain = conform(plain, stream.record)
    return list(plain.columns), list(plain.schema)


def _check_json(stream: Stream, column: pa.Array) -> None:
    if stream.spec.content != "json":
        return
    for row, text in enumerate(column.to_pylist()):
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, TypeError) as error:
            raise RecordError(f"stream {stream.name}: row {row} is not JSON: {error}") from None


def _table_arrays(
    stream: Stream, batch: pa.RecordBatch, plain: pa.RecordBatch
) -> tuple[list[pa.Array], list[pa.Field]]:
    """Changes of a typed table, some of which delete: only the others must be whole records."""
    deleted = batch.column(DELETED).fill_null(False)
    record = stream.record
    assert record is not None  # noqa: S101  only called for typed streams
    conform(plain.filter(pc.invert(deleted)), record)
    schema = nullable(arrow_schema(record))
    columns = [plain.column(field.name).cast(field.type) for field in schema]
    return [*columns, deleted], [*schema, pa.field(DELETED, pa.bool_())]


def given_column(stream: Stream, batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(name)
    if name == "_key":
        if stream.spec.key is not None and not stream.spec.table:
            raise UsageError(
                f"stream {stream.name} takes its key from the field {stream.spec.key}; "
                "leave the column _key out"
            )
        return key_column(column)
    wanted = UTC_MICROSECONDS if name == "_time" else ENVELOPE.field(name).type
    try:
        column = column.cast(wanted)
    except pa.ArrowException as error:
        raise RecordError(f"the column {name} is {column.type}, not {wanted}: {error}") from None
    if name == "_headers":
        for row in filter(None, column.to_pylist()):
            for header, value in row:
                check_header(header, value)
    return column


def widest(column: pa.Array) -> int:
    """An upper bound of a row's bytes in this column."""
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return (pc.max(pc.binary_length(column)).as_py() or 0) + 4
    if pa.types.is_nested(column.type):
        return int(column.nbytes)
    return 16
