"""Events: a record with its envelope, one at a time (`Event`) or as Arrow columns.

A stored batch contains the data columns and only those envelope columns that differ from row to
row. Values that are the same for the whole batch, or derived from a data column, are recorded once
in the batch's metadata (`Stamp`) and made into a column on demand.
"""

from __future__ import annotations

import datetime as dt
import functools
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import RecordError
from penstock.records.arrow import UTC_MICROSECONDS
from penstock.records.ranges import OUT_OF_RANGE, is_in_range

Key = str | int | bytes
JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
T_co = TypeVar("T_co", covariant=True)

STAMP = b"penstock.stamp"
DATA = "data"
DELETED = "_deleted"
#: the packed value of a table's entry after a change, if the change does not contain it
ENTRY = "_entry"
#: a row's number in the batch that its ids count from, if rows were removed from it
NUMBER = "_n"
ENVELOPE = pa.schema(
    [
        pa.field("_key", pa.binary()),
        pa.field("_time", UTC_MICROSECONDS, nullable=False),
        pa.field("_id", pa.string(), nullable=False),
        pa.field("_type", pa.string(), nullable=False),
        pa.field("_source", pa.string(), nullable=False),
        pa.field("_headers", pa.map_(pa.string(), pa.string())),
        pa.field("_partition", pa.int32(), nullable=False),
        pa.field("_offset", pa.int64(), nullable=False),
    ]
)
#: envelope columns that a writer may set
GIVEN = ("_key", "_time", "_id", "_type", "_source", "_headers")


class Event(msgspec.Struct, Generic[T_co], frozen=True, kw_only=True):
    """One event; `data` is `None` if a table's entry was deleted."""

    data: T_co
    id: str
    type: str
    source: str
    time: dt.datetime
    key: bytes | None = None
    headers: Mapping[str, str] = {}


class StoredEvent(Event[T_co], frozen=True, kw_only=True):
    """One event as read from a stream, with its place there."""

    stream: str
    partition: int
    offset: int


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Envelope values that all events of a batch share, or how to derive them from the data.

    Ids are `prefix-n`, numbered from `id_first`. `key_field` and `time_field` name the data
    column that is the key or the time. An explicit column takes precedence over the stamp.
    """

    id_prefix: str
    id_first: int = 0
    time_us: int
    type: str
    source: str
    key_field: str | None = None
    time_field: str | None = None


def key_bytes(key: Key | None) -> bytes | None:
    """The bytes that decide the partition: text as UTF-8, integers as decimal text."""
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise RecordError(f"a key must be str, int or bytes, not {type(key).__name__}")
    try:
        return str(key).encode()
    except UnicodeEncodeError:
        raise RecordError(
            f"key {key!r} is not valid Unicode: it contains an unpaired surrogate"
        ) from None


def key_column(column: pa.Array) -> pa.Array:
    """`key_bytes` of a whole column."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return column.cast(pa.binary())
    if pa.types.is_large_string(column.type):
        column = column.cast(pa.string())
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    if not pa.types.is_string(column.type):
        raise RecordError(
            f"a key must be str, int or bytes, not {column.type}: choose another column"
        )
    return column.cast(pa.binary())


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key: the same for every writer, see the contract's promise 7."""
    return zlib.crc32(key) % partitions


def partitions_of(keys: pa.Array, partitions: int, keyless: int) -> pa.Array:
    """`partition_of` of a whole column; rows without a key go to the partition `keyless`."""
    if keys.null_count == len(keys):
        return pa.repeat(pa.scalar(keyless, pa.int32()), len(keys))
    encoded = keys.dictionary_encode()
    homes = pa.array(
        [zlib.crc32(key) % partitions for key in encoded.dictionary.to_pylist()], pa.int32()
    )
    return homes.take(encoded.indices).fill_null(keyless)


def new_id_prefix() -> str:
    """A prefix for ids that no other writer has: 80 random bits."""
    return secrets.token_hex(10)


def microseconds(time: dt.datetime) -> int:
    """Microseconds since 1970, exact."""
    if time.tzinfo is None:
        raise RecordError(f"time {time.isoformat()} has no time zone: use datetime.now(UTC)")
    if not is_in_range(time):
        raise RecordError(f"{time.isoformat()} is {OUT_OF_RANGE}")
    return (time - _EPOCH) // _MICROSECOND


def now_us() -> int:
    """The current time, in microseconds since 1970."""
    return time.time_ns() // 1000


def from_microseconds(time_us: int) -> dt.datetime:
    return _EPOCH + time_us * _MICROSECOND


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_stamp_encoder = msgspec.json.Encoder()
_stamp_decoder = msgspec.json.Decoder(Stamp)


def add_stamp(batch: pa.RecordBatch, stamp: Stamp) -> pa.RecordBatch:
    return batch.replace_schema_metadata({STAMP: _stamp_encoder.encode(stamp)})


def stamp_of(batch: pa.RecordBatch) -> Stamp:
    return _stamp_decoder.decode(batch.schema.metadata[STAMP])


def data_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Only the record's own columns, without the envelope."""
    return batch.select([name for name in batch.schema.names if not name.startswith("_")])


def keys_of(batch: pa.RecordBatch) -> pa.Array:
    """The key column of a stamped batch."""
    return _envelope_column(batch, stamp_of(batch), "_key")


def ids_of(batch: pa.RecordBatch) -> pa.Array:
    """The ids of a stamped batch."""
    return _envelope_column(batch, stamp_of(batch), "_id")


def first_id(batch: pa.RecordBatch) -> str:
    """The id of a stamped batch's first event."""
    if "_id" in batch.schema.names and batch.column("_id")[0].is_valid:
        return str(batch.column("_id")[0])
    stamp = stamp_of(batch)
    return f"{stamp.id_prefix}-{stamp.id_first}"


def add_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same events, each with its number in the batch, so that rows can be removed."""
    if "_id" in batch.schema.names or NUMBER in batch.schema.names:
        return batch
    numbers = counting(batch.num_rows).cast(pa.int32())
    return batch.add_column(batch.num_columns, pa.field(NUMBER, pa.int32()), numbers)


def slice_stamped(batch: pa.RecordBatch, start: int, count: int) -> pa.RecordBatch:
    """Rows of a stamped batch; their ids do not change."""
    part = batch.slice(start, count)
    if start == 0 or NUMBER in batch.schema.names:
        return part
    stamp = stamp_of(batch)
    return add_stamp(part, msgspec.structs.replace(stamp, id_first=stamp.id_first + start))


def envelope(batch: pa.RecordBatch, names: Sequence[str]) -> dict[str, pa.Array]:
    """The named envelope columns (those of `GIVEN`) of a stamped batch."""
    stamp = stamp_of(batch)
    return {name: _envelope_column(batch, stamp, name) for name in names}


def with_explicit_envelope(batch: pa.RecordBatch, plain: pa.RecordBatch) -> pa.RecordBatch:
    """The data columns `plain`, together with every envelope column of `batch`."""
    columns = envelope(batch, GIVEN)
    arrays, fields = list(plain.columns), list(plain.schema)
    for name, column in columns.items():
        arrays.append(column)
        fields.append(pa.field(name, column.type))
    if DELETED in batch.schema.names:
        arrays.append(batch.column(DELETED))
        fields.append(pa.field(DELETED, pa.bool_()))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, batch.schema.metadata))


def _envelope_column(batch: pa.RecordBatch, stamp: Stamp, name: str) -> pa.Array:
    given = batch.schema.get_field_index(name)
    if given >= 0:
        column = batch.column(given)
        if column.null_count == 0 or name in ("_key", "_headers"):
            return column
        return pc.coalesce(column, _stamped_column(batch, stamp, name))
    return _stamped_column(batch, stamp, name)


def _stamped_column(batch: pa.RecordBatch, stamp: Stamp, name: str) -> pa.Array:
    rows = batch.num_rows
    match name:
        case "_key" if stamp.key_field is not None:
            return key_column(batch.column(stamp.key_field))
        case "_time" if stamp.time_field is not None:
            column = batch.column(stamp.time_field)
            return column.fill_null(_time_scalar(stamp.time_us)) if column.null_count else column
        case "_time":
            return pa.repeat(_time_scalar(stamp.time_us), rows)
        case "_id":
            named = batch.schema.get_field_index(NUMBER)
            numbers = batch.column(named).cast(pa.int64()) if named >= 0 else counting(rows)
            text = pc.add(numbers, stamp.id_first).cast(pa.string())
            return pc.binary_join_element_wise(stamp.id_prefix, text, "-")
        case "_type":
            return pa.repeat(pa.scalar(stamp.type), rows)
        case "_source":
            return pa.repeat(pa.scalar(stamp.source), rows)
    return pa.nulls(rows, ENVELOPE.field(name).type)


def _time_scalar(time_us: int) -> pa.Scalar:
    return pa.scalar(time_us, pa.int64()).cast(UTC_MICROSECONDS)


@functools.lru_cache(maxsize=8)
def _count_up(rows: int) -> pa.Array:
    return pa.arange(0, rows)


def counting(rows: int) -> pa.Array:
    """0, 1, 2, … as int64, without creating it each time."""
    return _count_up(1 << max(rows - 1, 1).bit_length()).slice(0, rows)
