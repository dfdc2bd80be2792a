"""Messages of a connector as events of a stream: columns in, one part out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.connect.hosts.registry import SourceRecord
from penstock.connect.protocol.wire import Message
from penstock.errors import UsageError
from penstock.log.api import Limits, Part
from penstock.log.declaring.objects import Stream
from penstock.log.letters import DeadLetter, readable
from penstock.log.writing.compose import Composer, EventOptions
from penstock.records.arrow import UTC_MICROSECONDS, codec_of
from penstock.records.documents import Documents, from_documents, not_json
from penstock.records.event import DATA, from_microseconds, now_us

MessageDecoder = Callable[[bytes], object]
OFFSET_MAX = (1 << 63) - 1
"""A message's number may not fit into a record's field; its id contains it in full."""


class Wrong(NamedTuple):
    """A message that cannot be stored, and why."""

    message: Message
    reason: str


class Received(NamedTuple):
    """One batch of a connector stream: the messages that were stored or became dead letters, how
    many of these were `damaged`, and how many others were `dropped` as repeats.
    """

    messages: Sequence[Message]
    dropped: int
    damaged: int
    credits: int
    error: str
    """What was wrong with a message, if anything."""

    def add_to(self, record: SourceRecord) -> SourceRecord:
        """The stream's record, with this batch added."""
        found = msgspec.structs.replace(
            record,
            messages=record.messages + len(self.messages),
            bytes=record.bytes + sum(len(message.payload) for message in self.messages),
            dropped=record.dropped + self.dropped,
            damaged=record.damaged + self.damaged,
            credits=self.credits,
        )
        if self.messages:
            last = self.messages[-1]
            found = msgspec.structs.replace(
                found, point_of_ref=last.message_id, lag_ms=_age_ms(last)
            )
        if self.error:
            found = msgspec.structs.replace(found, error=self.error, error_us=now_us())
        return found


def _age_ms(message: Message) -> int | None:
    age_us = now_us() - message.event_time // 1000
    return age_us // 1000 if message.event_time else None


def to_parts(
    composer: Composer,
    limits: Limits,
    stream: Stream,
    name: str,
    messages: Sequence[Message],
    decoder: MessageDecoder | None = None,
) -> tuple[list[Part], list[Wrong]]:
    """Turn messages of the connector stream `name` into events; also return the invalid ones.

    An event's id consists of the connector stream's name and the message's number. Its key is the
    message's key, or else that name, so that messages without a key keep their order too. Its time
    is the message's, in nanoseconds since 1970. If the stream takes its key or time from a field,
    the field is used. Its data is the result of `decoder`; without one, a message is JSON, or
    bytes.
    """
    try:
        return _together(composer, limits, stream, name, messages, decoder)
    except MemoryError:
        raise
    except Exception as error:  # whatever error a message causes, that message is damaged
        if len(messages) == 1:
            return [], [Wrong(messages[0], _why(error))]
    parts: list[Part] = []
    told: list[Wrong] = []
    half = len(messages) // 2  # find the damaged messages by bisection
    for some in (messages[:half], messages[half:]):
        found, wrong = to_parts(composer, limits, stream, name, some, decoder)
        parts += found
        told += wrong
    return parts, told


def _together(
    composer: Composer,
    limits: Limits,
    stream: Stream,
    name: str,
    messages: Sequence[Message],
    decoder: MessageDecoder | None,
) -> tuple[list[Part], list[Wrong]]:
    """Raise if the stream refuses one of the messages outright, or it cannot be decoded."""
    if decoder is not None:
        events = [
            composer.admit(stream, decoder(message.payload), _options(stream, name, message))
            for message in messages
        ]
        return [composer.part(stream, events)], []
    rows, wrong = _decode(stream, messages, limits)
    bad = dict(wrong)
    told = [Wrong(messages[row], why) for row, why in sorted(bad.items())]
    if bad:
        messages = [message for row, message in enumerate(messages) if row not in bad]
        rows, _ = _decode(stream, messages, limits)
    if not messages:
        return [], told
    return [composer.arrow_part(stream, _columns(stream, name, messages, rows))], told


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"


def _columns(
    stream: Stream, name: str, messages: Sequence[Message], rows: pa.RecordBatch
) -> pa.RecordBatch:
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    numbers = pa.array([message.message_id for message in messages], pa.uint64())
    columns["_id"] = pc.binary_join_element_wise(name, numbers.cast(pa.string()), "/")
    if stream.spec.key is None:
        own = name.encode()
        columns["_key"] = pa.array([message.key or own for message in messages], pa.binary())
    if stream.spec.time is None and any(message.event_time for message in messages):
        times = pa.array([message.event_time // 1000 or None for message in messages], pa.int64())
        columns["_time"] = times.cast(UTC_MICROSECONDS)
    return pa.record_batch(columns)


def to_letters(
    composer: Composer, letters: Stream, record: SourceRecord, wrong: Sequence[Wrong]
) -> Part:
    """A dead letter for each message that cannot be stored, under the id it would have had."""
    told = [
        DeadLetter(
            agent="", stream=record.stream, partition=0,
            offset=min(message.message_id, OFFSET_MAX),
            id=f"{record.name}/{message.message_id}",
            key=None if message.key is None else readable(message.key),
            data=readable(message.payload), error=reason, traceback="", tries=0,
        )
        for message, reason in wrong
    ]  # fmt: skip
    rows = codec_of(DeadLetter).to_arrow(told)
    ids = pa.array([letter.id for letter in told], pa.string())
    return composer.arrow_part(letters, rows.append_column("_id", ids))


def _decode(stream: Stream, messages: Sequence[Message], limits: Limits) -> Documents:
    values = [message.payload for message in messages]
    if stream.record is not None:
        rows, wrong = from_documents(values, stream.record)
    else:
        is_bytes = stream.spec.content == "bytes"
        wrong = [] if is_bytes else not_json(values)
        data = pa.array([] if wrong else values, pa.binary())
        rows = pa.record_batch({DATA: data if is_bytes else data.cast(pa.string())})
    return Documents(rows, [*wrong, *_too_large(messages, limits)])


def _options(stream: Stream, name: str, message: Message) -> EventOptions:
    own_key, own_time = stream.spec.key is None, stream.spec.time is None and message.event_time
    return EventOptions(
        id=f"{name}/{message.message_id}",
        key=(message.key or name.encode()) if own_key else None,
        time=from_microseconds(message.event_time // 1000) if own_time else None,
    )


def _too_large(messages: Sequence[Message], limits: Limits) -> list[tuple[int, str]]:
    most, longest = limits.event_bytes_max, limits.key_bytes_max
    large = [
        (row, f"its size of {len(message.payload)} bytes exceeds {most} (event_bytes_max)")
        for row, message in enumerate(messages)
        if len(message.payload) > most
    ]
    return large + [
        (row, f"its key of {len(message.key)} bytes exceeds {longest} (key_bytes_max)")
        for row, message in enumerate(messages)
        if message.key is not None and len(message.key) > longest
    ]
