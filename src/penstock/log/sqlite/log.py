"""The embedded engine: a log in one SQLite file, used by any number of processes at once."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import apsw
import msgspec

from penstock.errors import (
    LogBusyError,
    LogError,
    LogFullError,
    LogIOError,
    PenstockError,
    UsageError,
)
from penstock.failpoints import failpoint
from penstock.log.api import (
    Commit,
    CommitOptions,
    Committed,
    Count,
    Damage,
    Holder,
    Limits,
    Offsets,
    Part,
    Piece,
    Pin,
    Report,
    TableEntry,
    Upkeep,
)
from penstock.log.batch import Batch
from penstock.log.declaring.names import OBJECTS, check_producer
from penstock.log.declaring.objects import (
    ACKS_ORDER,
    Change,
    Defaults,
    ObjectChanged,
    Stream,
    describe_change,
    system_streams,
    to_event,
)
from penstock.log.engine.caretaker import Caretaker
from penstock.log.engine.checks import check_call, check_limits
from penstock.log.engine.doubts import Doubts, unknown
from penstock.log.sqlite import connection as sqlite
from penstock.log.sqlite.check import Verifier, back_up
from penstock.log.sqlite.committer import Committer, Write
from penstock.log.sqlite.objects import Changer, Directory, create_system_objects, stream_in
from penstock.log.sqlite.reading import SqliteReader, Waiter
from penstock.log.sqlite.tables import SqliteTables, write_pin
from penstock.log.sqlite.upkeep import SqliteHousekeeper
from penstock.log.sqlite.writing import (
    SqlitePrepared,
    StreamChangedError,
    look_finally,
    place,
    prepare_part,
    prepare_piece,
    standing_of,
    sync,
    write_commit,
    write_stage,
)
from penstock.log.writing.compose import Composer, EventOptions
from penstock.log.writing.fate import ProducerStanding
from penstock.records.event import JsonValue, microseconds, now_us

T = TypeVar("T")
PREPARE_TRIES_MAX = 20
PIN_S_MAX = 24 * 3600.0
UNPIN_MS_MAX = 1_000


class SqliteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the embedded engine, besides the limits.

    `upkeep_interval_ms` is how often a process that writes carries out upkeep; 0 means never. With
    `read_only` nothing is written, not even next to the file if its directory is read-only.
    """

    upkeep_interval_ms: int = 2_000
    read_only: bool = False
    vfs: str | None = None


class SqliteLog:
    """See `penstock.log.api.Log` for what each method promises."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        limits: Limits = Limits(),
        defaults: Defaults = Defaults(),
        options: SqliteOptions = SqliteOptions(),
    ) -> None:
        self._path = path
        self._create = create
        self._limits = limits
        self._defaults = defaults
        self._options = options
        self._open = False
        self._pool = sqlite.ReaderPool(path, options.vfs)
        self._reader = SqliteReader(self._pool)
        self._waiter = Waiter(self._pool)
        self._tables = SqliteTables(self._pool)
        self._directory = Directory()
        self._committer = Committer(
            path, options.vfs, self._waiter.tell, read_only=options.read_only
        )
        self._caretaker = Caretaker(options.upkeep_interval_ms / 1000, self._keep_up)
        self._housekeeper = SqliteHousekeeper(self._pool, self._submit_quietly, limits)
        self._composer = Composer("penstock", limits)
        self._doubts = Doubts()

    def open(self) -> Self:
        """Open or create the file. Raises `LogFormatError` and other kinds of `LogError`."""
        sqlite.check_sqlite_version()
        if self._options.read_only:
            self._pool.restrict(sqlite.reading_access(self._path, self._options.vfs))
        else:
            sqlite.prepare_file(self._path, self._options.vfs, self._create)
            if not self.namespaces():
                self._submit(self._populate)
        self._open = True
        return self

    def _populate(self, write: Write) -> None:
        if not write.look("namespaces"):
            create_system_objects(write, self._changer(write), system_streams())

    def close(self) -> None:
        self._open = False
        self._caretaker.close()
        self._waiter.close()
        self._committer.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self if self._open else self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return str(self._path)

    @property
    def limits(self) -> Limits:
        return self._limits

    # Objects

    def namespaces(self) -> list[str]:
        with self._pool.lend() as connection:
            return [row[0] for row in sqlite.many(connection, "namespaces")]

    def streams(self) -> list[Stream]:
        with self._pool.lend() as connection:
            return self._directory.all(connection)

    def stream(self, name: str) -> Stream:
        with self._pool.lend() as connection:
            return self._directory.get(connection, name)

    def apply(self, changes: Sequence[Change]) -> None:
        changes = list(changes) if isinstance(changes, Sequence) else [changes]

        def work(write: Write) -> None:
            notes: list[ObjectChanged] = []
            self._changer(write).apply(
                changes,
                lambda change, before: notes.append(
                    to_event(change, describe_change(change, before))
                ),
            )
            self._note(write, notes)

        self._submit(work)

    def _changer(self, write: Write) -> Changer:
        return Changer(write, self._defaults, self._limits.partitions_max)

    def _note(self, write: Write, notes: Sequence[ObjectChanged]) -> None:
        """Append to `_system.objects` inside the change's own transaction."""
        if not notes:
            return
        stream = stream_in(write, OBJECTS)
        events = [self._composer.admit(stream, note, EventOptions(), system=True) for note in notes]
        part = self._composer.part(stream, events)
        prepared = prepare_part(stream, part, self._limits, CommitOptions())
        number = write.next_commit()
        place(write, prepared, number, pinned=False)
        failpoint("objects.event")

    # Writing

    def hold(self, producer: str, *, ephemeral: bool = False) -> Holder:
        check_producer(producer)

        def work(write: Write) -> Holder:
            write.epoch += 1
            values = {
                "name": producer,
                "epoch": write.epoch,
                "ephemeral": int(ephemeral),
                "now": write.time_us,
            }
            write.run("hold_producer", values)
            failpoint("hold.epoch")
            return Holder(producer, write.epoch)

        return self._submit(work)

    def last_commit(self, producer: str) -> Committed | None:
        return self._standing(producer, final=False).committed

    def prepare(self, part: Part, options: CommitOptions = CommitOptions()) -> Part:
        ready = self._prepare_part(part, options)
        return msgspec.structs.replace(part, ready=ready)

    def _prepare_part(
        self, part: Part, options: CommitOptions, *, staged: bool = False
    ) -> SqlitePrepared:
        stream = self.stream(part.stream)
        if isinstance(part.ready, SqlitePrepared) and part.ready.stream is stream:
            return part.ready
        return prepare_part(stream, part, self._limits, options, staged=staged)

    def stage(
        self, holder: Holder, sequence: int, part: Part, options: CommitOptions = CommitOptions()
    ) -> Piece:
        check_call(sequence, options)
        check_limits(Commit(parts=[part]), self._limits)

        def attempt() -> Piece:
            prepared = self._prepare_part(part, options, staged=True)
            return self._submit(
                lambda write: write_stage(write, holder, sequence, prepared),
                durable=self._durable([prepared.stream], options),
                timeout_ms=options.timeout_ms,
            )

        piece = self._until_steady(attempt, part.stream)
        failpoint("stage.committed")
        return piece

    def commit(
        self,
        holder: Holder,
        sequence: int,
        commit: Commit,
        options: CommitOptions = CommitOptions(),
    ) -> Committed:
        check_call(sequence, options)
        check_limits(commit, self._limits)
        try:
            done = self._until_steady(
                lambda: self._commit(holder, sequence, commit, options),
                f"commit {sequence} of {holder.producer}",
            )
        except PenstockError as error:
            return self._conclude(holder, sequence, error, options)
        except BaseException:
            self._doubts.add(holder, sequence)
            raise
        self._doubts.remove(holder, sequence)
        return done

    def _conclude(
        self, holder: Holder, sequence: int, error: PenstockError, options: CommitOptions
    ) -> Committed:
        done = self._doubts.conclude(
            holder, sequence, error, lambda final: self._standing(holder.producer, final)
        )
        try:
            self._submit(sync, durable=self._durable([], options))  # as durably as before
        except PenstockError as failed:
            self._doubts.add(holder, sequence)
            raise unknown(failed) from failed
        return done

    def _standing(self, producer: str, final: bool) -> ProducerStanding:
        if final:
            return self._submit(lambda write: look_finally(write, producer))
        with self._pool.lend() as connection:
            return standing_of(sqlite.one(connection, "producer", producer))

    def _commit(
        self, holder: Holder, sequence: int, commit: Commit, options: CommitOptions
    ) -> Committed:
        prepared = self._prepare(commit, options)
        failpoint("commit.prepared")
        done = self._submit(
            lambda write: write_commit(write, holder, sequence, prepared, commit),
            durable=self._durable([item.stream for item in prepared], options),
            timeout_ms=options.timeout_ms,
        )
        self._caretaker.start()
        return done

    def _prepare(self, commit: Commit, options: CommitOptions) -> list[SqlitePrepared]:
        prepared = [self._prepare_part(part, options) for part in commit.parts]
        if commit.pieces:
            with self._pool.lend() as connection:
                for piece in commit.pieces:
                    stream = self._directory.get(connection, piece.stream)
                    prepared.append(prepare_piece(connection, stream, piece))
        return prepared

    @staticmethod
    def _durable(streams: Sequence[Stream], options: CommitOptions) -> bool:
        """Whether COMMIT must wait for the disk: unless `write` suffices for all streams."""
        if options.acks is not None:
            return ACKS_ORDER[options.acks] > 0
        return not streams or any(ACKS_ORDER[stream.spec.acks] > 0 for stream in streams)

    def _until_steady(self, attempt: Callable[[], T], what: object) -> T:
        for _ in range(PREPARE_TRIES_MAX):
            try:
                return attempt()
            except StreamChangedError:
                continue
        raise LogError(f"{what}: the stream kept changing while events were written to it")

    def progress(self, key: str) -> bytes | None:
        with self._pool.lend() as connection:
            row = sqlite.one(connection, "progress", key)
        return None if row is None else bytes(row[0])

    def progress_items(self, prefix: str) -> dict[str, bytes]:
        with self._pool.lend() as connection:
            rows = sqlite.many(connection, "progress_items", {"prefix": prefix})
            return dict(rows)

    # Reading

    def offsets(self, stream: str) -> dict[int, Offsets]:
        return self._reader.offsets(self.stream(stream))

    def offset_at(self, stream: str, partition: int, time: dt.datetime) -> int:
        return self._reader.offset_at(self.stream(stream), partition, microseconds(time))

    def advance(self, stream: str, partition: int, start: int, rows: int) -> int:
        del stream, partition  # offsets have no gaps here
        return start + rows

    def retreat(self, stream: str, partition: int, end: int, rows: int) -> int:
        del stream, partition
        return max(0, end - rows)

    def count(self, stream: str, partition: int, start: int, end: int) -> Count:
        del stream, partition
        return Count(max(0, end - start))

    def read(
        self, stream: str, partition: int, start: int, end: int | None = None
    ) -> Iterator[Batch]:
        return self._reader.read(self.stream(stream), partition, start, end)

    def wait(self, places: Mapping[str, Mapping[int, int]], timeout_s: float) -> bool:
        found = [(self.stream(name), wanted) for name, wanted in places.items()]
        return self._waiter.wait(found, timeout_s)

    # Tables

    def get(
        self, stream: str, keys: Sequence[bytes], at: Pin | None = None, *, settled: bool = False
    ) -> list[TableEntry | None]:
        del settled  # a commit is visible to everyone immediately
        return self._tables.get(self.stream(stream), keys, at)

    def page(
        self, stream: str, after: bytes | None = None, limit: int = 100, at: Pin | None = None
    ) -> list[TableEntry]:
        return self._tables.page(self.stream(stream), after, limit, at, self._limits.page_rows_max)

    def snapshot(self, stream: str) -> Iterator[list[TableEntry]]:
        return self._tables.snapshot(self.stream(stream))

    def pin(self, duration_s: float = 600.0) -> Pin:
        if not 0 < duration_s <= PIN_S_MAX:
            raise UsageError(f"a pin can last up to {PIN_S_MAX:.0f} seconds, not {duration_s}")
        return self._submit(lambda write: write_pin(write, duration_s), durable=False)

    def unpin(self, pin: Pin) -> None:
        # A pin expires by itself: nothing must fail because it could not be released early.
        with contextlib.suppress(LogBusyError, LogFullError, LogIOError):
            self._submit(
                lambda write: write.run("delete_pin", int(pin.token)),
                durable=False,
                timeout_ms=UNPIN_MS_MAX,
            )

    # Upkeep

    def maintain(self) -> Upkeep:
        return self._housekeeper.round(self.streams())

    def _keep_up(self) -> None:
        """Run a round in the background, unless another process has just done one."""
        values = {
            "now": now_us(),
            "interval": self._options.upkeep_interval_ms * 1000 // 2,
        }

        def claim(write: Write) -> int:
            before = write.connection.total_changes()
            write.run("claim_maintenance", values)
            write.dirty = write.connection.total_changes() > before
            return int(write.dirty)

        if self._submit_quietly(claim):
            self.maintain()

    def verify(self, progress: Report | None = None) -> Iterator[Damage]:
        return Verifier(self._pool, progress).run(self._directory)

    def backup(self, target: Path, progress: Report | None = None) -> None:
        back_up(self._pool, target, progress)

    def facts(self) -> dict[str, JsonValue]:
        with self._pool.lend() as connection:
            batches = sqlite.one(connection, "batch_count")
            streams = len(sqlite.many(connection, "stream_names"))
        wal = sqlite.wal_of(self._path)
        return {
            "engine": "embedded",
            "path": str(self._path),
            "format": sqlite.FORMAT,
            "sqlite": apsw.sqlite_lib_version(),
            "bytes": self._path.stat().st_size,
            "wal_bytes": wal.stat().st_size if wal.exists() else 0,
            "streams": streams,
            "upkeep_error": self._caretaker.last_error,
            "batches": int(batches[0]) if batches else 0,
        }

    # Inside

    def _submit(
        self, work: Callable[[Write], T], *, durable: bool = True, timeout_ms: int = 30_000
    ) -> T:
        return self._committer.submit(work, durable=durable, timeout_s=timeout_ms / 1000)

    def _submit_quietly(self, work: Callable[[Write], int]) -> int:
        return self._submit(work, durable=False)
