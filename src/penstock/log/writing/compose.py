"""From what users send to parts that a log can commit: validation, ids, keys, sizes.

Everything a user can get wrong about an event is found here, before anything is written.
"""

from __future__ import annotations

import datetime as dt
import threading
import time as clock
import uuid
from collections.abc import Mapping, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import LimitError, RecordError, UsageError
from penstock.log.api import Limits, Part
from penstock.log.declaring.names import check_text
from penstock.log.declaring.objects import Stream, check_writable_by_user
from penstock.log.writing.columns import (
    data_arrays,
    given_column,
    given_names,
    one_batch,
    widest,
    with_whole_ids,
)
from penstock.records.arrow import (
    arrow_schema,
    codec_of,
    codec_of_schema,
    conform,
    nullable,
)
from penstock.records.cloudevents import check_header
from penstock.records.documents import check_depth
from penstock.records.event import (
    DATA,
    DELETED,
    ENVELOPE,
    Key,
    Stamp,
    add_stamp,
    key_bytes,
    keys_of,
    microseconds,
    new_id_prefix,
)
from penstock.records.evolution import evolution_reasons
from penstock.records.schema import Record, Schema, schema_of

SOURCE_CHARS_MAX = 200
TEXT_CHARS_MAX = 500
EVENT_OVERHEAD_BYTES = 1000
"""Approximately how much memory a waiting event takes besides its data."""


class Outgoing(msgspec.Struct, frozen=True):
    """An event that was checked and given an id; `data` is a record, or packed JSON or bytes."""

    data: Record | bytes | str | None
    id: str
    key: bytes | None
    time_us: int | None
    type: str | None
    headers: Mapping[str, str] | None
    size: int


class EventOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope fields that a sender may set; each has a sensible default."""

    key: Key | None = None
    id: str | int | None = None
    time: dt.datetime | None = None
    type: str | None = None
    headers: Mapping[str, str] | None = None


class Composer:
    """Makes the events of one writer, with ids that no other writer uses.

    Safe to use from several threads.
    """

    def __init__(self, source: str, limits: Limits) -> None:
        if not source or len(source) > SOURCE_CHARS_MAX:
            raise UsageError(f"a source (client id) must have 1 to {SOURCE_CHARS_MAX} characters")
        self.source = source
        self._limits = limits
        self._prefix = new_id_prefix()
        self._next = 0
        self._lock = threading.Lock()
        self._checked: set[tuple[int, int, type]] = set()

    # One event at a time

    def admit(
        self, stream: Stream, data: object, options: EventOptions, *, system: bool = False
    ) -> Outgoing:
        """Check one event and give it an id. Raises kinds of `UsageError`, and then keeps nothing.

        Only Penstock itself (`system`) may write to the system's streams.
        """
        if not system:
            check_writable_by_user(stream.name)
        packed, size = self._pack(stream, data)
        key = self._key(stream, packed, options.key)
        headers = _check_headers(options.headers, self._limits)
        out = Outgoing(
            data=packed,
            id=self._id(stream, options.id),
            key=key,
            time_us=self._time(stream, options.time),
            type=None if options.type is None else _text_of(options.type, "type"),
            headers=headers,
            size=size + EVENT_OVERHEAD_BYTES + sum(map(len, (headers or {}).values())),
        )
        if size > self._limits.event_bytes_max:
            raise _too_large(stream, f"the event is {size} bytes", self._limits)
        return out

    def admit_entry(self, table: Stream, key: Key, value: object) -> Outgoing:
        """Check a table's entry, as `admit` does; `None` deletes it."""
        if not table.spec.table:
            raise UsageError(f"stream {table.name} is not a table: use send")
        is_given = table.spec.key is None or value is None
        event = self.admit(table, value, EventOptions(key=key if is_given else None))
        if event.key != key_bytes(key):
            raise UsageError(
                f"table {table.name} takes its key from the field {table.spec.key}, where the "
                f"value has {event.key!r}, not {key!r}"
            )
        return event

    def _pack(self, stream: Stream, data: object) -> tuple[Record | bytes | str | None, int]:
        if data is None:
            if not stream.spec.table:
                raise RecordError(
                    f"stream {stream.name} is not a table, so an event must have data: only a "
                    "table's entry can be deleted by sending None"
                )
            return None, 0
        if stream.record is not None:
            return self._pack_record(stream, stream.record, data)
        if stream.spec.content == "json":
            text = _json_text(stream, data)
            return text, len(text)
        if not isinstance(data, bytes):
            raise RecordError(f"stream {stream.name} holds bytes, not {_kind(data)}")
        return data, len(data)

    def _pack_record(self, stream: Stream, schema: Schema, data: object) -> tuple[Record, int]:
        if isinstance(data, Mapping):
            value = _from_mapping(schema, data)
            return value, len(codec_of(type(value)).pack(value))
        if not isinstance(data, Record):
            raise RecordError(
                f"stream {stream.name} holds {schema.name} records, not {_kind(data)}"
            )
        self._check_class(stream, type(data))
        codec = codec_of(type(data))
        value = codec.validate(data)
        return value, len(codec.pack(value))

    def _check_class(self, stream: Stream, record: type[Record]) -> None:
        seen = (stream.id, stream.version, record)
        if seen not in self._checked:
            check_class_fits(stream, record)
            self._checked.add(seen)

    def _key(
        self, stream: Stream, packed: Record | bytes | str | None, given: Key | None
    ) -> bytes | None:
        key = key_bytes(given)
        field = stream.spec.key
        if field is not None and packed is not None:
            if given is not None:
                raise UsageError(
                    f"stream {stream.name} takes its key from field {field}: leave out the key"
                )
            key = _field_key(stream, packed, field)
        if key is None and stream.spec.table:
            raise UsageError(f"stream {stream.name} is a table: every event needs a key")
        if key == b"":
            raise UsageError(f"stream {stream.name}: the key is empty: leave it out instead")
        if key is not None and len(key) > self._limits.key_bytes_max:
            raise LimitError(
                f"stream {stream.name}: the key {key[:20]!r}… has {len(key)} bytes; at most "
                f"{self._limits.key_bytes_max} are allowed (key_bytes_max); use a shorter key"
            )
        return key

    def _id(self, stream: Stream, given: str | int | None) -> str:
        if given is None:
            if stream.spec.ids == "producer":
                raise UsageError(
                    f"stream {stream.name} takes its ids from the producer: give every event an id"
                )
            return f"{self._prefix}-{self._take(1)}"
        return _text_of(str(given), "id")

    def _time(self, stream: Stream, given: dt.datetime | None) -> int | None:
        if given is None:
            return None if stream.spec.time else clock.time_ns() // 1000
        if stream.spec.time:
            raise UsageError(
                f"stream {stream.name} takes its time from field {stream.spec.time}: leave out the "
                "time"
            )
        if not isinstance(given, dt.datetime):
            raise RecordError(f"an event's time must be a datetime, not {_kind(given)}")
        return microseconds(given)

    def part(self, stream: Stream, events: Sequence[Outgoing]) -> Part:
        """A part made of admitted events, in their order."""
        data = _data_batch(stream, events)
        columns = {name: data.column(name) for name in data.schema.names}
        fields = list(data.schema)
        given: dict[str, Sequence[object]] = {
            "_id": [event.id for event in events],
            "_key": [event.key for event in events],
            "_time": [event.time_us for event in events],
            "_type": [event.type for event in events],
            "_headers": [event.headers or None for event in events],
        }
        deletes = any(event.data is None for event in events)
        if stream.spec.key is not None and stream.record is not None and not deletes:
            del given["_key"]  # the column of that field is the key
        for name, values in given.items():
            if any(value is not None for value in values):
                columns[name] = pa.array(values, ENVELOPE.field(name).type)
                fields.append(pa.field(name, columns[name].type))
        if deletes:
            columns[DELETED] = pa.array([event.data is None for event in events])
            fields.append(pa.field(DELETED, pa.bool_()))
        batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
        return Part(str(stream.name), add_stamp(batch, self._stamp(stream, 0)))

    def _stamp(self, stream: Stream, rows: int) -> Stamp:
        return Stamp(
            id_prefix=self._prefix,
            id_first=self._take(rows),
            time_us=clock.time_ns() // 1000,
            type=stream.type,
            source=self.source,
            key_field=stream.spec.key if stream.record is not None else None,
            time_field=stream.spec.time,
        )

    def _take(self, count: int) -> int:
        with self._lock:
            first, self._next = self._next, self._next + count
        return first

    # Many events as Arrow

    def arrow_part(self, stream: Stream, batch: pa.RecordBatch | pa.Table) -> Part:
        """A part made of a batch of columns: the record's fields and any of `_key _time _id …`.

        Raises `RecordError` or `LimitError` naming the column, and then keeps nothing.
        """
        check_writable_by_user(stream.name)
        batch = one_batch(batch)
        arrays, fields = data_arrays(stream, batch)
        for name in given_names(stream, batch):
            column = given_column(stream, batch, name, self._limits.headers_bytes_max)
            arrays.append(column)
            fields.append(pa.field(name, column.type))
        made = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
        made = add_stamp(made, self._stamp(stream, made.num_rows))
        made = with_whole_ids(stream, made)
        self._check_sizes(stream, made)
        return Part(str(stream.name), made)

    def _check_sizes(self, stream: Stream, batch: pa.RecordBatch) -> None:
        keys = keys_of(batch)
        if stream.spec.table and keys.null_count:
            raise UsageError(f"stream {stream.name} is a table: every event needs a key")
        lengths = pc.min_max(pc.binary_length(keys))
        longest = lengths["max"].as_py() or 0
        if lengths["min"].as_py() == 0:
            raise UsageError(f"stream {stream.name}: a key is empty: use null instead")
        if longest > self._limits.key_bytes_max:
            raise LimitError(
                f"stream {stream.name}: a key has {longest} bytes; at most "
                f"{self._limits.key_bytes_max} are allowed (key_bytes_max); use shorter keys"
            )
        limit = self._limits.event_bytes_max
        if batch.nbytes <= limit or sum(map(widest, batch.columns)) <= limit:
            return
        for row in range(batch.num_rows):
            size = batch.slice(row, 1).nbytes
            if size > limit:
                raise _too_large(stream, f"row {row} is {size} bytes", self._limits)


def check_class_fits(stream: Stream, record: type[Record]) -> None:
    """Raise unless records of this class can be stored in, and read from, the stream."""
    schema, mine = stream.record, schema_of(record)
    if schema is None or mine == schema:
        return
    if mine in stream.records:
        return
    added = [f.name for f in mine.fields if schema.field(f.name) is None]
    if added:
        raise RecordError(
            f"{mine.name} has field {added[0]}, which stream {stream.name} does not have yet: "
            "apply the new record to the stream first (penstock apply, or AlterStream)"
        )
    reasons = evolution_reasons(mine, schema)
    if reasons:
        raise RecordError(
            f"class {mine.name} does not match stream {stream.name}, which holds {schema.name}: "
            f"from the class to the stream, {'; '.join(reasons)}"
        )


def _kind(value: object) -> str:
    return type(value).__name__


def _text_of(text: object, what: str) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= TEXT_CHARS_MAX:
        raise RecordError(f"an event's {what} must be text of 1 to {TEXT_CHARS_MAX} characters")
    check_text(text, f"the {what}")
    return text


def _too_large(stream: Stream, fact: str, limits: Limits) -> LimitError:
    return LimitError(
        f"stream {stream.name}: {fact}; at most {limits.event_bytes_max} are allowed "
        "(event_bytes_max). Store the large part elsewhere and send a reference to it, or raise "
        "the limit with the log option event_bytes_max"
    )


def _json_text(stream: Stream, data: object) -> str:
    try:
        text = msgspec.json.encode(data)
        check_depth(text)
        return text.decode()
    except (TypeError, OverflowError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RecordError(
            f"stream {stream.name} holds JSON, and the data cannot be encoded: {error}"
        ) from None


def _from_mapping(schema: Schema, data: Mapping[object, object]) -> Record:
    codec = codec_of_schema(schema)
    try:
        value = msgspec.convert(data, type=codec.record, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RecordError(f"{codec.schema.name}: {error}") from None
    return codec.validate(value)


def _field_key(stream: Stream, packed: Record | bytes | str, field: str) -> bytes | None:
    if isinstance(packed, Record):
        names = dict(zip(packed.__struct_encode_fields__, packed.__struct_fields__, strict=True))
        value = getattr(packed, names[field])
    else:
        try:
            value = msgspec.json.decode(packed)[field]
        except (KeyError, TypeError, IndexError):
            raise RecordError(
                f"stream {stream.name}: the event is not an object with a field {field!r}, "
                "which is the stream's key"
            ) from None
    if isinstance(value, uuid.UUID):
        value = str(value)
    return key_bytes(value)


def _check_headers(headers: Mapping[str, str] | None, limits: Limits) -> Mapping[str, str] | None:
    if not headers:
        return None
    if not isinstance(headers, Mapping):
        raise RecordError(f"headers must map names to strings, not {_kind(headers)}")
    for name, value in headers.items():
        check_header(name, value)
        check_text(value, f"header {name}")
    size = sum(len(n) + len(v) for n, v in headers.items())
    if size > limits.headers_bytes_max:
        raise LimitError(
            f"the headers have {size} bytes; at most {limits.headers_bytes_max} are allowed "
            "(headers_bytes_max)"
        )
    return dict(headers)


def _data_batch(stream: Stream, events: Sequence[Outgoing]) -> pa.RecordBatch:
    values = [event.data for event in events]
    if stream.record is None:
        type_ = pa.binary() if stream.spec.content == "bytes" else pa.string()
        return pa.RecordBatch.from_arrays([pa.array(values, type_)], [DATA])
    classes = {type(value) for value in values if value is not None}
    if len(classes) == 1:
        batch = codec_of(classes.pop()).to_arrow(values)  # type: ignore[arg-type]
        return _conform(stream.record, batch, deleted=None in values)
    deleted = None in values
    parts = [_data_batch_of(stream.record, value, deleted) for value in values]
    return pa.concat_batches(parts)


def _data_batch_of(record: Schema, value: object, deleted: bool) -> pa.RecordBatch:
    codec = codec_of_schema(record) if value is None else codec_of(type(value))  # type: ignore[arg-type]
    return _conform(record, codec.to_arrow([value]), deleted)  # type: ignore[list-item]


def _conform(record: Schema, batch: pa.RecordBatch, deleted: bool) -> pa.RecordBatch:
    schema = arrow_schema(record)
    if not deleted:
        return batch if batch.schema.equals(schema) else conform(batch, record)
    arrays = [
        batch.column(field.name)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=nullable(schema))
