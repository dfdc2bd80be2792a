"""A table while a batch runs: entries are looked up in bulk, and changes are found at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import pyarrow as pa

from penstock.app.declaring.entry import Entry
from penstock.app.declaring.tables import AppTable, Values
from penstock.errors import RecordError
from penstock.log.api import Log, Part
from penstock.log.declaring.objects import Stream
from penstock.log.reading.collections import Collection
from penstock.log.writing.compose import Composer
from penstock.records.arrow import codec_of_schema
from penstock.records.event import DELETED, ENTRY
from penstock.records.schema import Record, Schema, record_type

_IMMUTABLE = (int, float, str, bytes, bool, type(None))


class State:
    """The entries that a task holds of a table. Each is loaded once, and saved if it changed."""

    def __init__(self, log: Log, table: AppTable[object]) -> None:
        self._log = log
        self.table = table
        self._stream: Stream = log.stream(table.name)
        self.values = Values(table, self._stream)
        self._held: dict[bytes, Entry[Any]] = {}
        self._before: dict[bytes, bytes | None] = {}
        self._journal: dict[bytes, tuple[bool, object]] | None = None

    def load(self, keys: Iterable[bytes]) -> None:
        """Look up many keys at once."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._before]
        if missing:
            found = self._log.get(self.table.name, missing, settled=True)
            self._before.update(
                (key, None if entry is None else entry.value)
                for key, entry in zip(missing, found, strict=True)
            )

    def entry(self, key: bytes, shown: bytes | None = None) -> Entry[Any]:
        """The entry of a key; `shown` is the key that the user sees, if it differs."""
        held = self._held.get(key)
        if held is None:
            if key not in self._before:
                self.load([key])
            value = self._value(self._before[key])
            held = Entry(value, self.table.key_of(key if shown is None else shown))
            self._held[key] = held
        elif held.is_deleted and held.value is None:
            held.is_deleted, held.value = False, self._value(None)
        if self._journal is not None and key not in self._journal:
            self._journal[key] = (held.is_deleted, _copy_value(held.value))
        return held

    def begin(self) -> None:
        """Start recording changes to entries, so that they can be undone."""
        self._journal = {}

    def undo(self) -> None:
        """Restore entries to what they were when `begin` was called."""
        for key, (is_deleted, value) in (self._journal or {}).items():
            entry = self._held[key]
            entry.is_deleted, entry.value = is_deleted, value
        self._journal = {}

    def check(self) -> None:
        """Raise `RecordError` if an entry used since `begin` has an invalid value."""
        for key in self._journal or ():
            entry = self._held[key]
            if entry.value is not None:
                self.values.pack(entry.value)

    def _value(self, packed: bytes | None) -> object:
        if packed is not None:
            return self.values.unpack(packed)
        if self.values.collections is not None and self.table.default is None:
            return self.values.collections.empty()
        default = self.table.default
        return default if isinstance(default, _IMMUTABLE) else copy.deepcopy(default)

    def find_changes(self) -> list[tuple[bytes, object, bytes | None]]:
        """Keys with their new value and packed value; `None` if the entry is deleted.

        A value equal to the table's default is not stored: so which keys a table has depends only
        on their values, not on how events were divided into batches.
        """
        found: list[tuple[bytes, object, bytes | None]] = []
        start = self._value(None)
        default = None if start is None else self.values.pack(start)
        for key, entry in self._held.items():
            before = self._before[key]
            packed = None if entry.value is None else self.values.pack(entry.value)
            if packed is None or packed == default:
                if before is not None:
                    found.append((key, None, None))
            elif packed != before:
                found.append((key, entry.value, packed))
        return found

    def part(self, composer: Composer) -> Part | None:
        """The changes as events of the table's changelog; `None` if nothing changed."""
        rows: list[Record | None] = []
        keys: list[bytes] = []
        entries: list[bytes | None] = []
        schema = cast(Schema, self._stream.record)
        made: Any = record_type(schema)
        for key, value, packed in self.find_changes():
            if self.values.collections is not None:
                before = self._before[key]
                old = None if before is None else self.values.unpack(before)
                actions = self.values.collections.actions(
                    cast(Collection | None, old), cast(Collection | None, value)
                )
                if not actions:  # equal, though packed differently
                    continue
                names = [field.name for field in schema.fields]
                rows += [made(**{n: getattr(action, n) for n in names}) for action in actions]
                keys += [key] * len(actions)
                entries += [None] * (len(actions) - 1) + [packed]
                continue
            rows.append(made(value=value) if self.values.is_plain and packed else _row(value))
            keys.append(key)
            entries.append(packed)
        if not rows:
            return None
        return changes_part(composer, self._stream, rows, keys, entries)


def _copy_value(value: object) -> object:
    """A copy that is not affected by changes to the original in place."""
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, set):
        return set(value)
    if isinstance(value, list) and all(isinstance(item, _IMMUTABLE) for item in value):
        return list(value)
    return copy.deepcopy(value)


def _row(value: object) -> Record | None:
    return cast(Record | None, value)


def changes_part(
    composer: Composer,
    stream: Stream,
    rows: list[Record | None],
    keys: list[bytes],
    entries: list[bytes | None],
) -> Part:
    """The changes of a table: rows of its changelog (`None` deletes), and the packed entries."""
    if stream.record is None:
        raise RecordError(f"table {stream.name} has no record: a table of an app needs one")
    batch = codec_of_schema(stream.record).to_arrow(rows)
    columns = list(batch.columns)
    fields = [pa.field(f.name, f.type) for f in batch.schema]
    if any(row is None for row in rows):
        columns.append(pa.array([row is None for row in rows]))
        fields.append(pa.field(DELETED, pa.bool_()))
    columns.append(pa.array(keys, pa.binary()))
    fields.append(pa.field("_key", pa.binary()))
    part = composer.arrow_part(
        stream, pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
    )
    whole = part.batch.append_column(pa.field(ENTRY, pa.binary()), pa.array(entries, pa.binary()))
    return Part(part.stream, whole)
