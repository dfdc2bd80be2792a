"""How rows are written: text for people, JSON lines, CSV and Arrow for programs.

Columns of `csv`, `arrow` and `table` are those that Spark sees: a record's fields, or `data`;
and what is around them, beginning with `_`.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, Protocol, cast

import msgspec
import pyarrow as pa
import typer

from penstock.cli.output import flush, say, say_json, table, writing
from penstock.errors import UsageError
from penstock.log.batch import Batch, json_row, stream_columns
from penstock.log.declaring.objects import Stream
from penstock.records.event import DELETED, JsonValue, StoredEvent

Format = Literal["text", "table", "json", "csv", "arrow"]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="text and table are for people; json prints one object per line; arrow is Arrow's "
        "IPC stream format. --json means --format json.",
    ),
]
TABLE_ROWS_MAX = 1_000
"""So many rows are laid out together; more get another header."""
_ENVELOPE = ("partition", "offset", "time", "key", "id", "type", "source", "headers")


class RowWriter(Protocol):
    """Writes events as they are read."""

    def write(self, batch: Batch, key: bytes | None, room: int | None) -> int:
        """Write the batch's events with that key, at most `room` of them; how many it were."""

    def flush(self) -> None:
        """Let the reader see what there is."""

    def close(self) -> None:
        """Write what is held back; nothing comes after it."""


def open_writer(format_: Format, stream: Stream) -> RowWriter:
    """What writes events of the stream to standard output in this format."""
    match format_:
        case "text" | "json":
            return _Lines(event_text if format_ == "text" else None)
        case "csv":
            return _Csv(stream)
        case "table":
            return _Grid(stream)
        case "arrow":
            return _Arrow(stream)


def some(batch: Batch, key: bytes | None, room: int | None) -> Iterator[StoredEvent[object]]:
    """The events of a batch that are wanted."""
    for number, event in enumerate(batch.events(None, key)):
        if number == room:
            return
        yield event


class _Lines:
    """A line for each event."""

    def __init__(self, show: Callable[[StoredEvent[object]], str] | None) -> None:
        self._show = show

    def write(self, batch: Batch, key: bytes | None, room: int | None) -> int:
        number = 0
        for number, event in enumerate(some(batch, key, room), 1):  # noqa: B007  counted
            if self._show is None:
                say_json(json_row(event))
            else:
                say(self._show(event))
        return number

    def flush(self) -> None:
        flush()

    def close(self) -> None:
        """Nothing is held back."""


def event_text(event: StoredEvent[object]) -> str:
    """An event as a line for people."""
    row = json_row(event)
    shown = "-" if event.key is None else plain(row["key"])
    place = f"{event.partition}:{event.offset}"
    return f"{place}\t{event.time:%Y-%m-%d %H:%M:%S.%f}\t{shown}\t{as_json(row['data'])}"


def plain(value: JsonValue) -> str:
    """A value as text; what is no text as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def cells(row: Mapping[str, JsonValue], fields: Sequence[str] | None) -> list[str]:
    """The data of an event by column: a record's fields, or the whole as one."""
    data = row["data"]
    if fields is None:
        return ["" if data is None else plain(data)]
    held = cast(Mapping[str, JsonValue], data or {})
    return ["" if held.get(name) is None else plain(held[name]) for name in fields]


def fields_of(stream: Stream) -> list[str] | None:
    """The names of a record's fields; `None` for a stream of JSON or bytes."""
    return None if stream.record is None else [field.name for field in stream.record.fields]


class _Csv:
    """Comma-separated, with a header; values that are no text as JSON."""

    def __init__(self, stream: Stream) -> None:
        self._fields = fields_of(stream)
        self._is_table = stream.spec.table
        self._out = csv.writer(sys.stdout, lineterminator="\n")
        names = [*(self._fields or ["data"]), *(f"_{name}" for name in _ENVELOPE)]
        with writing():
            self._out.writerow([*names, *([DELETED] if self._is_table else [])])

    def write(self, batch: Batch, key: bytes | None, room: int | None) -> int:
        number = 0
        with writing():
            for number, event in enumerate(some(batch, key, room), 1):  # noqa: B007  counted
                row = json_row(event)
                around = ["" if row[name] is None else plain(row[name]) for name in _ENVELOPE]
                deleted = [as_json(event.data is None)] if self._is_table else []
                self._out.writerow([*cells(row, self._fields), *around, *deleted])
        return number

    def flush(self) -> None:
        flush()

    def close(self) -> None:
        """Nothing is held back."""


class _Grid:
    """A table for people: the place, time and key of each event, and its data."""

    def __init__(self, stream: Stream) -> None:
        self._fields = fields_of(stream)
        self._held: list[list[str]] = []

    def write(self, batch: Batch, key: bytes | None, room: int | None) -> int:
        number = 0
        for number, event in enumerate(some(batch, key, room), 1):  # noqa: B007  counted
            row = json_row(event)
            place = f"{event.partition}:{event.offset}"
            shown = "" if event.key is None else plain(row["key"])
            time = f"{event.time:%Y-%m-%d %H:%M:%S}"
            self._held.append([place, time, shown, *cells(row, self._fields)])
            if len(self._held) >= TABLE_ROWS_MAX:
                self.close()
        return number

    def flush(self) -> None:
        self.close()
        flush()

    def close(self) -> None:
        if self._held:
            table(("place", "time", "key", *(self._fields or ["data"])), self._held)
            self._held = []


class _Arrow:
    """Arrow's IPC stream: what pandas, Polars, DuckDB and others read as it is."""

    def __init__(self, stream: Stream) -> None:
        if sys.stdout.isatty():
            raise UsageError(
                "--format arrow cannot be shown on a terminal: redirect it to a file "
                "(> orders.arrow) or pipe it to a program"
            )
        self._schema = stream_columns(stream)
        with writing():
            self._out = pa.ipc.new_stream(sys.stdout.buffer, self._schema)

    def write(self, batch: Batch, key: bytes | None, room: int | None) -> int:
        rows = batch.to_arrow(self._schema.names)
        if key is not None:
            rows = rows.filter(pa.compute.equal(batch.keys(), key).fill_null(False))
        rows = rows.slice(0, room)
        made = pa.RecordBatch.from_arrays(rows.columns, schema=self._schema)
        with writing():
            self._out.write_batch(made)
        return int(made.num_rows)

    def flush(self) -> None:
        with writing():
            sys.stdout.buffer.flush()

    def close(self) -> None:
        with writing():
            self._out.close()
