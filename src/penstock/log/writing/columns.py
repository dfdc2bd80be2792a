"""Checks columns that a user appends against the stream."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import LimitError, RecordError, UsageError
from penstock.log.declaring.objects import Stream
from penstock.records.arrow import (
    NOT_JSON,
    UTC_MICROSECONDS,
    arrow_schema,
    check_times,
    conform,
    is_alike,
    nullable,
)
from penstock.records.cloudevents import check_header
from penstock.records.documents import check_depth
from penstock.records.event import DATA, DELETED, ENVELOPE, GIVEN, ids_of, key_bytes, key_column
from penstock.records.schema import Scalar

ID_CHARS_MAX = 500
_ALLOWED = tuple(name for name in GIVEN if name != "_source")


def one_batch(data: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """The data as one batch, with each column once."""
    if not isinstance(data, pa.RecordBatch | pa.Table):
        raise UsageError(
            f"append takes a pyarrow.Table or RecordBatch, not {type(data).__name__}: use send "
            "for single events"
        )
    names = data.schema.names
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"column {double} occurs more than once: keep only one")
    try:
        data.validate(full=True)
    except pa.ArrowException as error:
        raise RecordError(f"the columns are not valid: {error}") from None
    if isinstance(data, pa.RecordBatch):
        return data
    batches = data.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=data.schema)


def given_names(stream: Stream, batch: pa.RecordBatch) -> list[str]:
    """The envelope columns that the user gives; `RecordError` if a writer may not set one."""
    names = [name for name in batch.schema.names if name.startswith("_") and name != DELETED]
    if stream.spec.key is not None and DELETED in batch.schema.names:
        names = [name for name in names if name != "_key"]  # checked with the data
    wrong = [name for name in names if name not in _ALLOWED]
    if wrong:
        raise RecordError(
            f"column {wrong[0]} cannot be set by a writer: leave it out "
            f"(allowed: {', '.join(_ALLOWED)})"
        )
    return names


def data_arrays(stream: Stream, batch: pa.RecordBatch) -> tuple[list[pa.Array], list[pa.Field]]:
    """The stream's own columns, checked; and columns derived from them that must be stored."""
    plain = batch.select([name for name in batch.schema.names if not name.startswith("_")])
    deleted = _deletions(stream, batch)
    if stream.record is None:
        return _untyped_arrays(stream, batch, plain, deleted)
    if deleted is None:
        plain = conform(plain, stream.record)
        return list(plain.columns), list(plain.schema)
    # Only entries that are not deleted must be complete records.
    conform(plain.filter(pc.invert(deleted)), stream.record)
    schema = nullable(arrow_schema(stream.record))
    columns = [_nullable_column(plain, field) for field in schema]
    fields = [*schema, pa.field(DELETED, pa.bool_())]
    if stream.spec.key is None:
        return [*columns, deleted], fields
    own = key_column(columns[schema.get_field_index(stream.spec.key)])
    keys = _keys_of_changes(stream, batch, deleted, own)
    return [*columns, deleted, keys], [*fields, pa.field("_key", pa.binary())]


def _keys_of_changes(
    stream: Stream, batch: pa.RecordBatch, deleted: pa.Array, own: pa.Array
) -> pa.Array:
    """Keys of a table's changes: the field, or for deleted entries the given key."""
    index = batch.schema.get_field_index("_key")
    if index < 0:
        return own
    given = key_column(batch.column(index))
    wrong = pc.and_(pc.and_(pc.invert(deleted), pc.is_valid(given)), pc.not_equal(given, own))
    if pc.any(wrong).as_py():
        raise UsageError(
            f"stream {stream.name} takes its key from field {stream.spec.key}, but column _key "
            "differs from it in entries that are not deleted: set _key only for deleted entries"
        )
    return pc.if_else(deleted, pc.coalesce(given, own), own)


def _deletions(stream: Stream, batch: pa.RecordBatch) -> pa.Array | None:
    index = batch.schema.get_field_index(DELETED)
    if index < 0:
        return None
    if not stream.spec.table:
        raise RecordError(f"stream {stream.name} is not a table: leave out column {DELETED}")
    column = batch.column(index)
    if not pa.types.is_boolean(column.type):
        raise RecordError(f"column {DELETED} must be bool, not {column.type}")
    return column.fill_null(False)


def _nullable_column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index < 0:
        return pa.nulls(batch.num_rows, field.type)
    return batch.column(index).cast(field.type)


def _untyped_arrays(
    stream: Stream, batch: pa.RecordBatch, plain: pa.RecordBatch, deleted: pa.Array | None
) -> tuple[list[pa.Array], list[pa.Field]]:
    kind = pa.binary() if stream.spec.content == "bytes" else pa.string()
    if plain.schema.names != [DATA] or not is_alike(plain.column(0).type, kind):
        raise RecordError(f"stream {stream.name} has one data column, {DATA}: {kind}")
    column = plain.column(0).cast(kind)
    needed = column if deleted is None else column.filter(pc.invert(deleted))
    if needed.null_count:
        raise RecordError(f"stream {stream.name}: column {DATA} contains nulls")
    arrays, fields = [column], [pa.field(DATA, kind)]
    if stream.spec.content == "json":
        own = pa.array(_json_keys(stream, column), pa.binary())
        if stream.spec.key is not None:
            gone = deleted if deleted is not None else pa.repeat(pa.scalar(False), len(column))
            arrays.append(_keys_of_changes(stream, batch, gone, own))
            fields.append(pa.field("_key", pa.binary()))
    if deleted is not None:
        arrays.append(deleted)
        fields.append(pa.field(DELETED, pa.bool_()))
    return arrays, fields


def _json_keys(stream: Stream, column: pa.Array) -> list[bytes | None]:
    """Check that every text is JSON; return the keys, if the stream takes them from a field."""
    keys: list[bytes | None] = []
    field = stream.spec.key
    for row, text in enumerate(column.to_pylist()):
        try:
            if text is None:
                keys.append(None)
                continue
            check_depth(text.encode())
            value = msgspec.json.decode(text)
            keys.append(None if field is None else key_bytes(value[field]))
        except NOT_JSON as error:
            raise RecordError(
                f"stream {stream.name}: row {row} is not valid JSON: {error}"
            ) from None
        except (KeyError, TypeError, IndexError):
            raise RecordError(
                f"stream {stream.name}: row {row} is not an object with a field {field!r}, "
                "which is the stream's key"
            ) from None
    return keys


def given_column(
    stream: Stream, batch: pa.RecordBatch, name: str, headers_bytes_max: int
) -> pa.Array:
    """An envelope column given by the user, checked and cast to the right type."""
    column = batch.column(name)
    if name == "_key":
        if stream.spec.key is not None:
            raise UsageError(
                f"stream {stream.name} takes its key from field {stream.spec.key}: leave out "
                "column _key"
            )
        return key_column(column)
    wanted = UTC_MICROSECONDS if name == "_time" else ENVELOPE.field(name).type
    if not is_alike(column.type, wanted):
        raise RecordError(f"column {name} must be {wanted}, not {column.type}")
    column = column.cast(wanted)
    if name == "_time":
        check_times(column, Scalar("datetime"), "column _time")
    if name == "_headers":
        for row in filter(None, column.to_pylist()):
            _check_headers(row, headers_bytes_max)
    if name == "_type" and pc.any(pc.equal(column, "")).as_py():
        raise RecordError("column _type contains an empty type: use null instead")
    return column


def _check_headers(row: list[tuple[str, str]], headers_bytes_max: int) -> None:
    for header, value in row:
        check_header(header, value)
    if len(dict(row)) != len(row):
        raise RecordError("a row of column _headers has the same header twice")
    size = sum(len(header) + len(value) for header, value in row)
    if size > headers_bytes_max:
        raise LimitError(
            f"the headers of a row have {size} bytes; at most {headers_bytes_max} are allowed "
            "(headers_bytes_max)"
        )


def with_whole_ids(stream: Stream, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with an id for every row, if the user gave only some."""
    index = batch.schema.get_field_index("_id")
    if index < 0:
        if stream.spec.ids == "producer":
            raise UsageError(
                f"stream {stream.name} takes its ids from the producer: add column _id"
            )
        return batch
    given = batch.column(index)
    if given.null_count and stream.spec.ids == "producer":
        raise UsageError(
            f"stream {stream.name} takes its ids from the producer, but column _id has nulls"
        )
    lengths = pc.min_max(pc.utf8_length(given))
    if lengths["min"].as_py() == 0 or (lengths["max"].as_py() or 0) > ID_CHARS_MAX:
        raise RecordError(
            f"column _id contains an empty id, or one longer than {ID_CHARS_MAX} characters"
        )
    if not given.null_count:
        return batch
    return batch.set_column(index, batch.schema.field(index), ids_of(batch))


def widest(column: pa.Array) -> int:
    """An upper bound of a row's bytes in this column."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return (pc.max(pc.binary_length(column)).as_py() or 0) + 4
    if pa.types.is_struct(kind):
        return sum(map(widest, column.flatten()))
    if pa.types.is_list(kind):
        return 4 + _longest(column) * widest(column.flatten())
    if pa.types.is_map(kind):
        longest = max((len(row) for row in column.to_pylist() if row is not None), default=0)
        return 4 + longest * (widest(column.keys) + widest(column.items))
    return 16


def _longest(column: pa.Array) -> int:
    return pc.max(pc.list_value_length(column)).as_py() or 0
