"""Data derived from streams, in a local SQLite file: entries of tables, ids of streams.

How far a partition was read is saved in the same transaction as what was read. So the file is
correct as of that offset after any crash or power failure: SQLite syncs its log before it writes
pages, so at most the last transactions are lost, and these are read again. The file can be deleted
at any time. All processes of a machine share one, and any of them may have to start it over: so
each reader checks in its own transaction how far the file was read.

When an entry changes, its older version is kept for a while, so that a pinned moment can be read.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import apsw
import msgspec
import pyarrow as pa

from penstock.errors import DamagedError, LogBusyError, LogError, OffsetGoneError
from penstock.log.api import TableEntry
from penstock.log.batch import Batch
from penstock.log.engine.ids import ID_SQL, take_new
from penstock.log.kafka.objects import KafkaStream
from penstock.log.reading.collections import Action, Collection, Collections, replay
from penstock.log.reading.table import pack_entries, unpacker
from penstock.records.event import DELETED, now_us
from penstock.resources import statements

BUSY_MS = 120_000
KEPT_US = 3_700_000_000
"""Older versions are kept as long as an app's batch may hold a pin."""
STALE_US = 20 * 3600 * 1_000_000
"""Compaction keeps deletions for a day; a file not used for that long may have missed some."""
SEEN_EVERY_US = 3600 * 1_000_000
"""How often to note that a partition was read to its end, if there was nothing new."""
MOMENT_TRIES_MAX = 100
FILE_FORMAT = 2
"""Part of the file's name; changed when the format or its guarantees change."""
UNUSED_US = 30 * 24 * 3600 * 1_000_000
"""Files of other logs that were not used for this long are removed."""
ReadChanges = Callable[[KafkaStream, int, int, int], Iterator[Batch]]
StoreRow = tuple[Any, ...]


def _sql(name: str) -> str:
    return statements(__package__, "store.sql").get(name) or ID_SQL[name]


class Store:
    """The local file, with one connection per thread. Thread-safe."""

    def __init__(self, path: Path | None, read: ReadChanges, vfs: str = "") -> None:
        self.path = path
        self._read = read
        self._vfs = vfs
        self._local = threading.local()
        self._all: weakref.WeakSet[apsw.Connection] = weakref.WeakSet()
        self._lock = threading.Lock()

    def _connection(self) -> apsw.Connection:
        found: apsw.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            try:
                found = self._open()
            except apsw.Error as error:
                raise LogError(
                    f"{self.path} cannot be used to store tables: {error}; choose another "
                    "folder with the log option cache"
                ) from error
            self._local.connection = found
            with self._lock:
                self._all.add(found)
        return found

    def _open(self) -> apsw.Connection:
        if self.path is None:
            connection = apsw.Connection(":memory:")
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = apsw.Connection(str(self.path), vfs=self._vfs or None)
        connection.set_busy_timeout(BUSY_MS)
        connection.pragma("synchronous", "extra")  # the journal of these steps must not reappear
        connection.pragma("journal_mode", "wal")
        connection.execute(_sql("schema"))
        connection.pragma("synchronous", "normal")
        return connection

    def close(self) -> None:
        with self._lock:
            for connection in list(self._all):
                connection.close()

    # Catching up

    @contextlib.contextmanager
    def moment(
        self, stream: KafkaStream, ends: Mapping[int, int], asked_us: int, *, begin: str = "BEGIN"
    ) -> Iterator[None]:
        """Let this thread read the file as of one moment, with everything before these offsets.

        `asked_us` is when these offsets were the ends of their partitions.
        """
        connection = self._connection()
        for _ in range(MOMENT_TRIES_MAX):
            self.catch_up(stream, ends, asked_us)
            with self._transaction(connection, begin, "ROLLBACK"):
                # Another process may have started over in between.
                if all(self._next(connection, stream, p) >= end for p, end in ends.items()):
                    yield
                    return
        raise LogBusyError(
            f"{self.path} is constantly being recreated by other processes: try again"
        )

    def catch_up(self, stream: KafkaStream, ends: Mapping[int, int], asked_us: int) -> None:
        """Read these partitions up to these offsets."""
        connection = self._connection()
        for partition, end in ends.items():
            if self._is_stale(connection, stream, partition):
                self._begin_anew(connection, stream, partition)
            if self._next(connection, stream, partition) < end:
                self._take_in(connection, stream, partition, end, asked_us)
            self._note_seen(connection, stream, partition, end, asked_us)

    def _is_stale(self, connection: apsw.Connection, stream: KafkaStream, partition: int) -> bool:
        """Whether compaction may have removed deletions that were not read here."""
        seen_us = self._seen_us(connection, stream, partition)
        return seen_us is not None and stream.spec.table and seen_us < now_us() - STALE_US

    def _begin_anew(self, connection: apsw.Connection, stream: KafkaStream, partition: int) -> None:
        with self._writing(connection):
            if self._is_stale(connection, stream, partition):  # unless another process did
                for name in ("forget_partition", "forget_all_marks", "forget_place"):
                    self._run(connection, name, stream.id, partition)

    def _note_seen(
        self,
        connection: apsw.Connection,
        stream: KafkaStream,
        partition: int,
        end: int,
        asked_us: int,
    ) -> None:
        """Note that everything up to the end at `asked_us` was read: nothing is missing."""
        seen_us = self._seen_us(connection, stream, partition)
        if seen_us is not None and seen_us < asked_us - SEEN_EVERY_US:
            with self._writing(connection):
                self._run(connection, "save_seen", asked_us, stream.id, partition, end)

    def _take_in(
        self,
        connection: apsw.Connection,
        stream: KafkaStream,
        partition: int,
        end: int,
        asked_us: int,
    ) -> None:
        """Read batch by batch, so that nobody waits long; another process may do the same."""
        at = self._next(connection, stream, partition)
        while at < end:
            for batch in self._good(stream, partition, at, end):
                with self._writing(connection):
                    if self._next(connection, stream, partition) != at:
                        break
                    floor = self._save(connection, stream, partition, batch)
                    at = batch.next_offset
                    self._run(connection, "save_place", stream.id, partition, at, floor, asked_us)
            else:
                with self._writing(connection):
                    if self._next(connection, stream, partition) == at:
                        self._run(connection, "save_place", stream.id, partition, end, 0, asked_us)
            at = self._next(connection, stream, partition)

    def _good(self, stream: KafkaStream, partition: int, start: int, end: int) -> Iterator[Batch]:
        """The readable batches, from the first that exists; for ids, skipping damaged ones."""
        while start < end:
            try:
                for batch in self._read(stream, partition, start, end):
                    yield batch
                    start = batch.next_offset
                return
            except OffsetGoneError as gone:
                start = gone.earliest
            except DamagedError as damage:
                if stream.spec.table:
                    raise
                start = damage.last_offset + 1

    def _next(self, connection: apsw.Connection, stream: KafkaStream, partition: int) -> int:
        row = connection.execute(_sql("place"), (stream.id, partition)).fetchone()
        return 0 if row is None else int(row[0])

    def _seen_us(
        self, connection: apsw.Connection, stream: KafkaStream, partition: int
    ) -> int | None:
        row = connection.execute(_sql("seen"), (stream.id, partition)).fetchone()
        return None if row is None else int(row[0])

    def _save(
        self, connection: apsw.Connection, stream: KafkaStream, partition: int, batch: Batch
    ) -> int:
        """Save a batch; return the offset before which older versions were discarded."""
        if stream.spec.ids == "producer":
            # No older than any of the events: an id must not be forgotten before its event.
            rows = IdWrite(connection, batch.runs[-1].time_us)
            take_new(rows, stream.id, batch.ids().to_pylist())
        if stream.spec.table:
            return self._save_entries(connection, stream, partition, batch)
        return 0

    def _save_entries(
        self, connection: apsw.Connection, stream: KafkaStream, partition: int, batch: Batch
    ) -> int:
        before_us = now_us() - KEPT_US
        changes = (
            self._by_action(connection, stream, batch)
            if stream.spec.entries != "value"
            else self._by_value(stream, batch, before_us)
        )
        saved = [
            (stream.id, key, _rank(stream, key, partition), offset, partition, value)
            for key, value, offset in changes
        ]
        connection.executemany(_sql("save_version"), saved)
        self._run(
            connection,
            "save_mark",
            stream.id,
            partition,
            batch.runs[0].time_us,
            batch.first_offset,
        )
        row = connection.execute(_sql("floor"), (stream.id, partition, before_us)).fetchone()
        floor = 0 if row is None or row[0] is None else int(row[0])
        if batch.runs[-1].time_us < before_us:
            floor = batch.next_offset  # versions in between were not kept
        if floor:
            connection.executemany(
                _sql("forget_versions"), [(stream.id, one[1], partition, floor) for one in saved]
            )
            self._run(connection, "forget_marks", stream.id, partition, floor)
        return floor

    @staticmethod
    def _by_value(
        stream: KafkaStream, batch: Batch, before_us: int
    ) -> list[tuple[bytes, bytes | None, int]]:
        """Save every change, since a pin may lie between two; of old ones, only each key's last."""
        keys, offsets = batch.keys().to_pylist(), batch.offsets().to_pylist()
        rows = batch.to_arrow([*batch.data().schema.names, DELETED])
        if batch.runs[-1].time_us < before_us:
            last = dict(zip(keys, range(len(keys)), strict=True))
            rows = rows.take(pa.array(last.values(), pa.int64()))
            keys, offsets = list(last), [offsets[row] for row in last.values()]
        return list(zip(keys, pack_entries(stream, rows), offsets, strict=True))

    def _by_action(
        self, connection: apsw.Connection, stream: KafkaStream, batch: Batch
    ) -> list[tuple[bytes, bytes | None, int]]:
        """Save sets and lists, by replaying the actions on each."""
        pack, unpack = Collections.of(stream).pack_stored, unpacker(stream)
        keys = cast(list[bytes], batch.keys().to_pylist())
        before = self._latest(connection, stream.id, sorted(set(keys)))
        held = {key: cast(Collection, unpack(entry.value)) for key, entry in before.items()}
        found = []
        for key, value, offset in zip(
            keys, batch.values(), batch.offsets().to_pylist(), strict=True
        ):
            told = cast(Any, value)
            action = (
                Action("delete") if told is None else Action(told.action, told.value, told.values)
            )
            after = replay(stream.spec.entries, held.get(key), action)
            if after is None:
                held.pop(key, None)
            else:
                held[key] = after
            found.append((key, None if after is None else pack(after), offset))
        return found

    # Entries, as of the thread's moment

    def get(
        self, stream: KafkaStream, keys: Sequence[bytes], at: Mapping[int, int] | None
    ) -> list[TableEntry | None]:
        found = self._latest(self._connection(), stream.id, sorted(set(keys)), at)
        return [found.get(key) for key in keys]

    def _latest(
        self,
        connection: apsw.Connection,
        stream_id: int,
        keys: Sequence[bytes],
        at: Mapping[int, int] | None = None,
    ) -> dict[bytes, TableEntry]:
        if not keys:
            return {}
        values: tuple[Any, ...] = (apsw.carray(tuple(keys)), stream_id)
        if at is not None:
            values += (msgspec.json.encode(at).decode(),)
        name = "latest" if at is None else "latest_at"
        rows: list[StoreRow] = connection.execute(_sql(name), values).fetchall()
        return {row[0]: TableEntry(*row) for row in rows}

    def page(
        self, stream: KafkaStream, after: bytes | None, limit: int, at: Mapping[int, int] | None
    ) -> list[TableEntry]:
        values: tuple[Any, ...] = (stream.id, after or b"", limit)
        if at is not None:
            values += (msgspec.json.encode(at).decode(),)
        name = "page" if at is None else "page_at"
        rows: list[StoreRow] = self._connection().execute(_sql(name), values).fetchall()
        return [TableEntry(*row) for row in rows]

    def floor(self, stream: KafkaStream, partition: int) -> int:
        """Before this offset, older versions may have been discarded."""
        row = self._connection().execute(_sql("place"), (stream.id, partition)).fetchone()
        return 0 if row is None else int(row[1])

    # Ids

    def find_held(self, stream: KafkaStream, ids: Sequence[str], end: int) -> list[int]:
        """The rows whose ids the stream holds before `end`, or that repeat an earlier row's id."""
        with self.moment(stream, {0: end}, now_us(), begin="BEGIN IMMEDIATE"):
            return take_new(IdWrite(self._connection(), 0), stream.id, ids)

    # Upkeep

    def forget_ids(self, stream: KafkaStream, before_us: int) -> None:
        """Forget ids of removed events; integers stay, since as ranges they take little space."""
        connection = self._connection()
        with self._writing(connection):
            self._run(connection, "forget_ids", stream.id, before_us)

    def forget_others(self, streams: Sequence[KafkaStream]) -> None:
        """Forget everything about streams that no longer exist."""
        kept = msgspec.json.encode([stream.id for stream in streams]).decode()
        connection = self._connection()
        with self._writing(connection):
            for table in ("places", "marks", "versions", "id_ranges", "ids"):
                connection.execute(
                    f"DELETE FROM {table} WHERE stream_id NOT IN (SELECT value FROM json_each(?))",  # noqa: S608
                    (kept,),
                )

    def remove_unused(self) -> None:
        """Remove the files of logs that were not used here for a long time."""
        if self.path is None or not self.path.parent.exists():
            return
        for path in self.path.parent.glob("*.db"):
            parts = [path.with_name(f"{path.name}{suffix}") for suffix in ("", "-wal", "-shm")]
            used_s = max((p.stat().st_mtime for p in parts if p.exists()), default=0.0)
            if path != self.path and used_s * 1e6 < now_us() - UNUSED_US:
                for part in parts:
                    part.unlink(missing_ok=True)

    # Inside

    def _writing(self, connection: apsw.Connection) -> contextlib.AbstractContextManager[None]:
        return self._transaction(connection, "BEGIN IMMEDIATE", "COMMIT")

    @contextlib.contextmanager
    def _transaction(self, connection: apsw.Connection, begin: str, end: str) -> Iterator[None]:
        try:
            connection.execute(begin)
        except apsw.BusyError as error:
            raise LogBusyError(f"{self.path} is in use by other processes: try again") from error
        try:
            yield
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute(end)

    @staticmethod
    def _run(connection: apsw.Connection, name: str, *values: object) -> None:
        connection.execute(_sql(name), values)


class IdWrite:
    """A write transaction in the form that `take_new` requires."""

    def __init__(self, connection: apsw.Connection, time_us: int) -> None:
        self.time_us = time_us
        self._connection = connection

    def run(self, name: str, *values: object) -> None:
        self._connection.execute(_sql(name), values)

    def look(self, name: str, *values: object) -> StoreRow | None:
        return self._connection.execute(_sql(name), values).fetchone()

    def look_all(self, name: str, *values: object) -> Sequence[StoreRow]:
        given = values[0] if len(values) == 1 and isinstance(values[0], dict) else values
        return self._connection.execute(_sql(name), cast(Any, given)).fetchall()


def _rank(stream: KafkaStream, key: bytes, partition: int) -> int:
    """The latest growth of the stream after which the key belongs to this partition."""
    if len(stream.grown) == 1:
        return 0
    crc = zlib.crc32(key)
    return max((i for i, count in enumerate(stream.grown) if crc % count == partition), default=0)
