"""Reading the embedded log: batches by offset, offsets by time, and waiting for more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import apsw
import msgspec
import pyarrow as pa

from penstock.errors import DamagedError, OffsetGoneError, UsageError
from penstock.log.api import Offsets
from penstock.log.batch import Batch, Run, checksum, decode_blob
from penstock.log.objects import Stream
from penstock.log.sqlite.connection import ReaderPool, many, one, read_blob, translated
from penstock.log.sqlite.writing import seal
from penstock.records.arrow import OUT_OF_RANGE

WAIT_FIRST_S = 0.001
WAIT_MOST_S = 0.02
RETRIES_MAX = 100

_RUNS = msgspec.msgpack.Decoder(list[Run])


class Row(NamedTuple):
    """A row of the offset index."""

    first_offset: int
    rows: int
    blob_id: int
    size: int
    checksum: int
    commit_number: int
    time_us: int
    runs: bytes | None
    seal: int

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.rows


class Reader:
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
        for run in _RUNS.decode(runs) if runs else ():
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
            batch = batch.sliced(offset, stop)
            bad = batch.first_unreadable()
            if bad is None:
                yield batch
                offset = batch.next_offset
                continue
            if bad > batch.first_offset:
                yield batch.sliced(batch.first_offset, bad)
            raise unreadable(stream, partition, bad)

    def _batch_at(self, stream: Stream, partition: int, offset: int) -> Batch | None:
        """The batch that holds `offset`, or the first one after it.

        The index row and its blob are read in two steps; if the batch was merged between
        them, the blob is gone and the row is another one by now.
        """
        seen: Row | None = None
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
                    raise damaged(connection, stream, partition, row, str(wrong)) from wrong
            seen = row
        raise UsageError(f"stream {stream.name} changes faster than it can be read")

    def _row_at(
        self, connection: apsw.Connection, stream: Stream, partition: int, offset: int
    ) -> Row | None:
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
                f"retention; the earliest there is {row[0]}",
                int(row[0]),
            )


class WrongBatchError(Exception):
    """A stored batch is not what was written."""


def row_near(
    connection: apsw.Connection, stream: Stream, partition: int, offset: int
) -> Row | None:
    """The index row that holds an offset, or the next one; `DamagedError` if it is not to be
    believed."""
    found = one(connection, "batch_before", stream.id, partition, offset)
    row = None if found is None else checked_row(connection, stream, partition, Row(*found))
    if row is None or row.next_offset <= offset:
        found = one(connection, "batches_from", stream.id, partition, offset, 1)
        row = None if found is None else checked_row(connection, stream, partition, Row(*found))
    return row


def checked_row(connection: apsw.Connection, stream: Stream, partition: int, row: Row) -> Row:
    """The row, if its seal is right."""
    place = (stream.id, partition, row.first_offset)
    expected = seal(
        place, row.rows, row.blob_id, row.checksum, row.commit_number, row.time_us, row.runs
    )
    if expected != row.seal:
        raise damaged(connection, stream, partition, row, "its index entry does not match its seal")
    return row


def read_stored(connection: apsw.Connection, row: Row) -> pa.Buffer | None:
    """The blob of a row; `None` where there is none."""
    try:
        return read_blob(connection, row.blob_id)
    except apsw.CorruptError as error:
        raise WrongBatchError(str(error)) from error


def decode(stream: Stream, partition: int, row: Row, data: pa.Buffer) -> Batch:
    """Check a stored batch and open it; `WrongBatchError` where it is not what was written."""
    if checksum(data) != row.checksum:
        raise WrongBatchError("its checksum does not match")
    try:
        stored = decode_blob(data)
    except (pa.ArrowException, OSError) as error:
        raise WrongBatchError(str(error)) from error
    if stored.num_rows != row.rows:
        raise WrongBatchError("it has another number of events than recorded")
    return Batch(stream, partition, row.first_offset, stored, runs_of(row))


def runs_of(row: Row) -> list[Run]:
    if row.runs is None:
        return [Run(row.first_offset, row.commit_number, row.time_us)]
    return _RUNS.decode(row.runs)


def unreadable(stream: Stream, partition: int, offset: int) -> DamagedError:
    """Names an event that is stored as it was written, and cannot be read all the same."""
    return DamagedError(
        f"stream {stream.name}, partition {partition}: the event at offset {offset} holds "
        f"{OUT_OF_RANGE}; everything else can be read: go on at offset {offset + 1}",
        str(stream.name),
        partition,
        offset,
        offset,
    )


def damaged(
    connection: apsw.Connection, stream: Stream, partition: int, row: Row, why: str
) -> DamagedError:
    """Names the damage. How far it reaches, the next batch says, not the damaged one."""
    after = one(connection, "batches_from", stream.id, partition, row.first_offset + 1, 1)
    bounds = one(connection, "offsets_of_partition", stream.id, partition)
    end = after[0] if after is not None else bounds[1] if bounds is not None else 0
    last = max(end - 1, row.first_offset)
    return DamagedError(
        f"stream {stream.name}, partition {partition}: offsets {row.first_offset} to {last} are "
        f"damaged ({why}); everything else can be read: go on at offset {last + 1}, and "
        "restore these from a backup",
        str(stream.name),
        partition,
        row.first_offset,
        last,
    )


class Waiter:
    """Waits for new events: told at once by this process's commits, soon by another's.

    Another process's commit shows in SQLite's change counter, one value in shared memory. Of
    all who wait, one looks at it every few milliseconds and tells the others.
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
        """Something has changed, or may have: whoever waits looks."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def wait(self, stream: Stream, positions: Mapping[int, int], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s

        def has_news(connection: apsw.Connection) -> bool:
            rows = many(connection, "offsets", stream.id)
            return any(next_ > positions.get(partition, next_) for partition, _, next_ in rows)

        while not self._closed:
            seen = self._changes
            with self._pool.lend() as connection:
                if has_news(connection):
                    return True
            if deadline <= time.monotonic():
                return False
            if self._is_watcher(seen, deadline):
                try:
                    with translated(self._pool.path):
                        self._watch(deadline, has_news)
                finally:
                    with self._changed:
                        self._has_watcher = False
                        self._changed.notify_all()  # somebody else must watch
                        if self._closed:
                            self._held.close()
        return False

    def _is_watcher(self, seen: int, deadline: float) -> bool:
        """Wait until something has changed since `seen`; true for the one who is to watch."""
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
        """Watch the file for all who wait, until there is news for the one who watches."""
        if self._connection is None:
            self._connection = self._held.enter_context(self._pool.lend())
        told, pause = self._changes, WAIT_FIRST_S
        while not self._closed:
            # A connection counts for itself, so it is always the same one.
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
        """Let everybody go; whoever watches gives the connection back on leaving."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if not self._has_watcher:
                self._held.close()
