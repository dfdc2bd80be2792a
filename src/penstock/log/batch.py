"""Batches: how events are stored as one Arrow IPC blob, and what a reader gets.

A blob is a complete Arrow IPC stream, readable by any Arrow tool; its buffers are
compressed, and a checksum of the whole is stored with it.
"""

from __future__ import annotations

import base64
import datetime as dt
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast, get_args

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import RecordError, UsageError
from penstock.log.declaring.objects import Stream
from penstock.records.arrow import (
    arrow_schema,
    arrow_type,
    check_times,
    codec_of,
    codec_of_schema,
    nullable,
    python_values,
)
from penstock.records.documents import to_documents
from penstock.records.event import (
    DATA,
    DELETED,
    ENVELOPE,
    GIVEN,
    JsonValue,
    StoredEvent,
    add_numbers,
    counting,
    data_columns,
    envelope,
    ids_of,
    keys_of,
    slice_stamped,
    with_explicit_envelope,
)
from penstock.records.schema import Field, Record, Scalar, Schema

Compression = Literal["none", "lz4", "zstd"]
_TIME = Field("_time", Scalar("datetime"))


def check_compression(name: str) -> None:
    if name not in get_args(Compression):
        raise UsageError(f"compression {name!r} is not one of {', '.join(get_args(Compression))}")


def encode_blob(batch: pa.RecordBatch, compression: Compression) -> bytes:
    """An Arrow IPC stream that contains this one batch."""
    codec = None if compression == "none" or batch.nbytes < 512 else compression
    options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def decode_blob(blob: bytes | pa.Buffer) -> pa.RecordBatch:
    """The batch of a blob; raises `pa.ArrowException` if it is not one."""
    return pa.ipc.open_stream(pa.py_buffer(blob)).read_next_batch()


def checksum(blob: bytes | pa.Buffer) -> int:
    """64 bits, as the signed integer that SQLite stores."""
    return xxhash.xxh3_64_intdigest(blob) - 2**63


class CommitRun(msgspec.Struct, frozen=True):
    """Events of a batch that were committed together, from `offset` up to the next run."""

    offset: int
    commit: int
    time_us: int


class Batch:
    """Consecutive events of one partition, as read from the log.

    Holds the stored form; columns are made on demand. Immutable. `offsets` are given if they have
    gaps.
    """

    __slots__ = ("_kept", "_offsets", "first_offset", "partition", "runs", "stream")

    def __init__(
        self,
        stream: Stream,
        partition: int,
        first_offset: int,
        stored: pa.RecordBatch,
        runs: Sequence[CommitRun],
        offsets: pa.Array | None = None,
    ) -> None:
        self.stream = stream
        self.partition = partition
        self.first_offset = first_offset
        self.runs = runs
        self._kept = stored
        self._offsets = offsets

    @property
    def _stored(self) -> pa.RecordBatch:
        """Data and envelope; the data columns alone are also in `_kept`."""
        return self._kept

    def __len__(self) -> int:
        return int(self._kept.num_rows)

    def __repr__(self) -> str:
        last = self.next_offset - 1
        return f"<Batch {self.stream.name}/{self.partition} {self.first_offset}..{last}>"

    @property
    def memory_bytes(self) -> int:
        """The memory it occupies; a slice keeps the whole batch that it was taken from."""
        return int(self._kept.get_total_buffer_size())

    @property
    def nbytes(self) -> int:
        """The size of its own events."""
        return int(self._kept.nbytes)

    @property
    def next_offset(self) -> int:
        """Where reading continues."""
        if self._offsets is not None:
            return int(self._offsets[-1].as_py()) + 1
        return self.first_offset + len(self)

    def offsets(self) -> pa.Array:
        """The offset of each event."""
        if self._offsets is not None:
            return self._offsets
        return pc.add(counting(len(self)), self.first_offset)

    def offset_of(self, row: int) -> int:
        """The offset of the event in a row."""
        return self.first_offset + row if self._offsets is None else int(self._offsets[row].as_py())

    @property
    def commit(self) -> int:
        """The commit of the first event."""
        return self.runs[0].commit

    def commit_of(self, offset: int) -> CommitRun:
        """The commit that holds the event at `offset`."""
        return self.runs[bisect_right(self.runs, offset, key=lambda run: run.offset) - 1]

    def commits(self) -> pa.Array:
        """The commit of each event."""
        ends = [run.offset - self.first_offset for run in self.runs[1:]] + [len(self)]
        numbers = pa.array([run.commit for run in self.runs], pa.int64())
        encoded = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), numbers)
        return pc.run_end_decode(encoded)

    def slice_offsets(self, start: int, end: int) -> Batch:
        """The events with offsets in [start, end), without copying."""
        start, end = max(start, self.first_offset), min(end, self.next_offset)
        if start == self.first_offset and end == self.next_offset:
            return self
        first = bisect_right(self.runs, start, key=lambda run: run.offset) - 1
        last = bisect_left(self.runs, end, key=lambda run: run.offset)
        at, count, offsets = start - self.first_offset, end - start, None
        if self._offsets is not None:
            at = int(pc.sum(pc.less(self._offsets, start)).as_py())
            count = int(pc.sum(pc.less(self._offsets, end)).as_py()) - at
            offsets = self._offsets.slice(at, count)
        stored = slice_stamped(self._stored, at, count)
        return Batch(self.stream, self.partition, start, stored, self.runs[first:last], offsets)

    def first_unreadable(self) -> int | None:
        """The offset of the first event with a time that Python cannot represent, if there is one.

        Such times are rejected everywhere now, but older versions could write them.
        """
        if _times_fit(self._kept, self.stream.record):
            return None
        low, high = 0, len(self) - 1
        while low < high:  # the first `low` rows are fine, and one before `high` is not
            middle = (low + high) // 2
            fine = _times_fit(self._kept.slice(low, middle + 1 - low), self.stream.record)
            low, high = (middle + 1, high) if fine else (low, middle)
        return self.offset_of(low)

    def keys(self) -> pa.Array:
        """The keys of the events."""
        return keys_of(self._stored)

    def ids(self) -> pa.Array:
        """The ids of the events."""
        return ids_of(self._stored)

    def data(self) -> pa.RecordBatch:
        """The record's columns as stored, converted to the stream's current record."""
        record = self.stream.record
        names = [name for name in self._kept.schema.names if not name.startswith("_")]
        plain = self._kept.select(names)
        if record is None:
            return plain
        schema = arrow_schema(record)
        if self.stream.spec.table:
            schema = nullable(schema)
        return _upgrade(plain, schema)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Data and envelope columns; `columns` selects some, and the others are then not made."""
        data = self.data()
        if columns is None:
            columns = [*data.schema.names, *self.envelope_names()]
        made = self._envelope([name for name in GIVEN if name in columns])
        fields = {**{f.name: f for f in data.schema}, **{f.name: f for f in ENVELOPE}}
        arrays = [self._column(name, data, made) for name in columns]
        schema = pa.schema([_as_field(fields, name, arrays[i]) for i, name in enumerate(columns)])
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _envelope(self, names: Sequence[str]) -> dict[str, pa.Array]:
        return envelope(self._stored, names) if names else {}

    def envelope_names(self) -> list[str]:
        return [*ENVELOPE.names, *([DELETED] if self.stream.spec.table else [])]

    def _column(self, name: str, data: pa.RecordBatch, made: dict[str, pa.Array]) -> pa.Array:
        if name in made:
            return made[name]
        rows = len(self)
        if name == "_partition":
            return pa.repeat(pa.scalar(self.partition, pa.int32()), rows)
        if name == "_offset":
            return self.offsets()
        if name == DELETED:
            return self._deletions()
        index = data.schema.get_field_index(name)
        if index < 0:
            raise UsageError(
                f"stream {self.stream.name} has no column {name!r}: it has "
                f"{', '.join([*data.schema.names, *self.envelope_names()])}"
            )
        return data.column(index)

    def _deletions(self) -> pa.Array:
        index = self._kept.schema.get_field_index(DELETED)
        if index < 0:
            return pa.repeat(pa.scalar(False), len(self))
        return self._kept.column(index)

    def explicit(self) -> pa.RecordBatch:
        """Every event in full, in the stream's current record, with all stamped values as columns.

        For merging: batches of older versions and with other stamps then have the same columns.
        """
        return with_explicit_envelope(self._stored, self.data())

    def events(
        self, record: type[Record] | None = None, key: bytes | None = None
    ) -> Iterator[StoredEvent[object]]:
        """Yield the events one by one; data is a record (of this class, if given), JSON or bytes.

        With `key`, yield only the events with that key; the others are not even decoded.
        """
        if key is None:
            yield from self._events(record)
            return
        mask = pc.equal(keys_of(self._stored), key)
        rows = pc.indices_nonzero(mask.fill_null(False))
        if len(rows):
            stored, offsets = add_numbers(self._stored).take(rows), self.offsets().take(rows)
            first = offsets[0].as_py()
            chosen = Batch(self.stream, self.partition, first, stored, self.runs, offsets)
            yield from chosen._events(record)

    def _events(self, record: type[Record] | None) -> Iterator[StoredEvent[object]]:
        made = envelope(self._stored, GIVEN)
        columns = [python_values(made[name]) for name in GIVEN]
        rows = cast(
            Iterator[tuple[Any, ...]],
            zip(self.offsets().to_pylist(), self.values(record), *columns, strict=True),
        )
        name = str(self.stream.name)
        for offset, value, key, time, id_, type_, source, headers in rows:
            yield StoredEvent(
                data=value,
                key=key,
                time=time,
                id=id_,
                type=type_,
                source=source,
                headers=headers or {},
                stream=name,
                partition=self.partition,
                offset=offset,
            )

    def values(self, record: type[Record] | None = None) -> list[object]:
        """The data of the events: records (of this class, if given), JSON or bytes."""
        data = self.data()
        schema = self.stream.record
        if schema is None:
            values: list[object] = data.column(DATA).to_pylist()
            if self.stream.spec.content == "json":
                values = [None if v is None else msgspec.json.decode(cast(str, v)) for v in values]
            return values
        codec = codec_of(record) if record else codec_of_schema(schema)
        if not self.stream.spec.table:
            return list(codec.from_arrow(data))
        deleted = self._deletions()
        if not pc.any(deleted).as_py():
            return list(codec.from_arrow(data))
        kept = iter(codec.from_arrow(data.filter(pc.invert(deleted))))
        return [None if gone else next(kept) for gone in deleted.to_pylist()]


def _times_fit(stored: pa.RecordBatch, record: Schema | None) -> bool:
    fields = [*(() if record is None else record.fields), _TIME]
    try:
        for field in fields:
            index = stored.schema.get_field_index(field.name)
            if index >= 0 and stored.column(index).type == arrow_type(field.type):
                check_times(stored.column(index), field.type, field.name)
    except RecordError:
        return False
    return True


def unify_columns(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The batches, each with the columns of all of them; missing columns are filled with nulls."""
    fields: dict[str, pa.Field] = {}
    for batch in batches:
        for field in batch.schema:
            fields[field.name] = field.with_nullable(True)
    schema = pa.schema(fields.values(), batches[0].schema.metadata)
    return [
        pa.RecordBatch.from_arrays(
            [
                batch.column(name)
                if name in batch.schema.names
                else pa.repeat(pa.scalar(False), batch.num_rows)
                if name == DELETED
                else pa.nulls(batch.num_rows, field.type)
                for name, field in fields.items()
            ],
            schema=schema,
        )
        for batch in batches
    ]


def in_order_of_commit(batches: Sequence[Batch], made: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Combine what was made from each batch into one, with rows in the order of their commits.

    Within a commit rows keep their order; if commits have no order, all rows do.
    """
    alike = all(batch.schema.equals(made[0].schema) for batch in made)
    whole = pa.concat_batches(made if alike else unify_columns(made))
    if len(batches) < 2 or not batches[0].commit:
        return whole
    numbers = pa.concat_arrays([batch.commits() for batch in batches])
    return whole.take(pc.sort_indices(numbers))


def _as_field(fields: dict[str, pa.Field], name: str, array: pa.Array) -> pa.Field:
    return fields.get(name, pa.field(name, array.type))


def _upgrade(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert an older version's columns to the current version."""
    if batch.schema.equals(schema):
        return batch
    arrays = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(index)
            arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def stream_columns(stream: Stream) -> pa.Schema:
    """Data and envelope columns of a stream, as an Arrow schema."""
    if stream.record is None:
        kind = pa.binary() if stream.spec.content == "bytes" else pa.string()
        data = pa.schema([pa.field(DATA, kind, nullable=stream.spec.table)])
    else:
        data = arrow_schema(stream.record)
        data = nullable(data) if stream.spec.table else data
    fields = [*data, *ENVELOPE]
    if stream.spec.table:
        fields.append(pa.field(DELETED, pa.bool_(), nullable=False))
    return pa.schema(fields)


def json_row(event: StoredEvent[object]) -> dict[str, JsonValue]:
    """An event as the command line and the HTTP API show it."""
    return {
        "stream": event.stream,
        "partition": event.partition,
        "offset": event.offset,
        "key": None if event.key is None else json_key(event.key),
        "time": _iso(event.time),
        "id": event.id,
        "type": event.type,
        "source": event.source,
        "headers": dict(event.headers),
        "data": json_data(event.data),
    }


def json_key(key: bytes) -> JsonValue:
    """A key as text, or as base64 if it is not valid UTF-8."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(key).decode()}


def json_data(data: object) -> JsonValue:
    """Data as JSON; sets are sorted, so that two outputs can be compared."""
    ordered = isinstance(data, Record | set)
    order: Literal["deterministic"] | None = "deterministic" if ordered else None
    shown: JsonValue = msgspec.to_builtins(data, order=order)
    return shown


def _iso(time: dt.datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def documents_of(stream: Stream, batch: pa.RecordBatch) -> pa.Array:
    """The document of each row, as bytes; null for a deleted entry."""
    plain = data_columns(batch)
    if stream.record is None:
        documents = plain.column(DATA).cast(pa.binary())
    else:
        documents = to_documents(plain, stream.record)
    if DELETED not in batch.schema.names:
        return documents
    return pc.if_else(batch.column(DELETED), pa.scalar(None, pa.binary()), documents)
