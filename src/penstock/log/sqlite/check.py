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
from penstock.log.sqlite.reading import Row, decode

BACKUP_PAGES = 1024
ROWS_AT_A_TIME = 256


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
            yield Damage(f"the SQLite file is damaged: {error}")

    def _partition(
        self, stream: Stream, partition: int, first: int, next_: int
    ) -> Iterator[Damage]:
        expected = first
        for row in self._rows(stream, partition, first):
            if row.first_offset >= next_:
                break  # appended meanwhile
            if row.first_offset > expected:
                yield _gap(stream, partition, expected, row.first_offset - 1)
            expected = row.next_offset
            yield from self._batch(stream, partition, row)
            self._done += 1
            self._progress(self._done, max(self._total, self._done))
        if expected < next_:
            yield _gap(stream, partition, expected, next_ - 1)

    def _rows(self, stream: Stream, partition: int, offset: int) -> Iterator[Row]:
        while True:
            with self._pool.lend() as connection:
                found = many(
                    connection, "batches_from", stream.id, partition, offset, ROWS_AT_A_TIME
                )
            rows = [Row(*row) for row in found]
            yield from rows
            if not rows:
                return
            offset = rows[-1].next_offset

    def _batch(self, stream: Stream, partition: int, row: Row) -> Iterator[Damage]:
        try:
            with self._pool.lend() as connection:
                data = read_blob(connection, row.blob_id)
                same = one(connection, "batch_before", stream.id, partition, row.first_offset)
            if data is not None:
                decode(stream, partition, row, data)
            elif same == row:
                yield _damage(stream, partition, row, "its data is missing")
        except DamagedError as error:
            yield _damage(stream, partition, row, str(error))
        except Exception as error:
            yield _damage(stream, partition, row, str(error))


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
