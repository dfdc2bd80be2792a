"""Events as Kafka messages: CloudEvents in binary mode, so that any client can read and write them.

The value is the data as JSON (or bytes), the key is the event's key, and the envelope is in
headers `ce_…`. A message of another client, without these headers, is an event too: its envelope
is derived from the message itself.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from penstock.errors import DamagedError, LogError
from penstock.log.batch import Batch, CommitRun, documents_of
from penstock.log.declaring.objects import Stream
from penstock.log.kafka import elements
from penstock.records.arrow import UTC_MICROSECONDS, arrow_schema, nullable
from penstock.records.cloudevents import BINARY, JSON, SPEC_VERSION
from penstock.records.documents import from_documents, not_json
from penstock.records.event import (
    DATA,
    DELETED,
    ENVELOPE,
    GIVEN,
    Stamp,
    add_stamp,
    envelope,
    from_microseconds,
    stamp_of,
)
from penstock.records.ranges import TIME_US_MAX, TIME_US_MIN

_CONTENT = "content-type"
_PREFIX = "ce_"
#: attributes that are columns of their own, or carry no information
_OWN = frozenset({"ce_specversion", "ce_id", "ce_type", "ce_source", "ce_time", _CONTENT})
Headers = list[tuple[str, str | bytes | None]]
Found = Sequence[dict[str, bytes]]


class Encoded(NamedTuple):
    """Events of one partition, ready to be sent; headers are created one by one."""

    rows: int
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Callable[[], Iterator[Headers]]


def encode(stream: Stream, batch: pa.RecordBatch) -> Encoded:
    """The messages of a stamped batch."""
    names = [name for name in GIVEN if name != "_time" or not follows_from_data(batch)]
    columns = envelope(batch, names)
    keys, values = columns["_key"].to_pylist(), documents_of(stream, batch).to_pylist()
    if elements.tells_actions(stream):
        keys, values = elements.to_messages(stream, keys, values)
    return Encoded(batch.num_rows, keys, values, lambda: _headers(stream, batch, columns))


def follows_from_data(batch: pa.RecordBatch) -> bool:
    """Whether the time of the events is one of their fields, and needs no header."""
    field = stamp_of(batch).time_field
    if field is None or "_time" in batch.schema.names:
        return False
    return bool(batch.column(field).null_count == 0)


def _headers(
    stream: Stream, batch: pa.RecordBatch, columns: dict[str, pa.Array]
) -> Iterator[Headers]:
    content = BINARY if stream.spec.content == "bytes" else JSON
    same: Headers = [("ce_specversion", SPEC_VERSION.encode()), (_CONTENT, content.encode())]
    changing = {"ce_id": _bytes(columns["_id"])}
    for name in ("_type", "_source"):
        if name in batch.schema.names:
            changing[f"ce{name}"] = _bytes(columns[name])
        else:
            text = getattr(stamp_of(batch), name.removeprefix("_"))
            same.append((f"ce{name}", text.encode()))
    if "_time" in batch.schema.names:
        changing["ce_time"] = _bytes(_iso(columns["_time"]))
    elif "_time" in columns:
        time = from_microseconds(stamp_of(batch).time_us)
        same.append(("ce_time", time.isoformat().replace("+00:00", "Z").encode()))
    pairs = ([(name, value) for value in values] for name, values in changing.items())
    rows = zip(*pairs, strict=True)
    if columns["_headers"].null_count == batch.num_rows:
        for own in rows:
            yield [*same, *own]
        return
    for own, given in zip(rows, columns["_headers"].to_pylist(), strict=True):
        extra = [(f"{_PREFIX}{name}", value.encode()) for name, value in given or ()]
        yield [*same, *own, *extra]


def _bytes(texts: pa.Array) -> list[bytes]:
    found: list[bytes] = texts.cast(pa.binary()).to_pylist()
    return found


def _iso(times: pa.Array) -> pa.Array:
    texts = times.cast(pa.timestamp("us")).cast(pa.string())
    parted = pc.replace_substring(texts, " ", "T", max_replacements=1)
    return pc.binary_join_element_wise(parted, "Z", "")


class MessageBatch(Batch):
    """Messages as a batch: data is decoded immediately, the envelope on demand."""

    __slots__ = ("_found", "_full", "_made", "_messages")

    def __init__(
        self, stream: Stream, messages: Sequence[Message], plain: pa.RecordBatch, offsets: pa.Array
    ) -> None:
        first, partition = offset_of(messages[0]), int(messages[0].partition() or 0)
        runs: tuple[CommitRun, ...] = (CommitRun(first, 0, append_time_us(messages[0])),)
        last_us = append_time_us(messages[-1])
        if last_us != runs[0].time_us:
            runs = (*runs, CommitRun(offset_of(messages[-1]), 0, last_us))
        super().__init__(stream, partition, first, plain, runs, offsets)
        self._messages = messages
        self._made: dict[str, pa.Array] = {}
        self._found: Found | None = None
        self._full: pa.RecordBatch | None = None

    @property
    def _stored(self) -> pa.RecordBatch:
        """The data together with every envelope column."""
        if self._full is None:
            made = self._envelope(GIVEN)
            stream, plain = self.stream, self._kept
            fields = [pa.field(name, column.type) for name, column in made.items()]
            stamp = Stamp(id_prefix="", time_us=0, type=stream.type, source=str(stream.name))
            whole = pa.RecordBatch.from_arrays(
                [*plain.columns, *made.values()], schema=pa.schema([*plain.schema, *fields])
            )
            self._full = add_stamp(whole, stamp)
        return self._full

    def keys(self) -> pa.Array:
        return self._envelope(["_key"])["_key"]

    def ids(self) -> pa.Array:
        return self._envelope(["_id"])["_id"]

    def _envelope(self, names: Sequence[str]) -> dict[str, pa.Array]:
        for name in names:
            if name not in self._made:
                self._made[name] = self._column_of(name)
        return {name: self._made[name] for name in names}

    def _column_of(self, name: str) -> pa.Array:
        stream, messages = self.stream, self._messages
        match name:
            case "_key":
                return pa.array(_keys(stream, messages), pa.binary())
            case "_time":
                return self._times()
            case "_id":
                return _texts(self._headers(), "ce_id", [_place(message) for message in messages])
            case "_type":
                return _texts(self._headers(), "ce_type", [stream.type] * len(messages))
            case "_source":
                return _texts(self._headers(), "ce_source", [str(stream.name)] * len(messages))
        return _extensions(self._headers())

    def _headers(self) -> Found:
        """The headers, extracted on demand: that costs more than decoding the messages."""
        if self._found is None:
            self._found = [
                cast(dict[str, bytes], dict(message.headers() or ())) for message in self._messages
            ]
        return self._found

    def _times(self) -> pa.Array:
        """The field that holds the time; else the time in the header; else the time of append."""
        field = self.stream.spec.time
        said = pa.nulls(len(self._messages), UTC_MICROSECONDS)
        if field is not None and field in self._kept.schema.names:
            said = self._kept.column(field)
        if said.null_count:
            said = pc.coalesce(said, _said_times(self._headers()))
        if said.null_count:
            appended = pa.array([append_time_us(message) for message in self._messages], pa.int64())
            said = pc.coalesce(said, appended.cast(UTC_MICROSECONDS))
        return said

    def slice_offsets(self, start: int, end: int) -> Batch:
        offsets = self.offsets()
        at = int(pc.sum(pc.less(offsets, start)).as_py())
        count = int(pc.sum(pc.less(offsets, end)).as_py()) - at
        return MessageBatch(
            self.stream,
            self._messages[at : at + count],
            self._kept.slice(at, count),
            offsets.slice(at, count),
        )


def decode(stream: Stream, messages: Sequence[Message]) -> Iterator[Batch | DamagedError]:
    """The events in messages of one partition; an error in place of each that is damaged."""
    values = [message.value() for message in messages]
    if elements.tells_actions(stream):
        keys = [message.key() or b"" for message in messages]
        values = list(map(elements.document, keys, values))
    offsets = pa.array([message.offset() for message in messages], pa.int64())
    if stream.record is None:
        plain, wrong = _untyped_columns(stream, values)
    else:
        plain, wrong = from_documents(values, stream.record)
        if not stream.spec.table:
            wrong += [(row, "it has no value") for row, v in enumerate(values) if v is None]
    if stream.spec.table:
        wrong += [(row, "it has no key") for row, m in enumerate(messages) if m.key() is None]
    if not wrong:
        yield MessageBatch(stream, messages, _add_deletions(stream, plain, values), offsets)
        return
    yield from _around(stream, messages, sorted(dict(wrong).items()))


def _around(
    stream: Stream, messages: Sequence[Message], wrong: Sequence[tuple[int, str]]
) -> Iterator[Batch | DamagedError]:
    """The valid messages as batches, and an error for each invalid one, in order."""
    at = 0
    for row, reason in wrong:
        if row > at:
            yield from decode(stream, messages[at:row])
        offset, partition = offset_of(messages[row]), int(messages[row].partition() or 0)
        yield DamagedError(
            f"stream {stream.name}, partition {partition}: the message at offset {offset} is not "
            f"a valid {stream.type}: {reason}",
            str(stream.name),
            partition,
            offset,
            offset,
            key=_keys(stream, messages[row : row + 1])[0],
            data=messages[row].value(),
        )
        at = row + 1
    if at < len(messages):
        yield from decode(stream, messages[at:])


def _untyped_columns(
    stream: Stream, values: Sequence[bytes | None]
) -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
    """JSON or bytes unchanged; values that should be JSON but are not are reported in `wrong`."""
    if stream.spec.content == "bytes":
        return pa.record_batch({DATA: pa.array(values, pa.binary())}), []
    wrong = not_json(values)
    if not stream.spec.table:
        wrong += [(row, "it has no value") for row, value in enumerate(values) if value is None]
    kept = values if not wrong else [None] * len(values)
    return pa.record_batch({DATA: pa.array(kept, pa.binary()).cast(pa.string())}), wrong


def _add_deletions(
    stream: Stream, plain: pa.RecordBatch, values: Sequence[bytes | None]
) -> pa.RecordBatch:
    if stream.record is not None and stream.spec.table:
        wanted = nullable(arrow_schema(stream.record))
        plain = pa.RecordBatch.from_arrays(plain.columns, schema=wanted)
    if not stream.spec.table or None not in values:
        return plain
    return plain.append_column(
        pa.field(DELETED, pa.bool_()), pa.array([value is None for value in values])
    )


def _keys(stream: Stream, messages: Sequence[Message]) -> list[bytes | None]:
    keys = [message.key() for message in messages]
    if not elements.tells_actions(stream):
        return keys
    return [None if key is None else elements.event_key(key) for key in keys]


def offset_of(message: Message) -> int:
    offset = message.offset()
    if offset is None:
        raise LogError("Kafka returned a message without an offset")
    return offset


def append_time_us(message: Message) -> int:
    kind, time_ms = message.timestamp()
    return 0 if kind == TIMESTAMP_NOT_AVAILABLE else time_ms * 1000


def _place(message: Message) -> str:
    """An id for a message without one: its position, which is unique."""
    return f"{message.topic()}-{message.partition()}-{message.offset()}"


def _texts(found: Found, name: str, otherwise: Sequence[str]) -> pa.Array:
    given = pa.array([headers.get(name) for headers in found], pa.binary())
    try:
        texts = given.cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8, so not a valid CloudEvent
        texts = pa.array(
            [None if v is None else v.decode("utf-8", "replace") for v in given.to_pylist()],
            pa.string(),
        )
    return texts if not texts.null_count else pc.coalesce(texts, pa.array(otherwise, pa.string()))


def _said_times(found: Found) -> pa.Array:
    given = [headers.get("ce_time") for headers in found]
    if not any(given):
        return pa.nulls(len(found), UTC_MICROSECONDS)
    try:
        said = pa.array(given, pa.binary()).cast(pa.string()).cast(UTC_MICROSECONDS)
    except pa.ArrowInvalid:
        said = pa.array([_moment(text) for text in given], UTC_MICROSECONDS)
    units = said.cast(pa.int64())
    is_one = pc.and_(pc.greater_equal(units, TIME_US_MIN), pc.less_equal(units, TIME_US_MAX))
    return pc.if_else(is_one, said, pa.scalar(None, UTC_MICROSECONDS))


def _moment(text: bytes | None) -> object:
    try:
        return None if text is None else msgspec.convert(text.decode(), type=dt.datetime)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return None


def _extensions(found: Found) -> pa.Array:
    """All other headers that are text, without the prefix."""
    kind = ENVELOPE.field("_headers").type
    if all(len(headers) <= len(_OWN) and headers.keys() <= _OWN for headers in found):
        return pa.nulls(len(found), kind)
    made: list[list[tuple[str, str]] | None] = []
    for headers in found:
        more: dict[str, str] = {}
        for name, value in headers.items():
            if name not in _OWN and value is not None:
                try:
                    more[name.removeprefix(_PREFIX)] = value.decode()
                except UnicodeDecodeError:
                    continue
        made.append(list(more.items()) or None)
    return pa.array(made, kind)
