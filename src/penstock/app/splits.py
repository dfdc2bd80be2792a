"""How the input of a batch is cut into tasks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence

from penstock.app.task import Range, Split
from penstock.app.timers import EXPIRY
from penstock.log.api import Log
from penstock.log.objects import Stream
from penstock.log.read import read_past
from penstock.records.event import from_microseconds, partition_of

SPLIT_ROWS = 1_048_576
ORDERED_ROWS = 131_072
"""How many events a task puts in order at once."""
ORDERED_ROWS_MIN = 1_000
"""Fewer than this are not worth a task of their own."""


def free_splits(log: Log, ranges: Sequence[Range]) -> list[Split]:
    """Cuts of ranges whose events need no order."""
    made = [part for range_ in ranges for part in parts(log, range_, SPLIT_ROWS)]
    return [Split(number=n, ranges=(range_,)) for n, range_ in enumerate(made)]


def ordered_splits(log: Log, ranges: Sequence[Range], tasks: int) -> list[Split]:
    """Cuts across all ranges by when events were appended: what comes of them, one after the
    other, is in the order of commits.

    On an engine whose commits have no order, each range by itself.
    """
    sizes = {range_: log.count(*range_).events for range_ in ranges}
    total = sum(sizes.values())
    wanted = max(-(-total // ORDERED_ROWS), min(tasks, total // ORDERED_ROWS_MIN), 1)
    longest = max(ranges, key=sizes.__getitem__)
    share = -(-sizes[longest] // wanted)
    moments = [_appended(log, part) for part in parts(log, longest, share)]
    if len(ranges) == 1 or None in moments:
        return free_splits(log, ranges)
    cut = list(ranges)
    made: list[tuple[Range, ...]] = []
    for moment in [time for time in moments[1:] if time is not None]:
        at = [_clamped(log, range_, moment) for range_ in cut]
        made.append(tuple(r._replace(end=end) for r, end in zip(cut, at, strict=True)))
        cut = [r._replace(start=start) for r, start in zip(cut, at, strict=True)]
    made.append(tuple(cut))
    filled = [tuple(r for r in part if r.end > r.start) for part in made]
    return [
        Split(number=n, ranges=part, as_stored=True) for n, part in enumerate(filter(None, filled))
    ]


def parts(log: Log, range_: Range, rows: int) -> Iterator[Range]:
    """A range in parts of at most so many events."""
    start = range_.start
    while start < range_.end:
        end = min(range_.end, log.advance(range_.stream, range_.partition, start, rows))
        yield range_._replace(start=start, end=end)
        start = end


def _appended(log: Log, range_: Range) -> dt.datetime | None:
    """When the first event was appended; `None` where commits have no order."""
    first = next(read_past(log, *range_, lambda damage: None), None)
    if first is None or not first.commit:
        return None
    return from_microseconds(first.commit_of(first.first_offset).time_us)


def _clamped(log: Log, range_: Range, moment: dt.datetime) -> int:
    at = log.offset_at(range_.stream, range_.partition, moment)
    return min(max(at, range_.start), range_.end)


def keyed_splits(
    ranges: Sequence[Range],
    streams: Mapping[str, Stream],
    tasks: int,
    timers: Sequence[tuple[bytes, int]],
    again: Sequence[Range],
) -> list[Split]:
    """Cuts that keep the events of a key together and in order.

    A partition holds all events of its keys, so a task takes whole partitions; where a stream
    has grown, others may write to it, or there are several, keys are in more than one partition:
    then each task reads them all, and keeps its share of the keys.
    """
    if len(streams) > 1 or not all(stream.keeps_keys_together for stream in streams.values()):
        return [
            Split(number=n, ranges=tuple(ranges), slot=n, slots=tasks, again=tuple(again),
                  timers=tuple(t for t in timers if _slot_of(t[0], tasks) == n))
            for n in range(tasks)
        ]  # fmt: skip
    partitions = next(iter(streams.values())).partitions
    homes = {r.partition for r in (*ranges, *again)} | {_slot_of(t[0], partitions) for t in timers}
    return [
        Split(
            number=n,
            ranges=tuple(r for r in ranges if r.partition == home),
            again=tuple(r for r in again if r.partition == home),
            timers=tuple(t for t in timers if _slot_of(t[0], partitions) == home),
        )
        for n, home in enumerate(sorted(homes))
    ]


def _slot_of(timer: bytes, slots: int) -> int:
    key = timer[1:].rpartition(b"@")[0] if timer[:1] == EXPIRY else timer[1:]
    return partition_of(key, slots)


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return made
