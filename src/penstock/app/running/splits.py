"""How the input of a batch is divided into tasks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.app.tasks.task import DueTimer, Range, Split
from penstock.app.tasks.timers import unpack_timer
from penstock.log.api import Log
from penstock.log.declaring.objects import Stream
from penstock.log.reading.read import read_past
from penstock.records.event import from_microseconds, partition_of


class BatchInput(NamedTuple):
    """The input of a batch: ranges of streams, timers that are due, and ranges to be handled again
    because they were not acknowledged."""

    streams: Mapping[str, Stream]
    ranges: tuple[Range, ...] = ()
    timers: tuple[DueTimer, ...] = ()
    again: tuple[Range, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ranges or self.timers or self.again)


SPLIT_ROWS = 1_048_576
ORDERED_ROWS = 131_072
"""How many events a task sorts at once."""
ORDERED_ROWS_MIN = 1_000
"""Fewer than this are not worth a task of their own."""


def free_splits(log: Log, ranges: Sequence[Range]) -> list[Split]:
    """Splits of ranges whose events may be handled in any order."""
    made = [part for range_ in ranges for part in parts(log, range_, SPLIT_ROWS)]
    return [Split(number=n, ranges=(range_,)) for n, range_ in enumerate(made)]


def ordered_splits(log: Log, ranges: Sequence[Range], tasks: int) -> list[Split]:
    """Splits across all ranges by the time when events were appended, so that the outputs of the
    splits, one after the other, are in the order of commits.

    On an engine whose commits have no order, each range is split by itself.
    """
    sizes = {range_: log.count(*range_).events for range_ in ranges}
    total = sum(sizes.values())
    wanted = max(-(-total // ORDERED_ROWS), min(tasks, total // ORDERED_ROWS_MIN), 1)
    longest = max(ranges, key=sizes.__getitem__)
    share = -(-sizes[longest] // wanted)
    moments = [_append_time(log, part) for part in parts(log, longest, share)]
    if len(ranges) == 1 or None in moments:
        return free_splits(log, ranges)
    cut = list(ranges)
    made: list[tuple[Range, ...]] = []
    for moment in [time for time in moments[1:] if time is not None]:
        at = [_offset_within(log, range_, moment) for range_ in cut]
        made.append(tuple(r._replace(end=end) for r, end in zip(cut, at, strict=True)))
        cut = [r._replace(start=start) for r, start in zip(cut, at, strict=True)]
    made.append(tuple(cut))
    filled = [tuple(r for r in part if r.end > r.start) for part in made]
    return [
        Split(number=n, ranges=part, as_stored=True) for n, part in enumerate(filter(None, filled))
    ]


def parts(log: Log, range_: Range, rows: int) -> Iterator[Range]:
    """A range in parts of at most `rows` events."""
    start = range_.start
    while start < range_.end:
        end = min(range_.end, log.advance(range_.stream, range_.partition, start, rows))
        yield range_._replace(start=start, end=end)
        start = end


def _append_time(log: Log, range_: Range) -> dt.datetime | None:
    """When the first event was appended; `None` if commits have no order."""
    first = next(read_past(log, *range_, lambda damage: None), None)
    if first is None or not first.commit:
        return None
    return from_microseconds(first.commit_of(first.first_offset).time_us)


def _offset_within(log: Log, range_: Range, moment: dt.datetime) -> int:
    at = log.offset_at(range_.stream, range_.partition, moment)
    return min(max(at, range_.start), range_.end)


def keyed_splits(batch: BatchInput, tasks: int) -> list[Split]:
    """Splits that keep the events of a key together and in order.

    A partition normally holds all events of its keys, so a task takes whole partitions. If a
    stream has grown, if others may write to it, or if there are several streams, a key may be in
    more than one partition: then each task reads all of them and keeps its share of the keys.
    """
    streams = list(batch.streams.values())
    if len(streams) > 1 or not all(stream.keeps_keys_together for stream in streams):
        return [
            Split(
                number=n,
                ranges=batch.ranges,
                slot=n,
                slots=tasks,
                again=batch.again,
                timers=tuple(t for t in batch.timers if _slot_of(t, tasks) == n),
            )
            for n in range(tasks)
        ]
    partitions = streams[0].partitions
    homes = {r.partition for r in (*batch.ranges, *batch.again)}
    homes |= {_slot_of(timer, partitions) for timer in batch.timers}
    return [
        Split(
            number=n,
            ranges=tuple(r for r in batch.ranges if r.partition == home),
            again=tuple(r for r in batch.again if r.partition == home),
            timers=tuple(t for t in batch.timers if _slot_of(t, partitions) == home),
        )
        for n, home in enumerate(sorted(homes))
    ]


def _slot_of(due: DueTimer, slots: int) -> int:
    return partition_of(unpack_timer(due.timer).own_key, slots)


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges of offsets; those that touch or overlap are merged."""
    made: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return made
