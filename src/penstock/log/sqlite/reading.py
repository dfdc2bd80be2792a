"""Reading the embedded log: batches by offset, offsets by time, and waiting for more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import apsw

from penstock.errors import OffsetGoneError, UsageError
from penstock.log.api import Offsets
from penstock.log.batch import Batch
from penstock.log.declaring.objects import Stream
from penstock.log.sqlite.connection import ReaderPool, many, one, translate_errors
from penstock.log.sqlite.index import (
    IndexRow,
    WrongBatchError,
    damage_at,
    decode,
    decode_runs,
    read_stored,
    row_near,
    unreadable,
)

WAIT_FIRST_S = 0.001
WAIT_MOST_S = 0.02
RETRIES_MAX = 100


class SqliteReader:
    """Reads committed events. Holds no lock and no transaction between two batches."""

    def __init__(self, pool: ReaderPool) -> None:
        self._pool = pool

    def offsets(self, stream: Stream) -> dict[int, Offsets]:
        with self._pool.lend() as connection:
            rows = many(connection, "offsets", stream.id)
        return {partition: Offsets(first, next_) for partition, first, next_ in rows}

    def bounds(self, stream: Stream, partition: int) -> Offsets:
        with self._pool.lend() as connection:
            row = one(connection, "offsets_of_partition", stream.id, partition)
        if row is None:
            raise UsageError(
                f"stream {stream.name} has no partition {partition}: "
                f"it has 0 to {stream.partitions - 1}"
            )
        return Offsets(*row)

    def offset_at(self, stream: Stream, partition: int, time_us: int) -> int:
        bounds = self.bounds(stream, partition)
        with self._pool.lend() as connection:
            place = (stream.id, partition)
            row = one(connection, "batch_at_time", *place, time_us)
        if row is None:
            return bounds.next
        first, _, runs = row
        for run in decode_runs(runs) if runs else ():
            if run.time_us >= time_us:
                return int(run.offset)
        return int(first)

    def read(self, stream: Stream, partition: int, start: int, end: int | None) -> Iterator[Batch]:
        bounds = self.bounds(stream, partition)
        stop = bounds.next if end is None else min(end, bounds.next)
        offset = start
        while offset < stop:
            batch = self._batch_at(stream, partition, offset)
            if batch is None:
                return
            if batch.first_offset >= stop:
                return
            batch = batch.slice_offsets(offset, stop)
            bad = batch.first_unreadable()
            if bad is None:
                yield batch
                offset = batch.next_offset
                continue
            if bad > batch.first_offset:
                yield batch.slice_offsets(batch.first_offset, bad)
            raise unreadable(stream, partition, bad)

    def _batch_at(self, stream: Stream, partition: int, offset: int) -> Batch | None:
        """The batch that contains `offset`, or the first one after it.

        The index row and its blob are read in two steps; if the batch was merged between them, the
        blob no longer exists and the row has been replaced.
        """
        seen: IndexRow | None = None
        for _ in range(RETRIES_MAX):
            with self._pool.lend() as connection:
                row = self._row_at(connection, stream, partition, offset)
                if row is None:
                    return None
                try:
                    if row == seen:
                        raise WrongBatchError("its data is missing")
                    data = read_stored(connection, row)
                    if data is not None:
                        return decode(stream, partition, row, data)
                except WrongBatchError as wrong:
                    raise damage_at(connection, stream, partition, row, str(wrong)) from wrong
            seen = row
        raise UsageError(f"stream {stream.name} changes faster than it can be read")

    def _row_at(
        self, connection: apsw.Connection, stream: Stream, partition: int, offset: int
    ) -> IndexRow | None:
        row = row_near(connection, stream, partition, offset)
        if row is None or row.first_offset > offset:
            self._check_still_there(connection, stream, partition, offset)
        return row

    def _check_still_there(
        self, connection: apsw.Connection, stream: Stream, partition: int, offset: int
    ) -> None:
        row = one(connection, "offsets_of_partition", stream.id, partition)
        if row is not None and offset < row[0]:
            raise OffsetGoneError(
                f"stream {stream.name}, partition {partition}: offset {offset} was removed by "
                f"retention; the earliest that exists is {row[0]}",
                int(row[0]),
            )


class Waiter:
    """Waits for new events: notified at once of this process's commits, soon of another's.

    Another process's commit changes SQLite's change counter, one value in shared memory. One of
    the waiting threads checks it every few milliseconds and notifies the others.
    """

    def __init__(self, pool: ReaderPool) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._changes = 0
        self._has_watcher = False
        self._connection: apsw.Connection | None = None
        self._held = contextlib.ExitStack()
        self._counter: object = None
        self._closed = False

    def tell(self) -> None:
        """Wake all waiting threads, because something has changed or may have."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def wait(self, places: Sequence[tuple[Stream, Mapping[int, int]]], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s

        def has_news(connection: apsw.Connection) -> bool:
            return any(
                next_ > wanted.get(partition, next_)
                for stream, wanted in places
                for partition, _, next_ in many(connection, "offsets", stream.id)
            )

        while not self._closed:
            seen = self._changes
            with self._pool.lend() as connection:
                if has_news(connection):
                    return True
            if deadline <= time.monotonic():
                return False
            if self._is_watcher(seen, deadline):
                try:
                    with translate_errors(self._pool.path):
                        self._watch(deadline, has_news)
                finally:
                    with self._changed:
                        self._has_watcher = False
                        self._changed.notify_all()  # another thread must watch
                        if self._closed:
                            self._held.close()
        return False

    def _is_watcher(self, seen: int, deadline: float) -> bool:
        """Wait until something has changed since `seen`; true if this thread is to watch."""
        with self._changed:
            while self._changes == seen and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if not self._has_watcher:
                    self._has_watcher = True
                    return True
                self._changed.wait(left)
        return False

    def _watch(self, deadline: float, has_news: Callable[[apsw.Connection], bool]) -> None:
        """Watch the file for all waiting threads, until there is news for this one."""
        if self._connection is None:
            self._connection = self._held.enter_context(self._pool.lend())
        told, pause = self._changes, WAIT_FIRST_S
        while not self._closed:
            # The change counter is per connection, so always use the same one.
            if (found := self._connection.pragma("data_version")) != self._counter:
                self._counter, pause = found, WAIT_FIRST_S
                self.tell()
            if self._changes != told:
                told = self._changes
                if has_news(self._connection):
                    return
            with self._changed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if self._changes == told:
                    self._changed.wait(min(pause, left))
            pause = min(pause * 2, WAIT_MOST_S)

    def close(self) -> None:
        """Wake all waiting threads; the one that watches returns its connection on leaving."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if not self._has_watcher:
                self._held.close()
