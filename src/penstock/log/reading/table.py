"""Tables: the latest value per key of a stream that is a table's changelog.

A value is stored packed: a record as msgpack, JSON as its text, bytes unchanged. `Table` unpacks
it; engines only store and find it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import LogReadOnlyError, UsageError
from penstock.log.api import Log, Pin, TableEntry
from penstock.log.declaring.objects import Stream
from penstock.log.reading.collections import Collections
from penstock.records.arrow import codec_of, codec_of_schema
from penstock.records.event import DATA, DELETED, ENTRY, Key, data_columns, key_bytes, keys_of
from penstock.records.schema import Record

T = TypeVar("T")
PAGE_ROWS = 500
PREFIX_PIN_S = 3600.0


class Changes(NamedTuple):
    """A batch's changes to a table, ordered by key: the last value of each key, and its row.

    A value of `None` deletes the entry.
    """

    keys: list[bytes]
    values: list[bytes | None]
    rows: list[int]

    def split_deletions(self) -> tuple[list[bytes], Changes]:
        """The keys whose entries are deleted, and the changes of the others."""
        gone = [key for key, value in zip(self.keys, self.values, strict=True) if value is None]
        kept = [index for index, value in enumerate(self.values) if value is not None]
        keys = [self.keys[index] for index in kept]
        values = [self.values[index] for index in kept]
        return gone, Changes(keys, values, [self.rows[index] for index in kept])


NO_CHANGES = Changes([], [], [])


def entry_changes(stream: Stream, batch: pa.RecordBatch) -> Changes:
    """The changes that a batch of a changelog makes to its table: the last one of each key."""
    last = dict(zip(keys_of(batch).to_pylist(), range(batch.num_rows), strict=True))
    keys = sorted(last)
    rows = [last[key] for key in keys]
    return Changes(keys, pack_entries(stream, batch.take(pa.array(rows, pa.int64()))), rows)


def pack_entries(stream: Stream, batch: pa.RecordBatch) -> list[bytes | None]:
    """The packed entry that each row of a changelog stands for; `None` if it deletes one."""
    if DELETED not in batch.schema.names:
        return _pack_values(stream, batch)
    gone = batch.column(DELETED)
    kept = iter(_pack_values(stream, batch.filter(pc.invert(gone))))
    return [None if deleted else next(kept) for deleted in gone.to_pylist()]


def _pack_values(stream: Stream, batch: pa.RecordBatch) -> list[bytes | None]:
    if ENTRY in batch.schema.names:
        packed: list[bytes | None] = batch.column(ENTRY).to_pylist()
        return packed
    plain = data_columns(batch)
    if stream.record is None:
        texts = plain.column(DATA).to_pylist()
        return [text.encode() if isinstance(text, str) else text for text in texts]
    codec = codec_of_schema(stream.record)
    return [codec.pack(record) for record in codec.from_arrow(plain)]


def unpacker(stream: Stream, record: type[Record] | None = None) -> Callable[[bytes], object]:
    """A function that turns packed values of the stream's table into records, JSON or bytes."""
    if stream.spec.entries != "value":
        return Collections.of(stream).unpack
    if stream.record is not None:
        return (codec_of(record) if record else codec_of_schema(stream.record)).unpack
    return msgspec.json.decode if stream.spec.content == "json" else bytes


class Table(Generic[T]):
    """Reads a table: `Table(log, "customers", Customer).get("ada")`.

    Without a record class, values are what the stream holds: records made from its schema,
    JSON, bytes, or the sets and lists of an app.
    """

    def __init__(self, log: Log, stream: str, record: type[T] | None = None) -> None:
        self._log = log
        self._name = stream
        self._record = record
        self._unpack: Callable[[bytes], object] | None = None

    def get(self, key: Key, at: Pin | None = None) -> T | None:
        """The latest value of a key, or its value at a pinned moment; `None` if there is none."""
        return self.get_many([key], at)[0]

    def get_many(self, keys: Sequence[Key], at: Pin | None = None) -> list[T | None]:
        """The values of many keys at one moment, in the order of `keys`."""
        wanted = [cast(bytes, key_bytes(key)) for key in keys]
        return [
            None if entry is None else self._value(entry)
            for entry in self._log.get(self._name, wanted, at)
        ]

    def page(
        self, after: Key | None = None, limit: int = 100, at: Pin | None = None
    ) -> list[tuple[bytes, T]]:
        """The next entries, ordered by key bytes."""
        entries = self._log.page(self._name, key_bytes(after), limit, at)
        return [(entry.key, self._value(entry)) for entry in entries]

    def items(self) -> Iterator[tuple[bytes, T]]:
        """All entries as of one moment, ordered by key bytes; memory use stays bounded."""
        for entries in self._log.snapshot(self._name):
            for entry in entries:
                yield entry.key, self._value(entry)

    def starting_with(
        self, prefix: Key, after: Key | None = None
    ) -> Generator[tuple[bytes, T], None, None]:
        """The entries whose keys have this prefix, ordered by key bytes, as of one moment.

        If the log is read-only, each page is as of a separate moment. Close the iterator if you
        stop early. Raises `PinExpiredError` if iterating takes hours.
        """
        wanted, begin = cast(bytes, key_bytes(prefix)), key_bytes(after) or b""
        rows = min(PAGE_ROWS, self._log.limits.page_rows_max)
        try:
            pin: Pin | None = self._log.pin(PREFIX_PIN_S)
        except LogReadOnlyError:
            pin = None
        try:
            if begin < wanted:
                entries = [e for e in self._log.get(self._name, [wanted], pin) if e is not None]
                yield from ((entry.key, self._value(entry)) for entry in entries)
                begin = wanted
            while entries := self._log.page(self._name, begin or None, rows, pin):
                for entry in entries:
                    if not entry.key.startswith(wanted):
                        return
                    yield entry.key, self._value(entry)
                begin = entries[-1].key
        finally:
            if pin is not None:
                self._log.unpin(pin)

    def _value(self, entry: TableEntry) -> T:
        if self._unpack is None:
            record = cast(type[Record] | None, self._record)
            self._unpack = unpacker(self._log.stream(self._name), record)
        return cast(T, self._unpack(entry.value))


def check_table(stream: Stream) -> None:
    if not stream.spec.table:
        raise UsageError(
            f"stream {stream.name} is not a table's changelog: it was created without table"
        )
