"""Verifying an embedded log, and copying it while it is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import apsw

from penstock.errors import DamagedError, ObjectExistsError
from penstock.log.api import Damage, Progress
from penstock.log.objects import Stream
from penstock.log.sqlite.connection import ReaderPool, many, one, read_blob, translated
from penstock.log.sqlite.reading import Row, damaged, decode

BACKUP_PAGES = 1024
OFFSET_MAX = 2**63 - 1


class Verifier:
    """Reads everything once and reports what is not what was written."""

    def __init__(self, pool: ReaderPool, progress: Progress | None) -> None:
        self._pool = pool
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self._total = 0

    def run(self, streams: list[Stream]) -> Iterator[Damage]:
        yield from self._file()
        with self._pool.lend() as connection:
            counted = one(connection, "batch_count")
            self._total = int(counted[0]) if counted else 0
            partitions = many(connection, "all_partitions")
        by_id = {stream.id: stream for stream in streams}
        for stream_id, partition, first, next_ in partitions:
            if stream_id in by_id:
                yield from self._partition(by_id[stream_id], partition, first, next_)
        self._progress(self._total, self._total)

    def _file(self) -> Iterator[Damage]:
        """SQLite's own check of its pages and indexes."""
        try:
            with self._pool.lend() as connection:
                for (message,) in connection.execute("PRAGMA quick_check(20)"):
                    if message != "ok":
                        yield Damage(f"the SQLite file is damaged: {message}")
        except DamagedError:
            raise
        except Exception as error:
            yield Damage(f"the SQLite file is damaged: {_why(error)}")

    def _partition(
        self, stream: Stream, partition: int, first: int, next_: int
    ) -> Iterator[Damage]:
        """Follow the offsets from batch to batch, as a reader would; what is new is left out."""
        offset = first
        while offset < next_:
            row = self._row(stream, partition, offset)
            if row is None or row.first_offset > offset:
                end = next_ if row is None else min(row.first_offset, next_)
                if self._still_wanted(stream, partition, offset):
                    yield _gap(stream, partition, offset, end - 1)
                offset = end
                continue
            yield from self._batch(stream, partition, row)
            offset = row.next_offset
            self._done += 1
            self._progress(self._done, max(self._total, self._done))
        yield from self._beyond(stream, partition)

    def _beyond(self, stream: Stream, partition: int) -> Iterator[Damage]:
        """Batches past the partition's end: readers would never come to them."""
        with self._pool.lend() as connection:
            last = one(connection, "batch_before", stream.id, partition, OFFSET_MAX)
            bounds = one(connection, "offsets_of_partition", stream.id, partition)
        if last is not None and bounds is not None and Row(*last).next_offset > bounds[1]:
            row = Row(*last)
            why = "the recorded end of the partition is too low"
            yield _damage(stream, partition, row, str(damaged(stream, partition, row, why)))

    def _row(self, stream: Stream, partition: int, offset: int) -> Row | None:
        """The batch that holds an offset, or the next one."""
        place = (stream.id, partition, offset)
        with self._pool.lend() as connection:
            found = one(connection, "batch_before", *place)
            if found is None or Row(*found).next_offset <= offset:
                found = one(connection, "batches_from", *place, 1)
        return None if found is None else Row(*found)

    def _still_wanted(self, stream: Stream, partition: int, offset: int) -> bool:
        """Whether an offset should be there: retention or a drop may have taken it meanwhile."""
        with self._pool.lend() as connection:
            row = one(connection, "offsets_of_partition", stream.id, partition)
        return row is not None and offset >= row[0]

    def _batch(self, stream: Stream, partition: int, row: Row) -> Iterator[Damage]:
        try:
            with self._pool.lend() as connection:
                data = read_blob(connection, row.blob_id)
                same = one(connection, "batch_before", stream.id, partition, row.first_offset)
            if data is not None:
                decode(stream, partition, row, data)
            elif same == row:
                yield _damage(
                    stream, partition, row, str(damaged(stream, partition, row, "no data"))
                )
        except DamagedError as error:
            yield _damage(stream, partition, row, str(error))
        except Exception as error:  # whatever SQLite raises is the finding
            yield _damage(stream, partition, row, str(damaged(stream, partition, row, _why(error))))


def _why(error: Exception) -> str:
    """What SQLite itself said."""
    return str(error.__cause__ or error)


def _damage(stream: Stream, partition: int, row: Row, message: str) -> Damage:
    return Damage(message, str(stream.name), partition, row.first_offset, row.next_offset - 1)


def _gap(stream: Stream, partition: int, first: int, last: int) -> Damage:
    message = f"stream {stream.name}, partition {partition}: offsets {first} to {last} are missing"
    return Damage(message, str(stream.name), partition, first, last)


def back_up(pool: ReaderPool, target: Path, progress: Progress | None) -> None:
    """Copy the log as of now into a new file.

    The source's read transaction stays open during the copy, so what others write meanwhile
    neither disturbs it nor shows in it. The target appears under its name only when it is
    whole and on disk.
    """
    if target.exists():
        raise ObjectExistsError(f"{target} exists already: choose another name, or remove it")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        with pool.lend() as reader, translated(target):
            reader.execute("BEGIN")
            one(reader, "state")
            with contextlib.closing(apsw.Connection(str(partial))) as copy:
                copy.execute("PRAGMA synchronous = OFF").fetchall()
                _copy_pages(copy, reader, progress)
            reader.execute("ROLLBACK")
        _sync(partial)
        partial.rename(target)
        _sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def _copy_pages(copy: apsw.Connection, reader: apsw.Connection, progress: Progress | None) -> None:
    with copy.backup("main", reader, "main") as backup:
        while not backup.done:
            backup.step(BACKUP_PAGES)
            if progress:
                progress(backup.page_count - backup.remaining, backup.page_count)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
