"""JSON lines on standard input: reading what is there, and what each line says."""

from __future__ import annotations

import codecs
import contextlib
import datetime as dt
import select
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import msgspec

from penstock.errors import LimitError, PenstockError, RecordError
from penstock.log.declaring.objects import Stream
from penstock.log.writing.compose import EventOptions
from penstock.records.arrow import codec_of_schema

READ_BYTES = 1 << 20
CHUNK_BYTES_MAX = 4 << 20
LINE_BYTES_MAX = 64 << 20
SETTLE_S = 0.005


class InputLine(NamedTuple):
    """A line of input; number 0 is the command line's own argument."""

    number: int
    text: bytes


def chunks_of_lines(source: BinaryIO) -> Iterator[list[InputLine]]:
    """What is there to read, as whole lines; blank ones are passed over.

    A chunk is what has arrived by now, so that lines which come slowly are not held back,
    and ones that come together stay together.
    """
    number, rest = 0, b""
    while block := _available(source):
        rest += block.removeprefix(codecs.BOM_UTF8) if number == 0 and not rest else block
        whole, newline, rest = rest.rpartition(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise LimitError(
                f"line {number + 1} is longer than {LINE_BYTES_MAX} bytes (line_bytes_max)"
            )
        lines = []
        for text in whole.split(b"\n") if newline else ():
            number += 1
            if text.strip():
                lines.append(InputLine(number, text))
        if lines:
            yield lines
    if rest.strip():
        yield [InputLine(number + 1, rest)]


def _available(source: BinaryIO) -> bytes:
    """At least one byte, unless the input has ended, and whatever else is ready."""
    raw = getattr(source, "raw", source)
    found = raw.read(READ_BYTES)
    while found and len(found) < CHUNK_BYTES_MAX and _ready(source):
        more = raw.read(READ_BYTES)
        if not more:
            break
        found += more
    return bytes(found or b"")


def _ready(source: BinaryIO) -> bool:
    try:
        return bool(select.select([source], [], [], SETTLE_S)[0])
    except (ValueError, OSError):
        return False


@contextlib.contextmanager
def naming(line: InputLine) -> Iterator[None]:
    """Name the line in whatever is wrong with it."""
    try:
        yield
    except PenstockError as error:
        if line.number:
            error.args = (f"line {line.number}: {error}",)
        raise


def parse_line(
    stream: Stream, line: InputLine, options: EventOptions, *, whole: bool
) -> tuple[object, EventOptions]:
    """An event of a line; `PenstockError` names the line."""
    with naming(line):
        if whole:
            return parse_event(stream, line.text, options)
        return parse_data(stream, line.text), options


def parse_data(stream: Stream, text: bytes) -> object:
    """The data that a stream can take: a record, a JSON value, or the bytes themselves.

    `null` deletes a table's entry, except where any bytes are data.
    """
    if stream.spec.content == "bytes":
        return text
    if stream.record is not None:
        if stream.spec.table and text.strip() == b"null":
            return None
        return codec_of_schema(stream.record).from_json(text)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not valid JSON: {error}") from None


class _Whole(msgspec.Struct):
    """An event as `read --json` prints it; what the log itself gives is passed over."""

    data: msgspec.Raw
    key: str | dict[str, str] | None = None
    time: dt.datetime | None = None
    id: str | None = None
    type: str | None = None
    headers: dict[str, str] | None = None


def parse_event(stream: Stream, text: bytes, options: EventOptions) -> tuple[object, EventOptions]:
    try:
        event = msgspec.json.decode(text, type=_Whole)
    except msgspec.ValidationError as error:
        raise RecordError(f"not an event: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not valid JSON: {error}") from None
    key = _key(event.key)
    given = EventOptions(
        key=None if stream.spec.key else key or options.key,
        id=event.id or options.id,
        time=None if stream.spec.time else event.time,
        type=event.type or options.type,
        headers=event.headers or options.headers,
    )
    data = bytes(event.data)
    if data == b"null" and stream.spec.table:
        return None, msgspec.structs.replace(given, key=key)
    if stream.spec.content == "bytes":
        return parse_bytes_text(data), given
    return parse_data(stream, data), given


def _key(key: str | dict[str, str] | None) -> str | bytes | None:
    """A key as `read --json` prints it: text, or base64 where it is not text."""
    return (
        parse_bytes_text(msgspec.json.encode(key.get("base64"))) if isinstance(key, dict) else key
    )


def parse_bytes_text(text: bytes) -> bytes:
    """Bytes as `read --json` prints them: a JSON string of base64."""
    try:
        return msgspec.json.decode(text, type=bytes)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RecordError(f"bytes must be given as a base64 string: {error}") from None
