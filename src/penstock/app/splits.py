"""How the input of a batch is cut into tasks: a function of the offsets alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.app.task import Range, Split
from penstock.app.timers import EXPIRY
from penstock.log.objects import Stream
from penstock.records.event import partition_of

SPLIT_ROWS = 1_048_576


def cuts(start: int, end: int, rows: int) -> Iterator[tuple[int, int]]:
    """The stretch from `start` to `end` in even parts of at most so many rows."""
    whole = end - start
    parts = -(-whole // rows)
    for n in range(parts):
        yield start + whole * n // parts, start + whole * (n + 1) // parts


def free_splits(ranges: Sequence[Range]) -> list[Split]:
    """Cuts of ranges whose events need no order."""
    made = [
        Range(range_.stream, range_.partition, *cut)
        for range_ in ranges
        for cut in cuts(range_.start, range_.end, SPLIT_ROWS)
    ]
    return [Split(number=n, ranges=(range_,)) for n, range_ in enumerate(made)]


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
