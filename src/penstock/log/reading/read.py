"""Reading a stream across its partitions: where to start and end, and following it."""

from __future__ import annotations

import datetime as dt
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast, overload

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DamagedError, UnknownObjectError, UsageError
from penstock.log.api import Count, Log, Offsets, Start
from penstock.log.batch import Batch
from penstock.log.declaring.objects import Stream
from penstock.log.reading.merge import Read, in_commit_order
from penstock.log.writing.compose import check_class_fits
from penstock.records.event import Key, StoredEvent, key_bytes
from penstock.records.schema import Record

R = TypeVar("R", bound=Record)

FOLLOW_WAIT_S = 1.0


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to read.

    `start` is earliest, latest, an offset (in every partition) or a time of append. `follow`
    continues with new events until `stop` is set. `on_damage` is called with damaged batches,
    which are then skipped; without it they raise.
    """

    start: Start = "earliest"
    partitions: Sequence[int] | None = None
    key: Key | None = None
    follow: bool = False
    stop: threading.Event | None = None
    on_damage: Callable[[DamagedError], None] | None = None


class Span(NamedTuple):
    """A stretch of a stream: the start of each partition, and its exclusive end, if it has one."""

    starts: Mapping[int, int]
    ends: Mapping[int, int]


def read_batches(
    log: Log, stream: str, options: ReadOptions = ReadOptions(), span: Span | None = None
) -> Iterator[Batch]:
    """Batches of all chosen partitions, in the order of their commits if the log has one.

    They contain what exists at one moment after the call and, with `follow`, what comes later.
    Within a partition they are always in offset order. A `span` overrides the start in `options`.
    """
    reading = Reading(log, stream, options, span)
    while not reading.is_stopped:
        for batch in reading.batches():
            yield batch
            if reading.is_stopped:
                return
        if not options.follow:
            return
        log.wait({stream: reading.positions}, FOLLOW_WAIT_S)
        reading.look()


class Reading:
    """A stream that is being read: the position in each partition.

    Between two rounds of `batches` the caller waits, in whatever way, and then calls `look`.
    """

    def __init__(
        self, log: Log, stream: str, options: ReadOptions, span: Span | None = None
    ) -> None:
        self._log = log
        self._stream = stream
        self._options = options
        found = log.stream(stream)
        self._id = found.id
        self._ends = {} if span is None else span.ends
        self.positions = (
            start_offsets(log, stream, chosen(found, options), options.start)
            if span is None
            else dict(span.starts)
        )

    @property
    def is_stopped(self) -> bool:
        return self._options.stop is not None and self._options.stop.is_set()

    def batches(self) -> Iterator[Batch]:
        """Everything that exists now, as of one moment for all partitions.

        The ends are looked up once, so that no commit is seen in one partition and missed in
        another.
        """
        ends = self._log.offsets(self._stream)
        readers = {
            partition: (start, self._reader(partition, self._end(partition, ends)))
            for partition, start in self.positions.items()
            if partition in ends
        }
        for batch in in_commit_order(readers):
            self.positions[batch.partition] = batch.next_offset
            yield batch

    def _end(self, partition: int, now: Mapping[int, Offsets]) -> int:
        return min(now[partition].next, self._ends.get(partition, now[partition].next))

    def _reader(self, partition: int, end: int) -> Read:
        def note(damage: DamagedError) -> None:
            if self._options.on_damage is None:
                raise damage
            self._options.on_damage(damage)
            self.positions[partition] = damage.last_offset + 1

        return lambda start: read_past(self._log, self._stream, partition, start, end, note)

    def look(self) -> None:
        """Check whether it is still the same stream, and whether it has more partitions."""
        now = self._log.stream(self._stream)
        if now.id != self._id:
            raise UnknownObjectError(
                f"stream {self._stream} was dropped and created again while it was being followed: "
                "read the new one from its beginning"
            )
        if self._options.partitions is None:
            for partition in chosen(now, self._options):
                self.positions.setdefault(partition, 0)


@overload
def read_events(
    log: Log, stream: str, record: type[R], options: ReadOptions = ...
) -> Iterator[StoredEvent[R]]: ...


@overload
def read_events(
    log: Log, stream: str, record: None = None, options: ReadOptions = ...
) -> Iterator[StoredEvent[object]]: ...


def read_events(
    log: Log,
    stream: str,
    record: type[R] | None = None,
    options: ReadOptions = ReadOptions(),
) -> Iterator[StoredEvent[R]] | Iterator[StoredEvent[object]]:
    """Events one by one; `data` is a record of the class given, or what the stream holds.

    Raises `UsageError` if a table's changelog is read with a class: some of its events have no
    data, which the type of `read_changes` expresses.
    """
    if record is not None and log.stream(stream).spec.table:
        raise UsageError(f"stream {stream} is a table's changelog: use read_changes")
    return cast(Iterator[StoredEvent[R]], _events(log, stream, record, options))


def read_changes(
    log: Log, stream: str, record: type[R], options: ReadOptions = ReadOptions()
) -> Iterator[StoredEvent[R | None]]:
    """Events of a table's changelog one by one; `data` is `None` if an entry was deleted."""
    return cast(Iterator[StoredEvent[R | None]], _events(log, stream, record, options))


def _events(
    log: Log, stream: str, record: type[Record] | None, options: ReadOptions
) -> Iterator[StoredEvent[object]]:
    if record is not None:
        check_class_fits(log.stream(stream), record)
    key = key_bytes(options.key)
    for batch in read_batches(log, stream, options):
        yield from batch.events(record, key)


def start_offsets(log: Log, stream: str, partitions: Sequence[int], start: Start) -> dict[int, int]:
    """The offset at which reading each partition starts, all as of one moment."""
    if not isinstance(start, dt.datetime | int) and start not in ("earliest", "latest"):
        raise UsageError(
            f"start is {start!r}; it must be earliest, latest, an offset or a time (a datetime)"
        )
    if isinstance(start, dt.datetime):
        return {p: log.offset_at(stream, p, start) for p in partitions}
    if isinstance(start, int):
        if start < 0:
            raise UsageError(f"an offset must be 0 or more, not {start}")
        return dict.fromkeys(partitions, start)
    now = log.offsets(stream)
    return {p: now[p].next if start == "latest" else now[p].first for p in partitions}


def count_from(log: Log, stream: str, positions: Mapping[int, int]) -> Count:
    """How many events there are from these offsets on, or from the first that still exists."""
    found = Count()
    for partition, offsets in log.offsets(stream).items():
        start = max(positions.get(partition, offsets.first), offsets.first)
        found += log.count(stream, partition, start, offsets.next)
    return found


def start_offset(log: Log, stream: str, partition: int, start: Start) -> int:
    """The offset at which reading a partition starts."""
    return start_offsets(log, stream, [partition], start)[partition]


def span_of(
    log: Log,
    stream: str,
    options: ReadOptions,
    *,
    until: int | dt.datetime | None = None,
    last: int | None = None,
) -> Span:
    """The span from the start in `options` to before `until` (offset or time), or the last events.

    The last events by commit, or by time of append if commits have no order.
    """
    partitions = chosen(log.stream(stream), options)
    ends = {} if until is None else start_offsets(log, stream, partitions, until)
    if last is None:
        return Span(start_offsets(log, stream, partitions, options.start), ends)
    now = log.offsets(stream)
    bounds = {p: (now[p].first, min(now[p].next, ends.get(p, now[p].next))) for p in partitions}
    key = key_bytes(options.key)
    seen = [
        place
        for partition, bound in bounds.items()
        for place in _last_of(log, stream, partition, bound, last, key)
    ]
    starts = {partition: end for partition, (_, end) in bounds.items()}
    starts.update({place[2]: place[3] for place in sorted(seen, reverse=True)[:last]})
    return Span(starts, ends)


def _last_of(
    log: Log, stream: str, partition: int, bounds: tuple[int, int], last: int, key: bytes | None
) -> list[tuple[int, int, int, int]]:
    """Commit, time, partition and offset of a partition's last events; times never decrease.

    Offsets may have gaps, so read backwards, twice as far each time, until enough were found.
    """
    first, end = bounds
    reach = last
    while True:
        start = max(first, log.retreat(stream, partition, end, reach))
        found: deque[tuple[int, int, int, int]] = deque(maxlen=last)
        time_us = 0
        for batch in read_past(log, stream, partition, start, end, lambda damage: None):
            for offset in _offsets(batch, key)[-last:].to_pylist():
                run = batch.commit_of(offset)
                time_us = max(time_us, run.time_us)
                found.append((run.commit, time_us, partition, offset))
        if len(found) == last or start == first:
            return list(found)
        reach *= 2


def _offsets(batch: Batch, key: bytes | None) -> pa.Array:
    """The offsets of a batch's events, or of those with a key."""
    if key is None:
        return batch.offsets()
    return batch.offsets().filter(pc.equal(batch.keys(), key).fill_null(False))


def chosen(stream: Stream, options: ReadOptions) -> list[int]:
    """The partitions that the options ask for."""
    key = key_bytes(options.key)
    if key is not None:
        return sorted(stream.homes(key))
    if options.partitions is None:
        return list(range(stream.partitions))
    for partition in options.partitions:
        if not 0 <= partition < stream.partitions:
            raise UsageError(
                f"stream {stream.name} has no partition {partition}: "
                f"it has 0 to {stream.partitions - 1}"
            )
    return list(options.partitions)


def read_past(
    log: Log,
    stream: str,
    partition: int,
    start: int,
    end: int | None,
    on_damage: Callable[[DamagedError], object],
) -> Iterator[Batch]:
    """Like `Log.read`, but report damage and continue after it."""
    while end is None or start < end:
        try:
            yield from log.read(stream, partition, start, end)
            return
        except DamagedError as damage:
            on_damage(damage)
            start = damage.last_offset + 1
