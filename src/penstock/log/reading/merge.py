"""Batches of several partitions as one sequence, in the order of their commits.

A stored batch may contain many commits (upkeep merges small ones), so batches are split where
another partition's commit comes in between. The batches that wait for their turn take limited
memory: beyond a limit, those needed last are dropped and read again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from penstock.log.batch import Batch

AHEAD_BYTES_MAX = 128 << 20
"""How much may be read ahead of its turn, over all partitions."""

Read = Callable[[int], Iterator[Batch]]
"""Reads one partition from an offset on."""

Turn = tuple[int, int]
"""The commit of a partition's next event, and the partition."""


def in_commit_order(
    partitions: Mapping[int, tuple[int, Read]], ahead_bytes_max: int = AHEAD_BYTES_MAX
) -> Iterator[Batch]:
    """The events of these partitions, each read from its start.

    In order of commit, and of partition within a commit. On an engine whose commits have no
    order, one partition after the other.
    """
    cursors: dict[int, _Cursor] = {}
    turns: list[Turn] = []
    for partition, (start, read) in sorted(partitions.items()):
        cursor = _Cursor(read, start)
        while cursor.load() and not cursor.commit:
            yield cursor.take_all()
        if cursor.commit:
            cursors[partition] = cursor
            heapq.heappush(turns, (cursor.commit, partition))
            _let_go(cursors, turns, ahead_bytes_max)
    while turns:
        _, partition = heapq.heappop(turns)
        cursor = cursors[partition]
        yield cursor.take_until(partition, turns[0] if turns else None)
        is_cut = cursor.holds_more
        if is_cut or cursor.load():
            heapq.heappush(turns, (cursor.commit, partition))
            if not is_cut:
                _let_go(cursors, turns, ahead_bytes_max)
        else:
            del cursors[partition]


class _Cursor:
    """A position in a partition, with the batch there unless it was dropped."""

    def __init__(self, read: Read, start: int) -> None:
        self._read = read
        self._position = start
        self._batches = read(start)
        self._batch: Batch | None = None
        self.bytes_held = 0
        self.commit = 0
        """The commit of the next event; 0 if there is none, or if commits have no order."""

    @property
    def holds_more(self) -> bool:
        return self._batch is not None

    def load(self) -> bool:
        """Read the next batch; False at the end."""
        batch = next(self._batches, None)
        self._hold(batch)
        return batch is not None

    def _hold(self, batch: Batch | None) -> None:
        self._batch = batch
        self.bytes_held = 0 if batch is None else batch.memory_bytes
        self.commit = 0 if batch is None else batch.commit

    def let_go(self) -> None:
        if self._batch is not None:
            self._position = self._batch.first_offset
            self._batch = None
            self._batches = iter(())
            self.bytes_held = 0

    def take_all(self) -> Batch:
        batch = self._batch
        if batch is None:  # it was dropped
            self._batches = self._read(self._position)
            batch = next(self._batches)
        self._batch, self.bytes_held = None, 0
        return batch

    def take_until(self, partition: int, turn: Turn | None) -> Batch:
        """The events that come before another partition's turn."""
        batch = self.take_all()
        if turn is None:
            return batch
        for run in islice(batch.runs, 1, None):
            if (run.commit, partition) > turn:
                self._hold(batch.slice_offsets(run.offset, batch.next_offset))
                return batch.slice_offsets(batch.first_offset, run.offset)
        return batch


def _let_go(cursors: Mapping[int, _Cursor], turns: list[Turn], bytes_max: int) -> None:
    """Drop the batches needed last, until the rest is small enough."""
    held = sum(cursor.bytes_held for cursor in cursors.values())
    if held <= bytes_max:
        return
    for _, partition in sorted(turns, reverse=True):
        held -= cursors[partition].bytes_held
        cursors[partition].let_go()
        if held <= bytes_max:
            return
