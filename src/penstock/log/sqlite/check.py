"""Verifying an embedded log, and copying it while it is in use."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import apsw

from penstock.errors import DamagedError, LogError, ObjectExistsError
from penstock.log.api import Damage, Report
from penstock.log.batch import Batch
from penstock.log.declaring.names import StreamName
from penstock.log.declaring.objects import Stream
from penstock.log.sqlite.connection import ReaderPool, many, one, translate_errors
from penstock.log.sqlite.index import (
    IndexRow,
    WrongBatchError,
    damage_at,
    decode,
    read_stored,
    row_near,
    unreadable,
)
from penstock.log.sqlite.objects import Directory

BACKUP_PAGES = 1024
OFFSET_MAX = 2**63 - 1
ENTRIES = 1000
_BOOKS = {
    "producers": "the latest commits of producers",
    "progress": "the progress of apps, connectors and others",
    "ids": "ids assigned by producers",
    "id_ranges": "ids assigned by producers",
    "pieces": "staged events that are not committed yet",
}


class Verifier:
    """Reads everything once and reports what differs from what was written."""

    def __init__(self, pool: ReaderPool, progress: Report | None) -> None:
        self._pool = pool
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self._total = 0

    def run(self, directory: Directory) -> Iterator[Damage]:
        yield from self._file()
        streams: dict[int, Stream] = {}
        yield from self._streams(directory, streams)
        yield from self._events(streams)
        for stream in streams.values():
            if stream.spec.table:
                yield from self._entries(stream)
        yield from self._books()
        self._progress(self._total, self._total)

    def _file(self) -> Iterator[Damage]:
        """SQLite's own check of its pages and indexes; later findings say what that means."""
        messages: list[str] = []
        try:
            with self._pool.lend() as connection:
                for (message,) in connection.execute("PRAGMA quick_check(20)"):
                    messages += [line for line in str(message).splitlines() if "***" not in line]
        except LogError as error:
            messages.append(_why(error))
        if messages == ["ok"]:
            return
        shown = "; ".join(messages[:3]) + ("; …" if len(messages) > 3 else "")
        yield Damage(
            f"pages of the file itself are damaged (SQLite reports: {shown}). Everything that "
            "cannot be read is listed here; the rest can. Do not write to this log: restore a "
            "backup, or copy what can be read to a new log (penstock read --on-damage skip)"
        )

    def _streams(self, directory: Directory, found: dict[int, Stream]) -> Iterator[Damage]:
        """Check the declarations of the streams, without which no events can be read."""
        try:
            with self._pool.lend() as connection:
                names = [StreamName(*name) for name in many(connection, "stream_names")]
        except LogError as error:
            yield Damage(
                f"the list of streams cannot be read ({_why(error)}): nothing in this log can be "
                "read; restore a backup"
            )
            return
        for name in names:
            try:
                with self._pool.lend() as connection:
                    stream = directory.find(connection, name)
                if stream is not None:
                    found[stream.id] = stream
            except LogError as error:
                yield Damage(
                    f"stream {name}: its declaration cannot be read ({_why(error)}), and so none "
                    "of its events; restore them from a backup",
                    str(name),
                )

    def _events(self, streams: Mapping[int, Stream]) -> Iterator[Damage]:
        try:
            with self._pool.lend() as connection:
                counted = one(connection, "batch_count")
                self._total = int(counted[0]) if counted else 0
        except LogError:
            self._total = 0  # the same error is found and reported below
        for stream in streams.values():
            try:
                with self._pool.lend() as connection:
                    bounds = many(connection, "offsets", stream.id)
            except LogError as error:
                yield Damage(
                    f"stream {stream.name}: the bounds of its partitions cannot be read "
                    f"({_why(error)}), and so none of its events; restore them from a backup",
                    str(stream.name),
                )
                continue
            for partition, first, next_ in bounds:
                try:
                    yield from self._partition(stream, partition, first, next_)
                except LogError as error:
                    yield Damage(
                        f"stream {stream.name}, partition {partition}: its index cannot be read "
                        f"({_why(error)}): events are missing; restore them from a backup",
                        str(stream.name),
                        partition,
                    )

    def _entries(self, stream: Stream) -> Iterator[Damage]:
        after: bytes | None = b""
        try:
            while after is not None:
                with self._pool.lend() as connection:
                    rows = many(connection, "entries_after", stream.id, after, ENTRIES)
                after = rows[-1][0] if rows else None
        except LogError as error:
            yield Damage(
                f"table {stream.name}: entries cannot be read ({_why(error)}). They are derived "
                "from its changelog, a stream of events that is listed here only if it is damaged "
                "too; restore a backup",
                str(stream.name),
            )

    def _books(self) -> Iterator[Damage]:
        """Check what the log knows about its writers."""
        for name, meaning in _BOOKS.items():
            try:
                with self._pool.lend() as connection:
                    connection.execute(f"SELECT * FROM {name}").fetchall()  # noqa: S608  our own
            except LogError as error:
                yield Damage(
                    f"{meaning} cannot be read ({_why(error)}): retried writes may be stored "
                    "twice; restore a backup"
                )

    def _partition(
        self, stream: Stream, partition: int, first: int, next_: int
    ) -> Iterator[Damage]:
        """Follow the offsets from batch to batch, as a reader would; new events are not checked."""
        offset = first
        while offset < next_:
            try:
                row = self._read(stream, partition, offset)
            except DamagedError as error:
                yield Damage(
                    str(error), str(stream.name), partition, error.first_offset, error.last_offset
                )
                offset = error.last_offset + 1
            else:
                start = next_ if row is None else min(row.first_offset, next_)
                if start > offset and self._is_still_wanted(stream, partition, offset):
                    yield _gap(stream, partition, offset, start - 1)
                offset = next_ if row is None else max(row.next_offset, start)
            self._done += 1
            self._progress(self._done, max(self._total, self._done))
        yield from self._beyond(stream, partition)

    def _read(self, stream: Stream, partition: int, offset: int) -> IndexRow | None:
        """Read and check the batch that contains an offset, or the next one."""
        seen: IndexRow | None = None
        while True:
            with self._pool.lend() as connection:
                row = row_near(connection, stream, partition, offset)
                if row is None:
                    return None
                try:
                    data = read_stored(connection, row)
                    if data is not None:
                        bad = _first_unreadable(decode(stream, partition, row, data), offset)
                        if bad is not None:
                            raise unreadable(stream, partition, bad)
                        return row
                    if row == seen:
                        raise WrongBatchError("its data is missing")
                except WrongBatchError as wrong:
                    raise damage_at(connection, stream, partition, row, str(wrong)) from wrong
            seen = row  # merged between the two steps: the row has changed

    def _beyond(self, stream: Stream, partition: int) -> Iterator[Damage]:
        """Batches past the partition's end, which readers would never reach."""
        with self._pool.lend() as connection:
            last = one(connection, "batch_before", stream.id, partition, OFFSET_MAX)
            bounds = one(connection, "offsets_of_partition", stream.id, partition)
        if last is None or bounds is None:
            return
        row = IndexRow(*last)
        if row.first_offset >= bounds[1]:
            why = f"offset {row.first_offset} lies past the recorded end, {bounds[1]}"
            message = f"stream {stream.name}, partition {partition}: {why}"
            yield Damage(message, str(stream.name), partition, row.first_offset, row.first_offset)

    def _is_still_wanted(self, stream: Stream, partition: int, offset: int) -> bool:
        """Whether an offset should exist: retention or a drop may have removed it meanwhile."""
        with self._pool.lend() as connection:
            row = one(connection, "offsets_of_partition", stream.id, partition)
        return row is not None and offset >= row[0]


def _first_unreadable(batch: Batch, offset: int) -> int | None:
    """The first one from `offset` on: earlier ones were reported already."""
    left = batch.slice_offsets(max(offset, batch.first_offset), batch.next_offset)
    return left.first_unreadable()


def _why(error: LogError) -> str:
    """SQLite's own message, without advice: the caller knows what it means and adds that."""
    return str(error.__cause__ or error)


def _gap(stream: Stream, partition: int, first: int, last: int) -> Damage:
    message = f"stream {stream.name}, partition {partition}: offsets {first} to {last} are missing"
    return Damage(message, str(stream.name), partition, first, last)


def back_up(pool: ReaderPool, target: Path, progress: Report | None) -> None:
    """Copy the log as of now into a new file.

    The source's read transaction stays open during the copy, so writes made meanwhile neither
    disturb it nor appear in it. The target appears under its name only when it is complete and
    on disk.
    """
    if target.exists():
        raise ObjectExistsError(f"{target} already exists: choose another name, or remove it")
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with pool.lend() as reader, translate_errors(target):
            reader.execute("BEGIN")
            one(reader, "state")
            with contextlib.closing(apsw.Connection(str(partial))) as copy:
                copy.execute("PRAGMA synchronous = OFF").fetchall()
                _copy_pages(copy, reader, progress)
            reader.execute("ROLLBACK")
        _sync(partial)
        try:
            target.hardlink_to(partial)
        except FileExistsError:
            raise ObjectExistsError(
                f"{target} was created by another process in the meantime"
            ) from None
        _sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def _copy_pages(copy: apsw.Connection, reader: apsw.Connection, progress: Report | None) -> None:
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
